// ldmatrix, stmatrix and mma: what the 32 lanes of a warp do together with small matrices (PTX ISA, "Warp Level Matrix
// Instructions").
//
// A row of ldmatrix and stmatrix counts as an access of the lane that gives its address. Products are summed in float
// in the order of k, which is not how a tensor core rounds; integer sums are exact.
#pragma GCC optimize("O3")  // the loops below are where an emulated product spends its time
#include "matrix.h"

#include <map>
#include <tuple>

#include "async.h"
#include "elements.h"

namespace emu {
namespace {

constexpr int kRowBytes = 16;

// ---- ldmatrix and stmatrix: up to four matrices of 8 x 8 elements of 16 bits. Lane 8 i + r gives the address of row r
// of matrix i; lane l holds, of each matrix, elements 2 (l % 4) and the next of row l / 4 (of column l / 4:
// transposed).

struct Rows {
  int matrices, transposed;
  uint32_t offset;                               // of this lane's row
  void *registers;
  Site site;
};
using Matrix = uint16_t[8][8];

Rows &rows_of(void **records, int lane) { return *static_cast<Rows *>(records[lane]); }

uint16_t &element(Matrix &matrix, const Rows &lane_rows, int lane, int i) {
  const int major = lane / 4, minor = 2 * (lane % 4) + i;
  return lane_rows.transposed ? matrix[minor][major] : matrix[major][minor];
}

void check_rows(void **records, unsigned mask, const char *name) {
  require_full_warp(name, mask, rows_of(records, __builtin_ctz(mask)).site);
  const Rows &first = rows_of(records, 0);
  uint32_t offsets[kWarp];
  for (int lane = 0; lane < 8 * first.matrices; lane++) {
    offsets[lane] = rows_of(records, lane).offset;
    if (offsets[lane] % kRowBytes)
      stop(Kind::misuse, first.site, "%s: the row at shared+0x%x, from lane %d, is not aligned to 16 bytes", name,
           offsets[lane], lane);
    require_shared(offsets[lane], kRowBytes, name, first.site);
  }
  const Space space = name[0] == 'l' ? Space::shared_read : Space::shared_write;
  count_matrix_rows(space, offsets, 8 * first.matrices, first.site);
}

void load_matrix(void **records, int index) {
  const int first = warp_of(current->id) * kWarp;
  Matrix matrix;
  for (int row = 0; row < 8; row++) {
    const Rows &from = rows_of(records, 8 * index + row);
    if (detecting()) shared_read(from.offset, kRowBytes, generic(first + 8 * index + row, from.site));
    memcpy(matrix[row], arena + from.offset, kRowBytes);
  }
  for (int lane = 0; lane < kWarp; lane++) {
    const Rows &to = rows_of(records, lane);
    const uint16_t pair[2] = {element(matrix, to, lane, 0), element(matrix, to, lane, 1)};
    memcpy(static_cast<char *>(to.registers) + 4 * index, pair, 4);
  }
}

void store_matrix(void **records, int index) {
  const int first = warp_of(current->id) * kWarp;
  Matrix matrix;
  for (int lane = 0; lane < kWarp; lane++) {
    const Rows &from = rows_of(records, lane);
    uint16_t pair[2];
    memcpy(pair, static_cast<char *>(from.registers) + 4 * index, 4);
    for (int i = 0; i < 2; i++) element(matrix, from, lane, i) = pair[i];
  }
  for (int row = 0; row < 8; row++) {
    const Rows &to = rows_of(records, 8 * index + row);
    if (detecting()) shared_write(to.offset, kRowBytes, generic(first + 8 * index + row, to.site));
    memcpy(arena + to.offset, matrix[row], kRowBytes);
  }
}

void perform_ldmatrix(void **records, unsigned mask) {
  check_rows(records, mask, "ldmatrix");
  for (int i = 0; i < rows_of(records, 0).matrices; i++) load_matrix(records, i);
}

void perform_stmatrix(void **records, unsigned mask) {
  check_rows(records, mask, "stmatrix");
  for (int i = 0; i < rows_of(records, 0).matrices; i++) store_matrix(records, i);
}

// The name tells lanes apart that execute different variants: those have diverged.
const char *variant(bool store, int matrices, bool transposed, Site site) {
  static const char *const loads[3][2] = {
      {"ldmatrix.x1", "ldmatrix.x1.trans"}, {"ldmatrix.x2", "ldmatrix.x2.trans"}, {"ldmatrix.x4", "ldmatrix.x4.trans"}};
  static const char *const stores[3][2] = {
      {"stmatrix.x1", "stmatrix.x1.trans"}, {"stmatrix.x2", "stmatrix.x2.trans"}, {"stmatrix.x4", "stmatrix.x4.trans"}};
  if (matrices != 1 && matrices != 2 && matrices != 4)
    stop(Kind::misuse, site, "%s of %d matrices; 1, 2 and 4 exist", store ? "stmatrix" : "ldmatrix", matrices);
  return (store ? stores : loads)[matrices / 2][transposed];
}

void move_matrices(bool store, int matrices, int transposed, const void *shared, void *registers, Site site) {
  const char *name = variant(store, matrices, transposed != 0, site);
  const bool gives_row = lane_of(current->id) < 8 * matrices;
  const uint32_t offset = gives_row ? shared_offset(shared, name, site) : 0;
  Rows rows{matrices, transposed, offset, registers, site};
  warp_collective(name, ~0u, &rows, store ? perform_stmatrix : perform_ldmatrix, false, site);
}

// ---- mma

struct Mma {
  Product product;
  void *c;
  const void *a, *b;
  Site site;
};

bool is_fp8(int type) { return type == EMU_E4M3 || type == EMU_E5M2; }

// The shapes of mma.sync that TileLang uses: m16n8, 16 or 32 bytes of k (all types), and m8n8k4 for f64.
bool is_emulated(const Product &p) {
  if (p.a_type == EMU_F64) return p.b_type == EMU_F64 && p.c_type == EMU_F64 && p.m == 8 && p.n == 8 && p.k == 4;
  const int row_bytes = p.k * type_bytes(p.a_type);
  if (p.m != 16 || p.n != 8 || (row_bytes != 16 && row_bytes != 32)) return false;
  if (is_byte_integer(p.a_type)) return is_byte_integer(p.b_type) && p.c_type == EMU_S32;
  if (is_fp8(p.a_type)) return is_fp8(p.b_type) && (p.c_type == EMU_F32 || p.c_type == EMU_F16);
  if (p.a_type != p.b_type) return false;
  if (p.a_type == EMU_F16) return p.c_type == EMU_F32 || p.c_type == EMU_F16;
  return (p.a_type == EMU_BF16 || p.a_type == EMU_TF32) && p.c_type == EMU_F32;
}

// Column l / 4 of B, k x 8: register h of lane l holds rows from h * 16 bytes + (l % 4) * 4 bytes on.
void load_b_fragment(int type, const void *const registers[kWarp], int k, float *tile) {
  const int row_bytes = k * type_bytes(type);
  char raw[8 * 32];
  for (int lane = 0; lane < kWarp; lane++) {
    auto from = static_cast<const char *>(registers[lane]);
    for (int h = 0; h < row_bytes / 16; h++)
      memcpy(raw + (lane / 4) * row_bytes + 16 * h + 4 * (lane % 4), from + 4 * h, 4);
  }
  float columns[8 * 32];
  decode(type, raw, 8 * k, columns);
  transpose(columns, 8, k, tile);
}

// m8n8k4: lane l holds A[l / 4][l % 4], B[l % 4][l / 4] and C[l / 4][2 (l % 4)] with its right neighbour.
void perform_f64(Mma *const lanes[kWarp]) {
  double a[8][4], b[4][8];
  for (int lane = 0; lane < kWarp; lane++) {
    memcpy(&a[lane / 4][lane % 4], lanes[lane]->a, 8);
    memcpy(&b[lane % 4][lane / 4], lanes[lane]->b, 8);
  }
  for (int lane = 0; lane < kWarp; lane++) {
    double c[2];
    memcpy(c, lanes[lane]->c, sizeof c);
    for (int i = 0; i < 2; i++)
      for (int k = 0; k < 4; k++) c[i] += a[lane / 4][k] * b[k][2 * (lane % 4) + i];
    memcpy(lanes[lane]->c, c, sizeof c);
  }
}

void perform_tile(const Product &product, Mma *const lanes[kWarp]) {
  const void *a_registers[kWarp], *b_registers[kWarp];
  void *c_registers[kWarp];
  for (int lane = 0; lane < kWarp; lane++) {
    a_registers[lane] = lanes[lane]->a;
    b_registers[lane] = lanes[lane]->b;
    c_registers[lane] = lanes[lane]->c;
  }
  alignas(32) float a[16 * 32], b[32 * 8], c[16 * 8];
  load_a_fragment(product.a_type, a_registers, product.k, a);
  load_b_fragment(product.b_type, b_registers, product.k, b);
  load_accumulators(product.c_type, c_registers, 8, true, c);
  multiply_add(a, b, c, 16, 8, product.k);
  store_accumulators(product.c_type, c_registers, 8, true, c);
}

void perform_mma(void **records, unsigned mask) {
  auto lanes = reinterpret_cast<Mma **>(records);
  require_full_warp("mma", mask, static_cast<Mma *>(records[__builtin_ctz(mask)])->site);
  const Mma &first = *lanes[0];
  const char *name = product_name("mma", first.product);
  if (!is_emulated(first.product)) stop(Kind::misuse, first.site, "%s is not emulated", name);
  for (int lane = 1; lane < kWarp; lane++)
    if (memcmp(&lanes[lane]->product, &first.product, sizeof first.product))
      stop(Kind::divergence, first.site, "lane %d executes %s while lane 0 executes %s", lane,
           product_name("mma", lanes[lane]->product), name);
  count_flops(name, 2.0 * first.product.m * first.product.n * first.product.k, first.site);
  if (first.product.a_type == EMU_F64) perform_f64(lanes);
  else perform_tile(first.product, lanes);
}

}  // namespace

// ---- elements

void decode(int type, const void *from, int count, float *out) {
  auto bytes = static_cast<const uint8_t *>(from);
  auto halves = reinterpret_cast<const uint16_t *>(bytes);
  auto words = reinterpret_cast<const uint32_t *>(bytes);
  switch (type) {
    case EMU_F16: for (int i = 0; i < count; i++) out[i] = decode_f16(halves[i]); break;
    case EMU_BF16: for (int i = 0; i < count; i++) out[i] = decode_bf16(halves[i]); break;
    case EMU_TF32: for (int i = 0; i < count; i++) out[i] = decode_tf32(words[i]); break;
    case EMU_F32: for (int i = 0; i < count; i++) out[i] = float_of(words[i]); break;
    case EMU_S8: for (int i = 0; i < count; i++) out[i] = float(int8_t(bytes[i])); break;
    case EMU_U8: for (int i = 0; i < count; i++) out[i] = float(bytes[i]); break;
    case EMU_E4M3: for (int i = 0; i < count; i++) out[i] = decode_e4m3(bytes[i]); break;
    case EMU_E5M2: for (int i = 0; i < count; i++) out[i] = decode_e5m2(bytes[i]); break;
    default: break;
  }
}

// ---- fragments

const char *product_name(const char *instruction, const Product &p) {
  static std::map<std::tuple<const char *, int, int, int, int, int, int>, std::string> names;
  std::string &name = names[std::make_tuple(instruction, p.a_type, p.b_type, p.c_type, p.m, p.n, p.k)];
  if (name.empty()) {
    char text[96];
    snprintf(text, sizeof text, "%s.m%dn%dk%d.%s.%s.%s", instruction, p.m, p.n, p.k, type_name(p.c_type),
             type_name(p.a_type), type_name(p.b_type));
    name = text;
  }
  return name.c_str();
}

void load_a_fragment(int type, const void *const registers[kWarp], int k, float *tile) {
  const int row_bytes = k * type_bytes(type);
  char raw[16 * 32];
  for (int lane = 0; lane < kWarp; lane++) {
    auto from = static_cast<const char *>(registers[lane]);
    for (int h = 0; h < row_bytes / 16; h++)
      for (int half = 0; half < 2; half++)
        memcpy(raw + (lane / 4 + 8 * half) * row_bytes + 16 * h + 4 * (lane % 4), from + 4 * (2 * h + half), 4);
  }
  decode(type, raw, 16 * k, tile);
}

// Calls visit(index in the lane's accumulators, element of the tile) for each pair of neighbouring columns.
template <class Visit>
static void each_pair(int lane, int n, Visit visit) {
  for (int block_of_8 = 0; block_of_8 < n / 8; block_of_8++)
    for (int half = 0; half < 2; half++)
      visit(4 * block_of_8 + 2 * half, (lane / 4 + 8 * half) * n + 8 * block_of_8 + 2 * (lane % 4));
}

void load_accumulators(int type, void *const registers[kWarp], int n, bool kept, float *tile) {
  if (!kept || type == EMU_S32) return std::fill(tile, tile + 16 * n, 0.0f);
  for (int lane = 0; lane < kWarp; lane++)
    each_pair(lane, n, [&](int i, int at) {
      if (type == EMU_F16) decode(type, static_cast<uint16_t *>(registers[lane]) + i, 2, tile + at);
      else memcpy(tile + at, static_cast<float *>(registers[lane]) + i, 8);
    });
}

static void store_pair(int type, void *registers, int i, bool kept, const float *pair) {
  if (type == EMU_F32) {
    memcpy(static_cast<float *>(registers) + i, pair, 8);
  } else if (type == EMU_F16) {
    for (int e = 0; e < 2; e++) static_cast<uint16_t *>(registers)[i + e] = encode_f16(pair[e]);
  } else {
    auto sums = static_cast<uint32_t *>(registers) + i;
    for (int e = 0; e < 2; e++) sums[e] = (kept ? sums[e] : 0) + uint32_t(int32_t(pair[e]));
  }
}

void store_accumulators(int type, void *const registers[kWarp], int n, bool kept, const float *tile) {
  for (int lane = 0; lane < kWarp; lane++)
    each_pair(lane, n, [&](int i, int at) { store_pair(type, registers[lane], i, kept, tile + at); });
}

typedef float Float8 __attribute__((vector_size(32), aligned(4), may_alias));

// Four rows and eight columns at a time, so that sums stay in registers.
void multiply_add(const float *a, const float *b, float *c, int rows, int columns, int depth) {
  for (int row = 0; row < rows; row += 4)
    for (int column = 0; column < columns; column += 8) {
      const float *a_row = a + row * depth;
      Float8 sum[4];
      for (int i = 0; i < 4; i++) sum[i] = *reinterpret_cast<const Float8 *>(c + (row + i) * columns + column);
      for (int k = 0; k < depth; k++) {
        const Float8 b_row = *reinterpret_cast<const Float8 *>(b + k * columns + column);
        for (int i = 0; i < 4; i++) sum[i] += a_row[i * depth + k] * b_row;
      }
      for (int i = 0; i < 4; i++) *reinterpret_cast<Float8 *>(c + (row + i) * columns + column) = sum[i];
    }
}

void transpose(const float *from, int rows, int columns, float *to) {
  for (int row = 0; row < rows; row++)
    for (int column = 0; column < columns; column++) to[column * rows + row] = from[row * columns + column];
}

}  // namespace emu

using namespace emu;

extern "C" {

void emu_ldmatrix(int matrices, int transposed, const void *shared, void *registers) {
  move_matrices(false, matrices, transposed, shared, registers, site_of(EMU_PC()));
}

void emu_stmatrix(int matrices, int transposed, void *shared, const int32_t *registers) {
  move_matrices(true, matrices, transposed, shared, const_cast<int32_t *>(registers), site_of(EMU_PC()));
}

void emu_mma(int a_type, int b_type, int c_type, int m, int n, int k, void *c, const void *a, const void *b) {
  const Site site = site_of(EMU_PC());
  Mma mma{{a_type, b_type, c_type, m, n, k}, c, a, b, site};
  warp_collective("mma", ~0u, &mma, perform_mma, false, site);
}

}  // extern "C"
