// mbarriers: phases, arrivals, transaction counts; and fence.proxy.async (PTX ISA, "mbarrier", "membar/fence").
//
// A phase completes when no arrival and no byte is owed. An arrival releases what its thread has seen, a successful
// wait acquires what the completed phases released. Writes that the hardware makes on a thread's behalf (TMA) carry the
// clock of the mbarrier's agent, which only a wait makes known. The 8 bytes of an mbarrier are not stored to shared
// memory: state is kept beside it, by offset. Not modelled: mbarrier.inval, cluster scope, arrival tokens.
#include <deque>

#include "async.h"

namespace emu {
namespace {

constexpr int64_t kMostTx = (1 << 20) - 1;       // also of arrivals
constexpr int kNone = -1;

std::deque<Mbarrier> mbarriers;                  // of the block, in order of their init
std::vector<int> index_at(kSharedArena / 8, kNone);
Clock agent_clocks[kMbarriers];

Mbarrier *find(uint32_t offset) {
  const int index = index_at[offset / 8];
  return index == kNone ? nullptr : &mbarriers[index];
}

bool completed(const Mbarrier &mbarrier, uint32_t parity) { return (mbarrier.phase & 1) != (parity & 1); }

uint32_t aligned_offset(const void *pointer, const char *what, Site site) {
  const uint32_t offset = shared_offset(pointer, what, site);
  if (offset % 8) stop(Kind::misuse, site, "%s: mbarrier at shared+0x%x is not aligned to 8 bytes", what, offset);
  require_shared(offset, 8, what, site);
  return offset;
}

void require_ordered_after_init(const Mbarrier &mbarrier, const char *what, Site site) {
  if (!detecting() || current->id == mbarrier.init_thread) return;
  if (clocks_of(current->id)[mbarrier.init_thread] >= mbarrier.init_clock) return;
  finding(Kind::race, site, Other{mbarrier.init_thread, mbarrier.init_site, block.number},
          "%s: mbarrier at shared+0x%x is used by a thread that is not ordered after its init", what, mbarrier.offset);
}

// The clocks of earlier phases stay in `running`: every arrival is a read-modify-write of the same word, so a wait that
// sees the latest also synchronises with those before (a release sequence).
void complete_if_due(Mbarrier &mbarrier, Site site) {
  if (mbarrier.pending != 0 || mbarrier.tx > 0) return;
  if (mbarrier.tx < 0) {
    finding(Kind::barrier, site, {}, "mbarrier at shared+0x%x: copies brought %lld bytes more than expect_tx announced",
            mbarrier.offset, (long long)-mbarrier.tx);
    mbarrier.tx = 0;
  }
  mbarrier.phase++;
  mbarrier.pending = mbarrier.expected;
  mbarrier.to_collect += mbarrier.landed;
  mbarrier.landed = 0;
  if (detecting()) mbarrier.completed = mbarrier.running;
}

void acquire(Mbarrier &mbarrier) {
  count_in_flight(mbarrier.agent, -mbarrier.to_collect);
  mbarrier.to_collect = 0;
  if (detecting()) mbarrier.completed.acquire(current->id);
}

Mbarrier &make(uint32_t offset, Site site) {
  if (Mbarrier *known = find(offset)) {
    finding(Kind::misuse, site, Other{known->init_thread, known->init_site, block.number},
            "mbarrier at shared+0x%x is initialised again without mbarrier.inval", offset);
    return *known;
  }
  index_at[offset / 8] = int(mbarriers.size());
  mbarriers.emplace_back();
  mbarriers.back().agent = mbarrier_agent(int(mbarriers.size()) - 1);
  return mbarriers.back();
}

void init(const void *pointer, uint32_t count, Site site) {
  const uint32_t offset = aligned_offset(pointer, "mbarrier.init", site);
  if (count < 1 || count > kMostTx)
    stop(Kind::misuse, site, "mbarrier.init: a count of %u arrivals; it must be 1 to %lld", count, (long long)kMostTx);
  Mbarrier &mbarrier = make(offset, site);
  const int agent = mbarrier.agent;
  mbarrier = Mbarrier{};
  mbarrier.offset = offset;
  mbarrier.agent = agent;
  mbarrier.expected = mbarrier.pending = count;
  mbarrier.init_thread = current->id;
  mbarrier.init_site = site;
  if (!detecting()) return;
  mbarrier.init_clock = clocks_of(current->id)[current->id];
  mbarrier.running.reset();
  mbarrier.completed.reset();
}

void check_tx(Mbarrier &mbarrier, Site site) {
  if (mbarrier.tx <= kMostTx && mbarrier.tx >= -kMostTx) return;
  stop(Kind::barrier, site, "mbarrier at shared+0x%x: a transaction count of %lld; it holds -%lld to %lld",
       mbarrier.offset, (long long)mbarrier.tx, (long long)kMostTx, (long long)kMostTx);
}

void expect_tx(Mbarrier &mbarrier, uint32_t bytes, Site site) {
  mbarrier.tx += bytes;
  check_tx(mbarrier, site);
  complete_if_due(mbarrier, site);
}

}  // namespace

void mbarriers_reset() {
  for (const Mbarrier &mbarrier : mbarriers) index_at[mbarrier.offset / 8] = kNone;
  mbarriers.clear();
  std::fill(agent_clocks, agent_clocks + kMbarriers, 0);
}

Mbarrier &mbarrier_at(const void *pointer, const char *what, Site site) {
  const uint32_t offset = aligned_offset(pointer, what, site);
  Mbarrier *mbarrier = find(offset);
  if (!mbarrier) stop(Kind::misuse, site, "%s: no mbarrier was initialised at shared+0x%x", what, offset);
  require_ordered_after_init(*mbarrier, what, site);
  return *mbarrier;
}

void mbarrier_arrive(Mbarrier &mbarrier, uint32_t count, Site site) {
  if (count > mbarrier.pending)
    stop(Kind::barrier, site, "mbarrier at shared+0x%x: %u arrivals where %u of %u are owed in this phase",
         mbarrier.offset, count, mbarrier.pending, mbarrier.expected);
  mbarrier.pending -= count;
  complete_if_due(mbarrier, site);
}

Epoch mbarrier_write(Mbarrier &mbarrier, Site site) {
  const Clock clock = ++agent_clocks[mbarrier.agent - block.threads];
  if (detecting()) mbarrier.running.clocks[mbarrier.agent] = clock;
  return Epoch{clock, mbarrier.agent, site, block.number};
}

void mbarrier_complete_tx(Mbarrier &mbarrier, uint32_t bytes, Site site) {
  mbarrier.tx -= bytes;
  mbarrier.landed += bytes;
  mbarrier.landed_site = site;
  check_tx(mbarrier, site);
  complete_if_due(mbarrier, site);
}

void mbarrier_require_fenced(const Mbarrier &mbarrier, const char *what, Site site) {
  if (!detecting()) return;
  const Clock known = clocks_of(current->id)[mbarrier.init_thread];
  if (mbarrier.fence_clock && known >= mbarrier.fence_clock) return;
  finding(Kind::proxy, site, Other{mbarrier.init_thread, mbarrier.init_site, block.number},
          "%s signals the mbarrier at shared+0x%x: no fence.mbarrier_init or fence.proxy.async since its init", what,
          mbarrier.offset);
}

void mbarriers_fenced() {
  if (!detecting()) return;
  for (Mbarrier &mbarrier : mbarriers)
    if (mbarrier.init_thread == current->id && mbarrier.fence_clock == 0)
      mbarrier.fence_clock = clocks_of(current->id)[current->id];
}

bool mbarrier_ready(const Thread &thread) {
  const Mbarrier *mbarrier = find(uint32_t(thread.waits_on));
  return mbarrier && completed(*mbarrier, thread.parity);
}

void mbarriers_finish() {
  for (const Mbarrier &mbarrier : mbarriers)
    if (const int64_t bytes = mbarrier.landed + mbarrier.to_collect)
      finding(Kind::leak, mbarrier.landed_site, {},
              "%lld bytes were loaded through the mbarrier at shared+0x%x and nobody waited for them", (long long)bytes,
              mbarrier.offset);
}

std::string mbarrier_status(uint32_t offset) {
  const Mbarrier *mbarrier = find(offset);
  if (!mbarrier) return "mbarrier";
  char text[160];
  snprintf(text, sizeof text, "mbarrier at shared+0x%x, phase %u: %u of %u arrived, %lld bytes owed", offset,
           mbarrier->phase, mbarrier->expected - mbarrier->pending, mbarrier->expected, (long long)mbarrier->tx);
  return text;
}

}  // namespace emu

using namespace emu;

extern "C" {

void emu_mbarrier_init(void *barrier, uint32_t count) { init(barrier, count, site_of(EMU_PC())); }

void emu_mbarrier_arrive(void *barrier, uint32_t count) {
  const Site site = site_of(EMU_PC());
  Mbarrier &mbarrier = mbarrier_at(barrier, "mbarrier.arrive", site);
  if (detecting()) mbarrier.running.release(current->id);
  mbarrier_arrive(mbarrier, count, site);
}

void emu_mbarrier_expect_tx(void *barrier, uint32_t bytes) {
  const Site site = site_of(EMU_PC());
  expect_tx(mbarrier_at(barrier, "mbarrier.expect_tx", site), bytes, site);
}

// A thread that was woken and finds the next phase complete, too, waits on: it was overtaken, as it could be on a GPU.
void emu_mbarrier_wait(void *barrier, uint32_t parity) {
  const Site site = site_of(EMU_PC());
  Mbarrier &mbarrier = mbarrier_at(barrier, "mbarrier.wait", site);
  count_wait("mbarrier.wait", site);
  while (!completed(mbarrier, parity)) {
    current->parity = parity & 1;
    block_until(State::mbarrier, "mbarrier.wait", int(mbarrier.offset), site);
  }
  acquire(mbarrier);
}

int emu_mbarrier_test(void *barrier, uint32_t parity) {
  const Site site = site_of(EMU_PC());
  Mbarrier &mbarrier = mbarrier_at(barrier, "mbarrier.test_wait", site);
  count_wait("mbarrier.test_wait", site);
  if (!completed(mbarrier, parity)) {
    block_until(State::spinning, "mbarrier.test_wait", int(mbarrier.offset), site);
    current->state = State::ready;
  }
  if (!completed(mbarrier, parity)) return 0;
  acquire(mbarrier);
  return 1;
}

void emu_fence_mbarrier_init(void) {
  count_wait("fence.mbarrier_init", site_of(EMU_PC()));
  mbarriers_fenced();
}

// What the thread has seen so far is visible to the async proxy. Its own later writes are not: hence the tick.
void emu_fence_proxy_async(void) {
  count_wait("fence.proxy.async", site_of(EMU_PC()));
  block.has_async_proxy = true;
  mbarriers_fenced();
  if (!detecting()) return;
  join(fenced_of(current->id), clocks_of(current->id));
  tick(current->id);
}

}  // extern "C"
