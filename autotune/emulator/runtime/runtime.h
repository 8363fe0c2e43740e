// What the parts of the runtime share: the block that runs, its threads, vector clocks, shadow memory, findings and
// counters.
//
// One launch at a time, one block at a time, one host thread: threads of the block are fibers that run until they
// block, so no lock is needed anywhere and every run with the same settings takes the same path.
//
// Happened-before is kept with vector clocks (FastTrack, Flanagan and Freund, PLDI 2009). An agent owns one component:
// threads first, then one agent an mbarrier (for what TMA writes through it), then one a warpgroup (for what wgmma
// reads; it has its first warp's component).
#pragma once
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "emu/abi.h"

#define EMU_PC() __builtin_return_address(0)

namespace emu {

constexpr int kWarp = 32;
constexpr int kMbarriers = 64;               // agents kept for mbarriers; the 65th shares the first one's
constexpr size_t kSharedArena = 256 * 1024;  // more than any architecture has, so an overrun stays inside
constexpr size_t kStack = 256 * 1024;        // of one fiber

// ---- settings and findings -------------------------------------------------------------------------------------

enum AsyncMode {
  kLate = 0,
  kEarly = 1,
  kRandom = 2
};  // when data of an asynchronous copy lands: at its wait, at issue
enum Order { kAscending = 0, kDescending = 1, kShuffled = 2, kGreedy = 3, kGreedyDescending = 4 };

struct Settings {
  int detect, count, async_mode, order, seed, granule, max_findings, shared_limit;
  double max_seconds;
};
extern "C" Settings emu_settings;

using Site = uint16_t;  // a place in the generated source; 0 is "nowhere"
Site site_of(void *pc);

// Kinds are the words a report shows. A finding is kept once for each (kind, site, other site), with a count.
enum class Kind {
  race,
  uninitialised,
  out_of_bounds,
  read_only,
  proxy,
  in_flight,
  divergence,
  barrier,
  deadlock,
  timeout,
  misuse,
  leak
};

struct Other {  // the second party of a finding; thread -1 is none
  int thread = -1;
  Site site = 0;
  uint32_t block = 0;
};
void finding(Kind kind, Site site, Other other, const char *format, ...) __attribute__((format(printf, 4, 5)));
[[noreturn]] void stop(Kind kind, Site site, const char *format, ...) __attribute__((format(printf, 3, 4)));

// ---- clocks ------------------------------------------------------------------------------------------------------

using Clock = uint32_t;
using Clocks = std::vector<Clock>;  // `agents` long

struct Epoch {       // one access: by whom, when, where
  Clock clock = 0;   // 0 is "none"
  uint16_t agent : 14, atomic : 1, writes : 1;
  Site site = 0;
  uint32_t block = 0;

  Epoch() : agent(0), atomic(0), writes(0) {}
  Epoch(Clock clock, int agent, Site site, uint32_t block)
      : clock(clock), agent(uint16_t(agent)), atomic(0), writes(0), site(site), block(block) {}
};

// ---- the block that runs -------------------------------------------------------------------------------------------

struct CpAsync {  // one thread's copy that has not been waited for
  uint32_t shared;
  const void *global;
  int bytes, source_bytes;
  bool landed;  // the bytes are there already (early mode); the wait is still owed
  Site site;
};
struct BulkStore;  // tma.cpp
struct Wgmma;      // wgmma.cpp

enum class State { ready, barrier, collective, mbarrier, spinning, done };

struct Thread {
  void *stack_pointer = nullptr;
  State state = State::ready;
  int id = 0;
  unsigned index[3] = {};
  const char *waits_in = "";  // for the deadlock dump
  int waits_on = 0;           // barrier id, or shared offset of an mbarrier
  Site waits_at = 0;
  uint32_t parity = 0;
  std::vector<CpAsync> copies;  // not yet committed
  std::deque<std::vector<CpAsync>> copy_groups;
  std::vector<BulkStore *> stores;
  std::deque<std::vector<BulkStore *>> store_groups;
};

struct Warp {
  std::vector<struct Collective *> pending;
  std::vector<Wgmma *> wgmmas;  // issued, not committed
  std::deque<std::vector<Wgmma *>> wgmma_groups;
  Clock wgmma_clock = 1;
  bool wgmma_fenced = false;
};

struct Block {
  unsigned grid[3], dim[3], index[3];
  uint32_t number = 0;  // linear, for epochs
  int threads = 0, warps = 0, agents = 0, alive = 0;
  bool has_async_proxy = false;  // set by the first use of one; the second set of clocks is kept from then on
  size_t shared_bytes = 0;       // dynamic and static so far
  std::vector<Thread> thread;
  std::vector<Warp> warp;
  std::vector<Clock> clocks, fenced;  // threads x agents
  std::mt19937 random;
};
extern Block block;
extern Thread *current;  // null in the scheduler
extern char *arena;      // shared memory, aligned to its size

inline int warp_of(int thread) { return thread / kWarp; }
inline int lane_of(int thread) { return thread % kWarp; }
inline bool detecting() { return emu_settings.detect != 0; }
inline bool moves_at_issue() {  // whether the bytes of an asynchronous copy do, rather than at its wait
  return emu_settings.async_mode == kEarly || (emu_settings.async_mode == kRandom && (block.random() & 1));
}
inline unsigned all_lanes(int warp) {  // that exist
  const int count = block.threads - warp * kWarp;
  return count >= kWarp ? ~0u : (1u << count) - 1;
}
inline int granule_shift() { return emu_settings.granule == 1 ? 0 : 1; }
inline int mbarrier_agent(int i) { return block.threads + i % kMbarriers; }
inline int wgmma_agent(int warp) { return block.threads + kMbarriers + warp; }

// clocks_of: what the thread has seen. fenced_of: what it had seen at the proxy fences it knows of.
inline Clock *clocks_of(int thread) { return &block.clocks[size_t(thread) * block.agents]; }
inline Clock *fenced_of(int thread) { return &block.fenced[size_t(thread) * block.agents]; }
void join(Clock *into, const Clock *from);  // component-wise maximum, over `agents`
inline void tick(int thread) { clocks_of(thread)[thread]++; }

// What a release point hands to an acquire point.
struct Sync {
  Clocks clocks, fenced;
  void reset();
  void release(int thread);        // join the thread's clocks into this, then tick the thread
  void acquire(int thread) const;  // join this into the thread's clocks
};

void block_until(State state, const char *waits_in, int waits_on, Site site);  // leaves the fiber until made ready
void flush_requests(int warp);  // lanes of the warp met: their open memory requests are complete

// Runs `perform` in the last lane to arrive. Within it, records[i] is lane i's and hooks are off.
void warp_collective(const char *name, unsigned mask, void *record, EmuPerform perform, bool orders_memory, Site site);

// ---- memory --------------------------------------------------------------------------------------------------------

uint32_t shared_offset(const void *pointer, const char *what, Site site);  // stops for a pointer that is not shared

// Shadow checks of one access to shared memory. `as` is the agent that makes it, `seen` what it is ordered after.
// The thread's own generic accesses are `generic(thread, site)`.
struct Access {
  Epoch epoch;
  const Clock *seen = nullptr;
  bool async_proxy = false;  // reads: the last generic write must be fenced
  const Clock *fenced = nullptr;
  bool atomic = false;
};
Access generic(int thread, Site site);
void shared_read(uint32_t offset, int bytes, const Access &access);
void shared_write(uint32_t offset, int bytes, const Access &access);        // checks, then becomes the last write
void shared_check_write(uint32_t offset, int bytes, const Access &access);  // checks alone
void shared_set_written(uint32_t offset, int bytes, const Epoch &epoch, bool async_proxy);
void shared_set_pending(uint32_t offset, int bytes, const Epoch &epoch);  // an asynchronous copy into it is in flight
// The last write of each granule must be known to `at_issue`: else somebody wrote while the operation was reading.
void shared_unchanged_since(uint32_t offset, int bytes, const Clock *at_issue, int thread, Site site, const char *what);

// "byte 24 of Q", "shared+0x40": where an address lies, for findings.
std::string address_name(const void *pointer);

// False (and a finding) when the bytes are not inside one buffer; the caller must not touch them then.
bool global_read(const void *pointer, size_t bytes, const Access &access);
bool global_write(const void *pointer, size_t bytes, const Access &access);
// Of asynchronous copies: they read the bytes until the end of theirs, or write them until somebody has waited.
void global_begin_read(const void *pointer, size_t bytes);
void global_end_read(const void *pointer, size_t bytes);
void global_set_pending(const void *pointer, size_t bytes, bool pending);

// ---- counters ------------------------------------------------------------------------------------------------------

enum class Space { global_read, global_write, shared_read, shared_write };
// One lane's part of a warp request; requests are matched by how often the lane has been at the site.
void count_access(Space space, int thread, const void *pointer, int bytes, Site site);
// Shared-memory passes of a warp-wide matrix access: rows of 16 bytes, eight a phase.
void count_matrix_rows(Space space, const uint32_t *offsets, int rows, Site site);
// A bulk transfer: contiguous runs of bytes, each its own request.
void count_bulk(Space space, const void *pointer, size_t bytes, Site site);
void count_flops(const char *instruction, double flops, Site site);
void count_barrier(const char *name, Site site);      // it opened
void count_wait(const char *instruction, Site site);  // waits, fences: each time a warp executes one
// Bytes on their way, + at issue, - at the wait. Owners are agents: the thread that waits, or the mbarrier. Each has a
// peak, which does not depend on the schedule; their sum is what the block can have in flight.
void count_in_flight(int owner, int64_t bytes);

// ---- hooks between the parts ---------------------------------------------------------------------------------------

void barriers_reset();
void mbarriers_reset();
bool mbarrier_ready(const Thread &thread);     // its phase has flipped
std::string mbarrier_status(uint32_t offset);  // for the dump after a deadlock
void tma_reset();
bool tma_deliver(bool oldest);  // lands one load; false when none is in flight
void tma_finish();              // findings for what was never waited for
void bulk_stores_finish(Thread &thread);
void copies_finish(Thread &thread);  // cp.async that was never waited for
void wgmma_finish();
bool wgmma_registers_in_flight(int thread, const void *pointer, int bytes);
void thread_exits();  // barriers may be complete without it

}  // namespace emu
