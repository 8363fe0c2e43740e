// mbarriers and proxy fences. Barriers of other blocks of a cluster are not covered.
#pragma once
#include "common.h"

namespace tl {

TL_DEVICE void mbarrier_init(uint64_t &barrier, uint32_t count) { emu_mbarrier_init(&barrier, count); }

TL_DEVICE void mbarrier_wait(uint64_t &barrier, int parity) { emu_mbarrier_wait(&barrier, uint32_t(parity)); }
TL_DEVICE void mbarrier_test_wait(uint64_t &barrier, int parity) { emu_mbarrier_wait(&barrier, uint32_t(parity)); }
TL_DEVICE uint32_t mbarrier_try_wait(uint64_t &barrier, int parity) {
  return uint32_t(emu_mbarrier_test(&barrier, uint32_t(parity)));
}
TL_DEVICE bool mbarrier_test_wait(uint64_t &barrier, int parity, uint32_t predicate) {
  return predicate == 1 && emu_mbarrier_test(&barrier, uint32_t(parity));
}

TL_DEVICE void mbarrier_arrive(uint64_t &barrier) { emu_mbarrier_arrive(&barrier, 1); }
TL_DEVICE void mbarrier_expect_tx(uint64_t &barrier, uint32_t bytes) { emu_mbarrier_expect_tx(&barrier, bytes); }
TL_DEVICE void mbarrier_arrive_expect_tx(uint64_t &barrier, uint32_t bytes) {
  emu_mbarrier_expect_tx(&barrier, bytes);
  emu_mbarrier_arrive(&barrier, 1);
}

}  // namespace tl

namespace emu {

// Instructions take a barrier, or a pointer to one.
template <class Barrier>
EMU_INLINE void *barrier_address(Barrier &barrier) {
  if constexpr (std::is_pointer_v<Barrier>) {
    return (void *)barrier;
  } else {
    return (void *)&barrier;
  }
}

}  // namespace emu

namespace tl {

template <class Barrier = uint64_t>
TL_DEVICE void mbarrier_cp_async_arrive(Barrier &barrier) {
  emu_cp_async_mbarrier_arrive(emu::barrier_address(barrier), 0);
}
template <class Barrier = uint64_t>
TL_DEVICE void mbarrier_cp_async_arrive_noinc(Barrier &barrier) {
  emu_cp_async_mbarrier_arrive(emu::barrier_address(barrier), 1);
}

template <bool = false>
TL_DEVICE void fence_proxy_async() { emu_fence_proxy_async(); }
template <bool = false>
TL_DEVICE void fence_barrier_init() { emu_fence_mbarrier_init(); }

template <bool = false>
TL_DEVICE void tma_store_arrive() { emu_bulk_commit(); }
template <int groups_left, bool read = true, bool = false>
TL_DEVICE void tma_store_wait() { emu_bulk_wait(groups_left, read); }

}  // namespace tl

struct alignas(8) Barrier {
  Barrier() = delete;

  TL_DEVICE void init(uint32_t count) const { tl::mbarrier_init(storage(), count); }
  TL_DEVICE void wait(uint32_t parity) const { tl::mbarrier_wait(storage(), int(parity)); }
  TL_DEVICE bool try_wait(uint32_t parity) const { return tl::mbarrier_try_wait(storage(), int(parity)); }
  TL_DEVICE bool test_wait(uint32_t parity, uint32_t predicate = 1) const {
    return tl::mbarrier_test_wait(storage(), int(parity), predicate);
  }
  TL_DEVICE void arrive() const { tl::mbarrier_arrive(storage()); }
  TL_DEVICE void expect_transaction(uint32_t bytes) const { tl::mbarrier_expect_tx(storage(), bytes); }
  TL_DEVICE void arrive_and_expect_tx(uint32_t bytes) const { tl::mbarrier_arrive_expect_tx(storage(), bytes); }

 private:
  uint64_t barrier_;

  TL_DEVICE uint64_t &storage() const { return const_cast<uint64_t &>(barrier_); }
};
