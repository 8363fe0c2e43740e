// wgmma: matrix products of a warpgroup, with operands in shared memory that are read asynchronously (PTX ISA,
// "Asynchronous Warpgroup Level Matrix Instructions", "Matrix Descriptor", "Shared Memory Matrix Layout").
//
// Each of the four warps of a warpgroup computes its 16 rows of the 64. A product is done at its wait (late, random) or
// at issue (early); what is checked does not depend on that and happens at the wait: its operands must have been
// written, fenced and ordered when it was issued and not have changed since. Reads belong to one agent a warpgroup,
// whose clock is the number of the wgmma group: a wait of one warp makes known that all four are done with it, as the
// hardware completes them together. A warp may run ahead of the others here, so a single thread of a warpgroup that
// frees operands for all of them (CUTLASS has such, TileLang does not) could look like a bug. Not modelled:
// descriptors' base offset, sparsity, and shared-memory traffic of the operands in the counters.
#include <algorithm>
#include <utility>

#include "async.h"
#include "elements.h"
#include "matrix.h"

namespace emu {

// An operand in shared memory: rows of A, or columns of B, are its mn index. It is read in pieces of 16 bytes.
struct Operand {
  uint64_t descriptor = 0;
  bool mn_major = false;
  int type = 0, first_mn = 0, count_mn = 0;
  std::vector<uint32_t> pieces;                  // shared offsets; K-major: mn, then k; MN-major: k, then mn
};

struct Wgmma {
  Product product;
  bool a_in_registers, accumulate, executed;
  int a_sign, b_sign;
  Operand a, b;
  const void *a_registers[kWarp];
  void *c[kWarp];
  Moment issue;
  Clock group;
  Site site;
};

namespace {

constexpr int kPiece = 16;
constexpr int kDepthBytes = 32;                  // k of every type
constexpr int kWarpsInGroup = 4;
Pool<Wgmma> pool;

int first_thread() { return warp_of(current->id) * kWarp; }
Warp &running_warp() { return block.warp[warp_of(current->id)]; }
int first_warp_of_group() { return warp_of(current->id) / kWarpsInGroup * kWarpsInGroup; }
int agent_of_group() { return wgmma_agent(first_warp_of_group()); }
bool has_whole_group() { return (first_warp_of_group() + kWarpsInGroup) * kWarp <= block.threads; }

// ---- descriptors

struct Descriptor {
  uint32_t start, leading, stride;               // bytes
  int swizzle;                                   // 0 none; 1, 2, 3: 32, 64, 128 bytes
};

Descriptor decode_descriptor(uint64_t bits, Site site) {
  static const int swizzle_of_type[] = {0, 3, 2, 1};
  const int base_offset = bits >> 49 & 7;
  if (base_offset) stop(Kind::misuse, site, "wgmma: a descriptor with base offset %d is not emulated", base_offset);
  auto field = [&](int low) { return uint32_t(bits >> low & 0x3fff) * kPiece; };
  return Descriptor{field(0), field(16), field(32), swizzle_of_type[bits >> 62]};
}

// K-major: groups of 8 rows `stride` apart; in a row, k runs on (no swizzle: the second piece is `leading` away).
uint32_t k_major_piece(const Descriptor &d, int mn, int k_piece) {
  if (d.swizzle == 0) return d.start + mn % 8 * kPiece + mn / 8 * d.stride + k_piece * d.leading;
  const int row_bytes = kPiece << d.swizzle;
  return d.start + mn % 8 * row_bytes + mn / 8 * d.stride + k_piece * kPiece;
}

// MN-major: rows of constant k hold as many pieces as the swizzle is wide; the next ones are `leading` away. Groups of
// 8 rows are `stride` apart. Without swizzle the two distances change places (cute/arch/mma_sm90_desc.hpp).
uint32_t mn_major_piece(const Descriptor &d, int mn_piece, int k) {
  if (d.swizzle == 0) return d.start + mn_piece * d.stride + k % 8 * kPiece + k / 8 * d.leading;
  const int pieces_in_row = 1 << d.swizzle;
  return d.start + mn_piece % pieces_in_row * kPiece + mn_piece / pieces_in_row * d.leading +
         k % 8 * (kPiece << d.swizzle) + k / 8 * d.stride;
}

void find_pieces(Operand &operand, int k, Site site) {
  const Descriptor d = decode_descriptor(operand.descriptor, site);
  const int in_piece = kPiece / type_bytes(operand.type);
  operand.pieces.clear();
  auto add = [&](uint32_t address) {
    const uint32_t offset = swizzled(address, d.swizzle);
    require_shared(offset, kPiece, "wgmma operand", site);
    operand.pieces.push_back(offset);
  };
  if (operand.mn_major) {
    const int first = operand.first_mn / in_piece, count = operand.count_mn / in_piece;
    for (int depth = 0; depth < k; depth++)
      for (int i = 0; i < count; i++) add(mn_major_piece(d, first + i, depth));
  } else {
    for (int mn = 0; mn < operand.count_mn; mn++)
      for (int piece = 0; piece < kDepthBytes / kPiece; piece++) add(k_major_piece(d, operand.first_mn + mn, piece));
  }
}

// ---- execution

// The operand as floats in the order of its pieces: [mn, k] for K-major, [k, mn] for MN-major.
void load(const Operand &operand, float *tile) {
  static char raw[256 * kDepthBytes];
  char *to = raw;
  for (uint32_t offset : operand.pieces) {
    memcpy(to, arena + offset, kPiece);
    to += kPiece;
  }
  decode(operand.type, raw, int(to - raw) / type_bytes(operand.type), tile);
}

const float *load_a(const Wgmma &wgmma) {
  static float tile[16 * kDepthBytes], transposed[16 * kDepthBytes];
  const int k = wgmma.product.k;
  if (wgmma.a_in_registers) {
    load_a_fragment(wgmma.a.type, wgmma.a_registers, k, tile);
    return tile;
  }
  load(wgmma.a, tile);
  if (!wgmma.a.mn_major) return tile;
  transpose(tile, k, 16, transposed);
  return transposed;
}

const float *load_b(const Wgmma &wgmma) {
  static float tile[256 * kDepthBytes], transposed[256 * kDepthBytes];
  load(wgmma.b, tile);
  if (wgmma.b.mn_major) return tile;
  transpose(tile, wgmma.product.n, wgmma.product.k, transposed);
  return transposed;
}

void execute(Wgmma &wgmma) {
  static float a[16 * kDepthBytes], c[16 * 256];
  const Product &p = wgmma.product;
  const float sign = float(wgmma.a_sign * wgmma.b_sign), *from = load_a(wgmma);
  for (int i = 0; i < 16 * p.k; i++) a[i] = from[i] * sign;
  load_accumulators(p.c_type, wgmma.c, p.n, wgmma.accumulate, c);
  multiply_add(a, load_b(wgmma), c, 16, p.n, p.k);
  store_accumulators(p.c_type, wgmma.c, p.n, wgmma.accumulate, c);
  wgmma.executed = true;
}

// ---- checks

// Calls visit(offset, bytes) for runs of neighbouring pieces. The swizzle permutes them, so a run grows at both ends.
template <class Visit>
void each_run(const Operand &operand, Visit visit) {
  uint32_t begin = 0, end = 0;
  for (uint32_t piece : operand.pieces) {
    if (end > begin && piece == end) {
      end += kPiece;
    } else if (end > begin && piece + kPiece == begin) {
      begin = piece;
    } else {
      if (end > begin) visit(begin, int(end - begin));
      begin = piece;
      end = piece + kPiece;
    }
  }
  if (end > begin) visit(begin, int(end - begin));
}

// Changes that are ordered after the issue are found by shared_unchanged_since alone, hence today's clocks in `seen`.
void check_operand(const Operand &operand, const Wgmma &wgmma) {
  const int thread = first_thread();
  Access access = generic(thread, wgmma.site);
  access.epoch = Epoch{wgmma.group, agent_of_group(), wgmma.site, block.number};
  access.async_proxy = true;
  access.fenced = wgmma.issue.fenced.data();
  each_run(operand, [&](uint32_t offset, int bytes) {
    shared_unchanged_since(offset, bytes, wgmma.issue.clocks.data(), thread, wgmma.site, "a wgmma");
    shared_read(offset, bytes, access);
  });
}

void complete(Wgmma *wgmma) {
  if (!wgmma->executed) execute(*wgmma);
  if (detecting()) {
    if (!wgmma->a_in_registers) check_operand(wgmma->a, *wgmma);
    check_operand(wgmma->b, *wgmma);
  }
  pool.give_back(wgmma);
}

// The warp's threads know that the warpgroup's reads up to `group` are over.
void learn_reads(Clock group) {
  for (int thread = first_thread(); thread < first_thread() + kWarp; thread++) {
    Clock &known = clocks_of(thread)[agent_of_group()];
    known = std::max(known, group);
  }
}

// ---- issue

struct Call {                                    // one lane's
  Product product;
  int a_mn_major, b_mn_major, a_sign, b_sign, accumulate;
  uint64_t a_descriptor, b_descriptor;
  const uint32_t *a;
  uint32_t *c;
  Site site;
};

bool is_fp8(int type) { return type == EMU_E4M3 || type == EMU_E5M2; }

bool has_types(const Product &p) {
  if (is_byte_integer(p.a_type)) return is_byte_integer(p.b_type) && p.c_type == EMU_S32;
  if (is_fp8(p.a_type)) return is_fp8(p.b_type) && (p.c_type == EMU_F32 || p.c_type == EMU_F16);
  if (p.a_type != p.b_type) return false;
  if (p.a_type == EMU_F16) return p.c_type == EMU_F32 || p.c_type == EMU_F16;
  return (p.a_type == EMU_BF16 || p.a_type == EMU_TF32) && p.c_type == EMU_F32;
}

// n is a multiple of 8 up to 256; integer products have fewer: multiples of 16, and 8 and 24.
bool has_shape(const Product &p) {
  if (p.n < 8 || p.n > 256 || p.n % 8 || p.k * type_bytes(p.a_type) != kDepthBytes) return false;
  return !is_byte_integer(p.a_type) || p.n % 16 == 0 || p.n == 8 || p.n == 24;
}

void check_call(const Call &call) {
  const Product &p = call.product;
  const char *name = product_name("wgmma", p);
  if (!has_types(p) || !has_shape(p)) stop(Kind::misuse, call.site, "%s does not exist or is not emulated", name);
  if (type_bytes(p.a_type) != 2 && (call.a_mn_major || call.b_mn_major))
    stop(Kind::misuse, call.site, "%s: only operands of 16 bits may be MN-major", name);
  if (!has_whole_group())
    stop(Kind::misuse, call.site, "%s needs a warpgroup of 128 threads; the block has %d", name, block.threads);
  if (!running_warp().wgmma_fenced)
    finding(Kind::misuse, call.site, {}, "%s without a wgmma.fence since %s", name,
            running_warp().wgmma_clock == 1 ? "the kernel began" : "the latest wgmma.wait_group");
}

void check_lanes_agree(void **records) {
  const Call &first = *static_cast<Call *>(records[0]);
  for (int lane = 1; lane < kWarp; lane++) {
    const Call &call = *static_cast<Call *>(records[lane]);
    if (call.site != first.site)
      stop(Kind::divergence, first.site, "lane %d executes another wgmma than lane 0", lane);
    if (call.a_descriptor != first.a_descriptor || call.b_descriptor != first.b_descriptor ||
        call.accumulate != first.accumulate)
      stop(Kind::misuse, first.site, "wgmma: descriptors or scale-d of lanes 0 and %d differ", lane);
  }
}

void set_operand(Operand &operand, uint64_t descriptor, bool mn_major, int type, int first_mn, int count_mn) {
  operand.descriptor = descriptor;
  operand.mn_major = mn_major;
  operand.type = type;
  operand.first_mn = first_mn;
  operand.count_mn = count_mn;
  operand.pieces.clear();
}

Wgmma *make(void **records) {
  const Call &call = *static_cast<Call *>(records[0]);
  const Product &p = call.product;
  Wgmma *wgmma = pool.take();
  wgmma->product = p;
  wgmma->a_in_registers = call.a != nullptr;
  wgmma->accumulate = call.accumulate != 0;
  wgmma->executed = false;
  wgmma->a_sign = call.a_sign;
  wgmma->b_sign = call.b_sign;
  wgmma->site = call.site;
  wgmma->group = running_warp().wgmma_clock;
  for (int lane = 0; lane < kWarp; lane++) {
    wgmma->a_registers[lane] = static_cast<Call *>(records[lane])->a;
    wgmma->c[lane] = static_cast<Call *>(records[lane])->c;
  }
  const int first_row = warp_of(current->id) % kWarpsInGroup * 16;
  set_operand(wgmma->a, call.a_descriptor, call.a_mn_major != 0, p.a_type, first_row, 16);
  set_operand(wgmma->b, call.b_descriptor, call.b_mn_major != 0, p.b_type, 0, p.n);
  if (!wgmma->a_in_registers) find_pieces(wgmma->a, p.k, call.site);
  find_pieces(wgmma->b, p.k, call.site);
  wgmma->issue.take(first_thread());
  return wgmma;
}

void perform_issue(void **records, unsigned mask) {
  const Call &call = *static_cast<Call *>(records[__builtin_ctz(mask)]);
  require_full_warp("wgmma", mask, call.site);
  check_lanes_agree(records);
  check_call(call);
  Wgmma *wgmma = make(records);
  if (detecting()) tick(first_thread());         // its later writes are not known to the product
  count_flops(product_name("wgmma", call.product), 2.0 * 16 * call.product.n * call.product.k, call.site);
  if (emu_settings.async_mode == kEarly) execute(*wgmma);
  running_warp().wgmmas.push_back(wgmma);
}

struct Wait {
  int groups_left;
  Site site;
};

void perform_wait(void **records, unsigned mask) {
  const Wait &wait = *static_cast<Wait *>(records[__builtin_ctz(mask)]);
  require_full_warp("wgmma.wait_group", mask, wait.site);
  Warp &warp = running_warp();
  while (int(warp.wgmma_groups.size()) > wait.groups_left) {
    for (Wgmma *wgmma : warp.wgmma_groups.front()) complete(wgmma);
    warp.wgmma_groups.pop_front();
  }
  warp.wgmma_fenced = false;
  const Clock finished = warp.wgmma_clock - 1 - Clock(warp.wgmma_groups.size());
  if (detecting() && has_whole_group()) learn_reads(finished);
}

void perform_commit(void **, unsigned) {
  Warp &warp = running_warp();
  warp.wgmma_groups.push_back(std::move(warp.wgmmas));
  warp.wgmmas.clear();
  warp.wgmma_clock++;
}

void perform_fence(void **, unsigned) { running_warp().wgmma_fenced = true; }

// ---- registers in flight, and what is left at the end

bool overlaps(const void *begin, int bytes, const char *from, int from_bytes) {
  return from + from_bytes > begin && from < static_cast<const char *>(begin) + bytes;
}

bool holds(const Wgmma &wgmma, int lane, const char *pointer, int bytes) {
  const Product &p = wgmma.product;
  const int c_bytes = 16 * p.n / kWarp * type_bytes(p.c_type), a_bytes = 16 * kDepthBytes / kWarp;
  if (overlaps(wgmma.c[lane], c_bytes, pointer, bytes)) return true;
  return wgmma.a_in_registers && overlaps(wgmma.a_registers[lane], a_bytes, pointer, bytes);
}

void leave(std::vector<Wgmma *> &wgmmas, const char *what) {
  for (Wgmma *wgmma : wgmmas) {
    finding(Kind::leak, wgmma->site, {}, "a wgmma was never %s before the kernel's end", what);
    pool.give_back(wgmma);
  }
  wgmmas.clear();
}

}  // namespace

bool wgmma_registers_in_flight(int thread, const void *pointer, int bytes) {
  const Warp &warp = block.warp[warp_of(thread)];
  if (warp.wgmmas.empty() && warp.wgmma_groups.empty()) return false;
  auto from = static_cast<const char *>(pointer);
  auto touched = [&](const std::vector<Wgmma *> &wgmmas) {
    return std::any_of(wgmmas.begin(), wgmmas.end(),
                       [&](const Wgmma *wgmma) { return holds(*wgmma, lane_of(thread), from, bytes); });
  };
  return touched(warp.wgmmas) || std::any_of(warp.wgmma_groups.begin(), warp.wgmma_groups.end(), touched);
}

void wgmma_finish() {
  for (Warp &warp : block.warp) {
    leave(warp.wgmmas, "committed");
    for (auto &group : warp.wgmma_groups) leave(group, "waited for");
    warp.wgmma_groups.clear();
  }
}

}  // namespace emu

using namespace emu;

extern "C" {

void emu_wgmma(int a_type, int b_type, int c_type, int n, int k, int a_mn_major, int b_mn_major, int a_sign, int b_sign,
               uint64_t a_descriptor, const uint32_t *a, uint64_t b_descriptor, uint32_t *c, int accumulate) {
  const Site site = site_of(EMU_PC());
  block.has_async_proxy = true;
  Call call{{a_type, b_type, c_type, 64, n, k}, a_mn_major, b_mn_major, a_sign, b_sign, accumulate, a_descriptor,
            b_descriptor, a, c, site};
  warp_collective("wgmma", ~0u, &call, perform_issue, false, site);
}

void emu_wgmma_fence(void) {
  const Site site = site_of(EMU_PC());
  count_wait("wgmma.fence", site);
  warp_collective("wgmma.fence", ~0u, nullptr, perform_fence, false, site);
}

void emu_wgmma_commit(void) {
  warp_collective("wgmma.commit_group", ~0u, nullptr, perform_commit, false, site_of(EMU_PC()));
}

void emu_wgmma_wait(int groups_left) {
  Wait wait{groups_left, site_of(EMU_PC())};
  count_wait("wgmma.wait_group", wait.site);
  warp_collective("wgmma.wait_group", ~0u, &wait, perform_wait, false, wait.site);
}

}  // extern "C"
