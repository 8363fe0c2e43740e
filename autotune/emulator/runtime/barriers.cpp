// bar.sync and bar.arrive (PTX ISA, "bar, barrier"): 16 barriers a block; __syncthreads is number 0 with all threads.
#include "core.h"

namespace emu {
namespace {

constexpr int kBarriers = 16;

struct Barrier {
  int arrived = 0;
  int expected = 0;  // 0 is all threads that have not exited
  std::vector<int> waiting;
  Site site = 0;  // of the latest arrival
  Sync sync;
};
Barrier barriers[kBarriers];
int votes = 0, counted = 0;  // of __syncthreads_count: so far, and when barrier 0 last opened

int needed(const Barrier &barrier) { return barrier.expected ? barrier.expected : block.alive; }

void name_of(char *out, size_t size, int id) {
  if (id == 0) snprintf(out, size, "__syncthreads");
  else snprintf(out, size, "bar.sync %d", id);
}

// The barrier's clocks cover all that the waiting threads had seen, so theirs are replaced, not joined.
void acquire_all(const Barrier &barrier) {
  for (int thread : barrier.waiting) {
    Clock *clocks = clocks_of(thread);
    const Clock own = clocks[thread];
    std::copy(barrier.sync.clocks.begin(), barrier.sync.clocks.end(), clocks);
    clocks[thread] = own;
    if (block.has_async_proxy) std::copy(barrier.sync.fenced.begin(), barrier.sync.fenced.end(), fenced_of(thread));
  }
}

void open_if_complete(int id) {
  Barrier &barrier = barriers[id];
  if (barrier.arrived == 0 || barrier.arrived < needed(barrier)) return;
  if (barrier.arrived > needed(barrier))
    finding(Kind::barrier, barrier.site, {}, "barrier %d: %d threads arrived, %d expected", id, barrier.arrived,
            needed(barrier));
  // __syncthreads does not wait for threads that have exited, and CUDA promises nothing then.
  if (!barrier.expected && block.alive < block.threads)
    finding(Kind::barrier, barrier.site, {}, "__syncthreads without %d threads of the block, which have exited",
            block.threads - block.alive);
  char name[32];
  name_of(name, sizeof name, id);
  count_barrier(name, barrier.site);
  if (detecting()) acquire_all(barrier);
  for (int thread : barrier.waiting) block.thread[thread].state = State::ready;
  for (size_t i = 0; i < barrier.waiting.size(); i += 1)
    if (i == 0 || warp_of(barrier.waiting[i]) != warp_of(barrier.waiting[i - 1]))
      flush_requests(warp_of(barrier.waiting[i]));
  barrier.arrived = barrier.expected = 0;
  barrier.waiting.clear();
  if (detecting()) barrier.sync.reset();
  if (id != 0) return;
  counted = votes;
  votes = 0;
}

void arrive(int id, int threads, bool wait, Site site) {
  if (id < 0 || id >= kBarriers) stop(Kind::barrier, site, "barrier %d does not exist; a block has 16", id);
  if (threads % kWarp)
    stop(Kind::barrier, site, "barrier %d: a count of %d threads is not a multiple of the warp size", id, threads);
  if (id == 0 && threads == block.threads) threads = 0;
  Barrier &barrier = barriers[id];
  if (barrier.arrived && barrier.expected != threads)
    stop(Kind::barrier, site, "barrier %d: one thread expects %d arrivals, another %d", id, barrier.expected, threads);
  barrier.expected = threads;
  barrier.arrived++;
  barrier.site = site;
  if (detecting()) barrier.sync.release(current->id);
  if (!wait) return open_if_complete(id);
  barrier.waiting.push_back(current->id);
  current->state = State::barrier;
  open_if_complete(id);
  if (current->state == State::barrier) block_until(State::barrier, "bar.sync", id, site);
}

}  // namespace

void barriers_reset() {
  for (Barrier &barrier : barriers) {
    barrier.arrived = barrier.expected = 0;
    barrier.waiting.clear();
    barrier.sync.reset();
  }
  votes = 0;
}

void thread_exits() { open_if_complete(0); }

std::string barrier_status(int id) {
  char name[32], text[96];
  name_of(name, sizeof name, id);
  snprintf(text, sizeof text, "%s: %d of %d threads arrived", name, barriers[id].arrived, needed(barriers[id]));
  return text;
}

}  // namespace emu

extern "C" {
void emu_barrier_sync(int id, int threads) { emu::arrive(id, threads, true, emu::site_of(EMU_PC())); }
void emu_barrier_arrive(int id, int threads) { emu::arrive(id, threads, false, emu::site_of(EMU_PC())); }
// All threads must come again before `counted` changes, and each reads it before that.
int emu_barrier_count(int predicate) {
  emu::votes += predicate != 0;
  emu::arrive(0, 0, true, emu::site_of(EMU_PC()));
  return emu::counted;
}
void emu_threadfence(void) {}  // orders nothing by itself; what it would order is not modelled (docs/emulator.md)
}
