// TMA: tensor and bulk copies. Multicast, im2col, gather and copies between the blocks of a cluster are not covered.
#pragma once
#include "barrier.h"
#include "common.h"

namespace tl {

enum class CacheHintSm90 : uint64_t {
  EVICT_NORMAL = 0x1000000000000000,
  EVICT_FIRST = 0x12F0000000000000,
  EVICT_LAST = 0x14F0000000000000,
};

// ---- global to shared; the barrier is told when the bytes are there

template <CacheHintSm90 = CacheHintSm90::EVICT_NORMAL, class Barrier = uint64_t, class... Coordinates>
TL_DEVICE void tma_load(const CUtensorMap &map, Barrier &barrier, const void *shared, Coordinates... coordinates) {
  static_assert(1 <= sizeof...(Coordinates) && sizeof...(Coordinates) <= 5);
  const int32_t at[] = {int32_t(coordinates)...};
  emu_tma_load(&map, emu::barrier_address(barrier), const_cast<void *>(shared), sizeof...(Coordinates), at);
}

template <class Barrier = uint64_t>
TL_DEVICE void tma_load(void *shared, const void *global, Barrier &barrier, uint32_t bytes) {
  emu_bulk_load(shared, global, emu::barrier_address(barrier), bytes);
}

// ---- shared to global

template <CacheHintSm90 = CacheHintSm90::EVICT_NORMAL, class... Coordinates>
TL_DEVICE void tma_store(const CUtensorMap &map, const void *shared, Coordinates... coordinates) {
  static_assert(1 <= sizeof...(Coordinates) && sizeof...(Coordinates) <= 5);
  const int32_t at[] = {int32_t(coordinates)...};
  emu_tma_store(&map, shared, sizeof...(Coordinates), at, 0);
}

template <CacheHintSm90 = CacheHintSm90::EVICT_NORMAL>
TL_DEVICE void tma_store(void *global, void *shared, uint32_t bytes) { emu_bulk_store(global, shared, bytes, 0); }

template <bool = false, class... Coordinates>
TL_DEVICE void tma_store_add(const CUtensorMap &map, const void *shared, Coordinates... coordinates) {
  static_assert(1 <= sizeof...(Coordinates) && sizeof...(Coordinates) <= 5);
  const int32_t at[] = {int32_t(coordinates)...};
  emu_tma_store(&map, shared, sizeof...(Coordinates), at, 1);
}

template <bool = false>
TL_DEVICE void tma_store_add(float *shared, float *global, const int32_t &bytes) {
  emu_bulk_store(global, shared, uint32_t(bytes), 1);
}

template <bool = false>
TL_DEVICE void prefetch_tma_descriptor(const CUtensorMap &map) { emu_tma_prefetch(&map); }

}  // namespace tl
