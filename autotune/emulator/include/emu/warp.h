// Warp collectives: shuffles, votes, matches, reductions. All go through emu_warp_collective: each lane hands in a
// record, and the last lane to arrive fills in everybody's result.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emu/abi.h"
#include "emu/float16.h"
#include "emu/index.h"

namespace emu {

constexpr unsigned kFullMask = 0xffffffffu;

EMU_INLINE int lane() { return emu_thread() % 32; }

// ---- shuffles

struct ShuffleRecord {
  uint64_t value;  // in: this lane's; out: the source lane's
  uint64_t result;
  int source;
  bool outside;  // the source lane takes no part: its value is undefined
};

EMU_UNCHECKED inline void shuffle(void **records, unsigned mask) {
  for (int i = 0; i < 32; i++) {
    if (!(mask >> i & 1)) continue;
    auto *mine = static_cast<ShuffleRecord *>(records[i]);
    mine->outside = !(mask >> mine->source & 1);
    if (!mine->outside) mine->result = static_cast<ShuffleRecord *>(records[mine->source])->value;
  }
}

template <class T>
EMU_INLINE T shuffle_from(const char *name, unsigned mask, T value, int source) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8, "shuffles move at most 8 bytes");
  ShuffleRecord record{0, 0, source, false};
  __builtin_memcpy(&record.value, &value, sizeof(T));
  emu_warp_collective(name, mask, &record, shuffle, 0);
  if (record.outside) emu_fail("a shuffle reads a lane that is not in its mask");
  T result;
  __builtin_memcpy(&result, &record.result, sizeof(T));
  return result;
}

EMU_INLINE int segment(int width) { return lane() & ~(width - 1); }  // first lane of this lane's part of the warp

// ---- votes and matches

struct VoteRecord {
  uint64_t value;
  unsigned lanes;
};

EMU_UNCHECKED inline void vote(void **records, unsigned mask) {
  unsigned lanes = 0;
  for (int i = 0; i < 32; i++) {
    if (mask >> i & 1 && static_cast<VoteRecord *>(records[i])->value) lanes |= 1u << i;
  }
  for (int i = 0; i < 32; i++) {
    if (mask >> i & 1) static_cast<VoteRecord *>(records[i])->lanes = lanes;
  }
}

EMU_UNCHECKED inline void match(void **records, unsigned mask) {
  for (int i = 0; i < 32; i++) {
    if (!(mask >> i & 1)) continue;
    auto *mine = static_cast<VoteRecord *>(records[i]);
    mine->lanes = 0;
    for (int j = 0; j < 32; j++) {
      if (mask >> j & 1 && static_cast<VoteRecord *>(records[j])->value == mine->value) mine->lanes |= 1u << j;
    }
  }
}

EMU_INLINE unsigned vote_lanes(const char *name, unsigned mask, bool predicate) {
  VoteRecord record{predicate, 0};
  emu_warp_collective(name, mask, &record, vote, 0);
  return record.lanes;
}

template <class T>
EMU_INLINE unsigned matching_lanes(const char *name, unsigned mask, T value) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8, "matches compare at most 8 bytes");
  VoteRecord record{0, 0};
  __builtin_memcpy(&record.value, &value, sizeof(T));
  emu_warp_collective(name, mask, &record, match, 0);
  return record.lanes;
}

// ---- reductions

template <class T, class Operation>
EMU_UNCHECKED void reduce(void **records, unsigned mask) {
  bool first = true;
  T result{};
  for (int i = 0; i < 32; i++) {
    if (!(mask >> i & 1)) continue;
    T value = *static_cast<T *>(records[i]);
    result = first ? value : Operation::apply(result, value);
    first = false;
  }
  for (int i = 0; i < 32; i++) {
    if (mask >> i & 1) *static_cast<T *>(records[i]) = result;
  }
}

#define EMU_REDUCTION(NAME, EXPRESSION)                                  \
  struct NAME {                                                          \
    template <class T>                                                   \
    static EMU_UNCHECKED T apply(T a, T b) { return EXPRESSION; }        \
  };
EMU_REDUCTION(ReduceAdd, a + b)
EMU_REDUCTION(ReduceMin, b < a ? b : a)
EMU_REDUCTION(ReduceMax, a < b ? b : a)
EMU_REDUCTION(ReduceAnd, a & b)
EMU_REDUCTION(ReduceOr, a | b)
EMU_REDUCTION(ReduceXor, a ^ b)
#undef EMU_REDUCTION

template <class Operation, class T>
EMU_INLINE T reduce_lanes(const char *name, unsigned mask, T value) {
  emu_warp_collective(name, mask, &value, reduce<T, Operation>, 0);
  return value;
}

}  // namespace emu

EMU_INLINE void __syncwarp(unsigned mask = emu::kFullMask) {
  emu_warp_collective("__syncwarp", mask, nullptr, nullptr, 1);
}

template <class T>
EMU_INLINE T __shfl_sync(unsigned mask, T value, int source_lane, int width = warpSize) {
  return emu::shuffle_from("__shfl_sync", mask, value, emu::segment(width) | (source_lane & (width - 1)));
}

// A source outside the segment leaves the lane its own value.
template <class T>
EMU_INLINE T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize) {
  int source = emu::lane() ^ lane_mask;
  if (source >= emu::segment(width) + width) source = emu::lane();
  return emu::shuffle_from("__shfl_xor_sync", mask, value, source);
}
template <class T>
EMU_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
  int source = emu::lane() + int(delta);
  if (source >= emu::segment(width) + width) source = emu::lane();
  return emu::shuffle_from("__shfl_down_sync", mask, value, source);
}
template <class T>
EMU_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
  int source = emu::lane() - int(delta);
  if (source < emu::segment(width)) source = emu::lane();
  return emu::shuffle_from("__shfl_up_sync", mask, value, source);
}

EMU_INLINE unsigned __ballot_sync(unsigned mask, int predicate) {
  return emu::vote_lanes("__ballot_sync", mask, predicate);
}
EMU_INLINE int __any_sync(unsigned mask, int predicate) { return emu::vote_lanes("__any_sync", mask, predicate) != 0; }
EMU_INLINE int __all_sync(unsigned mask, int predicate) { return emu::vote_lanes("__all_sync", mask, !predicate) == 0; }

template <class T>
EMU_INLINE unsigned __match_any_sync(unsigned mask, T value) {
  return emu::matching_lanes("__match_any_sync", mask, value);
}
template <class T>
EMU_INLINE unsigned __match_all_sync(unsigned mask, T value, int *predicate) {
  *predicate = emu::matching_lanes("__match_all_sync", mask, value) == mask;
  return *predicate ? mask : 0;
}

#define EMU_REDUCE(NAME, OPERATION)                                                                              \
  EMU_INLINE unsigned NAME(unsigned mask, unsigned x) { return emu::reduce_lanes<emu::OPERATION>(#NAME, mask, x); } \
  EMU_INLINE int NAME(unsigned mask, int x) { return emu::reduce_lanes<emu::OPERATION>(#NAME, mask, x); }
EMU_REDUCE(__reduce_add_sync, ReduceAdd)
EMU_REDUCE(__reduce_min_sync, ReduceMin)
EMU_REDUCE(__reduce_max_sync, ReduceMax)
EMU_REDUCE(__reduce_and_sync, ReduceAnd)
EMU_REDUCE(__reduce_or_sync, ReduceOr)
EMU_REDUCE(__reduce_xor_sync, ReduceXor)
#undef EMU_REDUCE
