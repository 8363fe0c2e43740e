// Tensor maps, and which bytes a copy through one moves: rows of a box, clipped to the tensor, swizzled in shared
// memory.
//
// PTX ISA, "Tensors" (tiled mode, no interleave) and "Swizzling Modes". A copy without a tensor map is one row.
#pragma once
#include <algorithm>

#include "async.h"

namespace emu {

constexpr int kMaxRank = 5;
constexpr uint32_t kMapMagic = 0x454d5550;

// What emu_tensor_map_encode writes into a CUtensorMap. Kernels get it by value, so it holds no pointer of ours.
struct TensorMap {
  uint32_t magic;
  uint8_t type, rank, swizzle, fill_nan;
  char *global;
  uint64_t strides[kMaxRank];                    // bytes; the first is the size of an element
  uint32_t dims_less_one[kMaxRank];
  uint16_t box[kMaxRank];
};
static_assert(sizeof(TensorMap) <= 128, "a CUtensorMap has 128 bytes");

constexpr uint32_t kChunk = 16;                  // what a swizzle moves as one

// ---- types of tensor maps, by CUtensorMapDataType

struct MapType {
  int bytes;
  int element;                                   // EmuType that an addition works in, or 0
  uint32_t nan;                                  // 0 for integers
};
constexpr MapType kMapTypes[] = {
    {1, 0, 0},                  // u8
    {2, 0, 0},                  // u16
    {4, EMU_S32, 0},            // u32: adds as s32 does
    {4, EMU_S32, 0},            // s32
    {8, 0, 0},                  // u64
    {8, 0, 0},                  // s64
    {2, EMU_F16, 0x7fff},       // f16
    {4, EMU_F32, 0x7fffffff},   // f32
    {8, 0, 0x7fffffff},         // f64: its upper half
    {2, EMU_BF16, 0x7fff},      // bf16
    {4, EMU_F32, 0x7fffffff},   // f32, subnormals flushed: not done here
};
constexpr int kMapTypeCount = sizeof kMapTypes / sizeof *kMapTypes;

// ---- a copy in either direction: rows of contiguous bytes, in chunks

struct Transfer {
  bool is_tensor;
  TensorMap map;
  int32_t coordinates[kMaxRank];
  char *global;                                  // of a copy without a tensor map
  uint32_t shared, bytes;                        // in shared memory, clipped parts included
  int thread;
  Site site;
};

struct Row {                                     // `row_bytes` of shared memory from `shared` on (before the swizzle)
  uint32_t shared, row_bytes;
  uint32_t begin, end;                           // the part of the row that lies in the tensor
  char *global;                                  // address of byte `begin`
};

inline Row clip_inner(const TensorMap &map, int32_t coordinate, char *base) {
  const int64_t element = map.strides[0], dim = int64_t(map.dims_less_one[0]) + 1, box = map.box[0];
  const int64_t first = std::max<int64_t>(0, -int64_t(coordinate));
  const int64_t last = std::max(first, std::min(box, dim - coordinate));
  Row row;
  row.row_bytes = uint32_t(box * element);
  row.begin = uint32_t(std::min(first, box) * element);
  row.end = std::max(row.begin, uint32_t(std::min(last, box) * element));
  row.global = base + (int64_t(coordinate) + first) * element;
  return row;
}

template <class Visit>
void each_tensor_row(const Transfer &transfer, Visit visit) {
  const TensorMap &map = transfer.map;
  int rows = 1;
  for (int i = 1; i < map.rank; i++) rows *= map.box[i];
  for (int number = 0; number < rows; number++) {
    char *base = map.global;
    bool inside = true;
    for (int i = 1, left = number; i < map.rank; left /= map.box[i++]) {
      const int64_t at = int64_t(transfer.coordinates[i]) + left % map.box[i];
      inside &= at >= 0 && at <= int64_t(map.dims_less_one[i]);
      base += at * int64_t(map.strides[i]);
    }
    Row row = clip_inner(map, transfer.coordinates[0], base);
    row.shared = transfer.shared + uint32_t(number) * row.row_bytes;
    if (!inside) row.end = row.begin;
    visit(row);
  }
}

template <class Visit>
void each_row(const Transfer &transfer, Visit visit) {
  if (transfer.is_tensor) each_tensor_row(transfer, visit);
  else visit(Row{transfer.shared, transfer.bytes, 0, transfer.bytes, transfer.global});
}

struct Chunk {
  uint32_t shared;                               // swizzled
  uint32_t begin, end;                           // bytes of it that lie in the tensor; equal if none does
  char *global;                                  // address of byte `begin`
};

template <class Visit>
void each_chunk(const Transfer &transfer, Visit visit) {
  const int swizzle = transfer.is_tensor ? transfer.map.swizzle : 0;
  each_row(transfer, [&](const Row &row) {
    for (uint32_t at = 0; at < row.row_bytes; at += kChunk) {
      const uint32_t begin = std::max(row.begin, at), end = std::max(begin, std::min(row.end, at + kChunk));
      visit(Chunk{swizzled(row.shared + at, swizzle), begin - at, end - at, row.global + (begin - row.begin)});
    }
  });
}

}  // namespace emu
