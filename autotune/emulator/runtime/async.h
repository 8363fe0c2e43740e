// What the asynchronous instructions (cp_async, mbarrier, tma, wgmma) share with each other.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "runtime.h"

namespace emu {

// What a thread had seen when it issued an asynchronous operation. Empty while nothing is checked.
struct Moment {
  Clocks clocks, fenced;

  void take(int thread) {
    if (!detecting()) return;
    clocks.assign(clocks_of(thread), clocks_of(thread) + block.agents);
    fenced.assign(fenced_of(thread), fenced_of(thread) + block.agents);
  }
};

// Stops unless the bytes lie in the block's shared memory: what follows touches them without further questions.
inline void require_shared(uint64_t offset, uint64_t bytes, const char *what, Site site) {
  if (offset + bytes <= block.shared_bytes) return;
  stop(Kind::out_of_bounds, site, "%s: %llu bytes at shared+0x%llx; the block has 0x%zx bytes", what,
       (unsigned long long)bytes, (unsigned long long)offset, block.shared_bytes);
}

// Every lane of a full warp must take part in what is .sync.aligned.
inline void require_full_warp(const char *what, unsigned mask, Site site) {
  if (mask != ~0u) stop(Kind::misuse, site, "%s needs the 32 threads of a warp; it got lanes %08x", what, mask);
}

// The swizzle exchanges the 16-byte columns of a row of 32, 64 or 128 bytes, by bits of the shared address itself.
inline uint32_t swizzled(uint32_t address, int swizzle) {
  const uint32_t columns = ((1u << swizzle) - 1) << 4;
  return address ^ (address >> 3 & columns);
}

// Records that outlive the call that makes them, kept for reuse: their vectors stay allocated.
template <class T>
class Pool {
 public:
  T *take() {
    if (idle.empty()) {
      all.push_back(std::make_unique<T>());
      return all.back().get();
    }
    T *one = idle.back();
    idle.pop_back();
    return one;
  }
  void give_back(T *one) { idle.push_back(one); }

 private:
  std::vector<std::unique_ptr<T>> all;
  std::vector<T *> idle;
};

// ---- mbarrier.cpp

struct Mbarrier {
  uint32_t offset = 0;
  int agent = 0;                                 // of the clock that writes through this mbarrier carry
  uint32_t expected = 0, pending = 0, phase = 0;
  int64_t tx = 0;                                // bytes announced and not yet here
  Sync running, completed;                       // `running` is never cleared: see complete_if_due
  int init_thread = 0;
  Clock init_clock = 0, fence_clock = 0;         // fence_clock 0: no fence by the initialising thread so far
  Site init_site = 0;
  int64_t landed = 0, to_collect = 0;            // bytes of loads: in this phase, in phases not waited for
  Site landed_site = 0;
};

// The mbarrier at `pointer`; stops if there is none, a finding if its init is not ordered before this use.
Mbarrier &mbarrier_at(const void *pointer, const char *what, Site site);
void mbarrier_arrive(Mbarrier &mbarrier, uint32_t count, Site site);
// One more write by the mbarrier's agent, which threads know of after they waited: its epoch.
Epoch mbarrier_write(Mbarrier &mbarrier, Site site);
void mbarrier_complete_tx(Mbarrier &mbarrier, uint32_t bytes, Site site);
// The async proxy is about to signal it: its init must have been fenced.
void mbarrier_require_fenced(const Mbarrier &mbarrier, const char *what, Site site);
// The running thread executed fence.mbarrier_init or fence.proxy.async.
void mbarriers_fenced();
void mbarriers_finish();                         // findings for loads that landed and that nobody waited for

}  // namespace emu
