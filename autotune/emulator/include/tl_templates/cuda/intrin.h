// Who a thread is within its warp and warpgroup, elections, and the synchronisation of wgmma.
#pragma once
#include "common.h"

namespace tl {

TL_DEVICE int get_lane_idx(int warp_size = 32) { return int(emu_thread()) % (warp_size > 0 ? warp_size : 32); }
TL_DEVICE int get_warp_idx(int warp_size = 32) { return int(emu_thread()) / (warp_size > 0 ? warp_size : 32); }
TL_DEVICE int get_warp_idx_sync(int warp_size = 32) { return get_warp_idx(warp_size); }
TL_DEVICE int get_warp_group_idx(int warp_size = 32, int warps_per_group = 4) {
  return get_warp_idx(warp_size) / (warps_per_group > 0 ? warps_per_group : 4);
}

// One thread of each group of thread_extent, or of the block for 0. elect.sync takes the lowest lane, as devices do.
template <int thread_extent, bool = false>
TL_DEVICE bool tl_shuffle_elect() {
  constexpr int warps = (thread_extent + 31) / 32;
  emu_warp_collective("elect.sync", emu::kFullMask, nullptr, nullptr, 0);
  if (emu::lane() != 0) return false;
  return thread_extent == 0 ? get_warp_idx() == 0 : get_warp_idx() % (warps ? warps : 1) == 0;
}

template <bool = false>
TL_DEVICE void warpgroup_arrive() { emu_wgmma_fence(); }
template <bool = false>
TL_DEVICE void warpgroup_commit_batch() { emu_wgmma_commit(); }
template <int groups_left, bool = false>
TL_DEVICE void warpgroup_wait() { emu_wgmma_wait(groups_left); }
template <int groups_left, bool = false>
TL_DEVICE void wait_wgmma() { emu_wgmma_wait(groups_left); }

// For the device's compiler: registers stay where wgmma finds them. Here the operands' addresses were handed out, so
// the compiler expects them to change at any call.
template <class T>
TL_DEVICE void warpgroup_fence_operand(T *registers, int count) {
  EMU_CHECK_OPERAND(registers, sizeof(T) * count, "warpgroup_fence_operand");
}

// How registers are divided among the warps has no effect here.
template <uint32_t, bool = false>
TL_DEVICE void warpgroup_reg_alloc() {}
template <uint32_t, bool = false>
TL_DEVICE void warpgroup_reg_dealloc() {}

}  // namespace tl
