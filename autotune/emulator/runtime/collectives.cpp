// Instructions that a warp executes together: shuffles, votes, ldmatrix, mma and the like.
//
// The last lane to arrive performs them for all. Lanes that arrive at different instructions, or with masks that do
// not agree, have diverged: undefined on a GPU, a finding here. Only __syncwarp orders memory.
#include "core.h"

namespace emu {

bool hooks_off = false;

struct Collective {
  const char *name;
  unsigned mask, arrived;
  Site site;
  EmuPerform perform;
  bool orders_memory;
  void *records[kWarp];
};

namespace {

Collective *waiting_for(Warp &warp, unsigned mask, int lane) {
  for (Collective *one : warp.pending)
    if (one->mask == mask && !(one->arrived >> lane & 1)) return one;
  return nullptr;
}

void check_overlap(const Warp &warp, const char *name, unsigned mask, int lane, Site site) {
  for (const Collective *one : warp.pending)
    if ((one->mask & mask) && (one->mask >> lane & 1) && !(one->arrived >> lane & 1))
      stop(Kind::divergence, site,
           "lane %d executes %s with mask %08x while lanes %08x wait for it in %s with mask %08x", lane, name, mask,
           one->arrived, one->name, one->mask);
}

void synchronise_memory(int warp, unsigned mask) {
  static Sync sync;
  sync.reset();
  for (int lane = 0; lane < kWarp; lane++)
    if (mask >> lane & 1) sync.release(warp * kWarp + lane);
  for (int lane = 0; lane < kWarp; lane++)
    if (mask >> lane & 1) sync.acquire(warp * kWarp + lane);
}

void complete(Collective &one, int warp) {
  if (one.perform) {
    hooks_off = true;
    one.perform(one.records, one.mask);
    hooks_off = false;
  }
  if (one.orders_memory && detecting()) synchronise_memory(warp, one.mask);
  if (one.mask == all_lanes(warp)) flush_requests(warp);
  for (int lane = 0; lane < kWarp; lane++)
    if (one.mask >> lane & 1) block.thread[warp * kWarp + lane].state = State::ready;
}

}  // namespace

void warp_collective(const char *name, unsigned mask, void *record, EmuPerform perform, bool orders_memory, Site site) {
  const int number = warp_of(current->id), lane = lane_of(current->id);
  Warp &warp = block.warp[number];
  mask &= all_lanes(number);
  if (!(mask >> lane & 1))
    stop(Kind::divergence, site, "lane %d executes %s and is not in its mask %08x", lane, name, mask);
  Collective *one = waiting_for(warp, mask, lane);
  if (!one) {
    check_overlap(warp, name, mask, lane, site);
    one = new Collective{name, mask, 0, site, perform, orders_memory, {}};
    warp.pending.push_back(one);
  } else if (one->name != name && strcmp(one->name, name)) {
    stop(Kind::divergence, site, "lane %d executes %s while lanes %08x of its warp wait in %s", lane, name,
         one->arrived, one->name);
  }
  one->records[lane] = record;
  one->arrived |= 1u << lane;
  if (one->arrived != mask) return block_until(State::collective, one->name, int(one->arrived), one->site);
  warp.pending.erase(std::find(warp.pending.begin(), warp.pending.end(), one));
  complete(*one, number);
  delete one;
}

// Lanes that a collective waits for and that will not come: they have exited, or wait for something else.
void report_divergence() {
  for (int number = 0; number < block.warps; number++)
    for (const Collective *one : block.warp[number].pending)
      for (unsigned missing = one->mask & ~one->arrived; missing; missing &= missing - 1) {
        const Thread &thread = block.thread[number * kWarp + __builtin_ctz(missing)];
        if (thread.state != State::mbarrier && thread.state != State::spinning)
          finding(Kind::divergence, one->site, {thread.id, thread.waits_at, block.number},
                  "%s waits for a lane that %s", one->name,
                  thread.state == State::done ? "has exited" : "went another way");
      }
}

void collectives_reset() {
  for (Warp &warp : block.warp)
    for (Collective *one : warp.pending) delete one;
}

}  // namespace emu

extern "C" void emu_warp_collective(const char *name, unsigned mask, void *record, EmuPerform perform,
                                    int orders_memory) {
  const emu::Site site = emu::site_of(EMU_PC());
  if (orders_memory) emu::count_wait(name, site);
  emu::warp_collective(name, mask, record, perform, orders_memory != 0, site);
}
