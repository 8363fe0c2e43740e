// Threads of a block as fibers: each runs until it blocks, then the scheduler picks the next.
//
// A switch saves the six registers that the System V ABI preserves and swaps stacks. Nothing is ever interrupted
// between two switches, so an atomic is a plain read-modify-write and every run with the same settings takes the same
// path.
#include <sys/mman.h>

#include <numeric>

#include "core.h"

asm(R"(
.text
.globl emu_switch_stack
.hidden emu_switch_stack
.type emu_switch_stack, @function
emu_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
extern "C" void emu_switch_stack(void **save, void *to);

namespace emu {

Block block;
Thread *current = nullptr;
char *arena = nullptr;
char *stacks = nullptr;
size_t stacks_bytes = 0;
uintptr_t host_frame = 0;
long switches = 0, blocks_run = 0;
std::vector<Waiting> waits;
std::vector<Launch> launches;

namespace {

struct LeftLaunch {};                    // thrown where no fiber runs
constexpr size_t kPage = 4096;                  // below each stack, not accessible
constexpr size_t kPoisoned = 16 * 1024;  // of a stack: registers and local arrays start as NaN
void *scheduler_stack = nullptr;
void (*kernel_function)(void *) = nullptr;
void *kernel_arguments = nullptr;
size_t dynamic_bytes = 0;             // of the launch
std::map<int, size_t> static_arrays;  // of the block: declaration -> offset

void to_scheduler() { emu_switch_stack(&current->stack_pointer, scheduler_stack); }

[[noreturn]] void thread_main() {
  kernel_function(kernel_arguments);
  bulk_stores_finish(*current);
  copies_finish(*current);
  current->state = State::done;
  block.alive--;
  thread_exits();
  to_scheduler();
  __builtin_unreachable();
}

void *map_memory(size_t bytes) {
  void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

void make_room() {
  if (!arena) {
    const uintptr_t memory = uintptr_t(map_memory(2 * kSharedArena));
    arena = reinterpret_cast<char *>((memory + kSharedArena - 1) & ~(kSharedArena - 1));
  }
  stacks_bytes = size_t(block.threads) * kStack;
  stacks = static_cast<char *>(map_memory(stacks_bytes));
  for (int thread = 0; thread < block.threads; thread++) mprotect(stacks + thread * kStack, kPage, PROT_NONE);
}

// After each launch: nothing of it is there for the next one to read, and a process can hold many kernels.
void give_back_stacks() {
  if (stacks) munmap(stacks, stacks_bytes);
  stacks = nullptr;
  stacks_bytes = 0;
}

// The first switch pops six registers and returns into thread_main, with the stack aligned as after a call.
void *fresh_stack(int thread) {
  char *top = stacks + size_t(thread + 1) * kStack - 64;
  memset(top - kPoisoned, 0xff, kPoisoned);
  void **slot = reinterpret_cast<void **>(top);
  *--slot = nullptr;
  *--slot = reinterpret_cast<void *>(thread_main);
  for (int i = 0; i < 6; i++) *--slot = nullptr;
  return slot;
}

void start_threads() {
  block.thread.clear();
  block.thread.resize(block.threads);
  block.warp.clear();
  block.warp.resize(block.warps);
  block.alive = block.threads;
  for (int id = 0; id < block.threads; id++) {
    Thread &thread = block.thread[id];
    thread.id = id;
    thread.index[0] = id % block.dim[0];
    thread.index[1] = id / block.dim[0] % block.dim[1];
    thread.index[2] = id / (block.dim[0] * block.dim[1]);
    thread.stack_pointer = fresh_stack(id);
  }
}

void start_clocks() {
  block.has_async_proxy = false;
  if (!detecting()) return;
  block.clocks.assign(size_t(block.threads) * block.agents, 0);
  block.fenced.assign(size_t(block.threads) * block.agents, 0);
  for (int thread = 0; thread < block.threads; thread++) tick(thread);
}

void run(Thread &thread) {
  switches++;
  current = &thread;
  emu_switch_stack(&scheduler_stack, thread.stack_pointer);
  current = nullptr;
}

void wake_if_ready(Thread &thread) {
  if (thread.state == State::mbarrier && mbarrier_ready(thread)) thread.state = State::ready;
}

// One pass over the threads. Greedy orders start over after each thread that ran, which lets one warp run as far ahead
// of the others as synchronisation allows.
bool run_ready(const std::vector<int> &order) {
  bool ran = false;
  for (int id : order) {
    Thread &thread = block.thread[id];
    wake_if_ready(thread);
    if (thread.state != State::ready) continue;
    run(thread);
    ran = true;
    if (stopped || emu_settings.order >= kGreedy) return true;
  }
  return ran;
}

// Threads that poll an mbarrier: run when no other thread can. True when one of them got further.
bool run_spinning(const std::vector<int> &order) {
  bool progress = false;
  for (int id : order) {
    Thread &thread = block.thread[id];
    if (thread.state != State::spinning) continue;
    run(thread);
    progress |= thread.state != State::spinning;
    if (stopped) return true;
  }
  return progress;
}

std::string status(const Thread &thread) {
  switch (thread.state) {
    case State::barrier: return barrier_status(thread.waits_on);
    case State::mbarrier:
    case State::spinning: return mbarrier_status(uint32_t(thread.waits_on));
    default: return std::string(thread.waits_in) + ", whose other lanes have not come";
  }
}

void append_range(std::string &ranges, int first, int last) {
  if (!ranges.empty()) ranges += ",";
  ranges += std::to_string(first);
  if (last > first) ranges += "-" + std::to_string(last);
}

void report_deadlock() {
  std::map<std::pair<Site, std::string>, std::vector<int>> groups;
  for (const Thread &thread : block.thread)
    if (thread.state != State::done) groups[{thread.waits_at, status(thread)}].push_back(thread.id);
  waits.clear();
  for (const auto &[where, threads] : groups) {
    Waiting waiting{"", where.second, where.first};
    for (size_t i = 0, first = 0; i < threads.size(); i++)
      if (i + 1 == threads.size() || threads[i + 1] != threads[i] + 1) {
        append_range(waiting.threads, threads[first], threads[i]);
        first = i + 1;
      }
    waits.push_back(waiting);
  }
  report_divergence();
  finding(Kind::deadlock, waits.empty() ? Site(0) : waits[0].site, {}, "no thread can run; %d of %d have not finished",
          block.alive, block.threads);
  stopped = true;
}

std::vector<int> first_order() {
  std::vector<int> order(block.threads);
  std::iota(order.begin(), order.end(), 0);
  if (emu_settings.order == kDescending || emu_settings.order == kGreedyDescending)
    std::reverse(order.begin(), order.end());
  return order;
}

void schedule() {
  std::vector<int> order = first_order();
  while (block.alive && !stopped) {
    if (emu_settings.order == kShuffled) std::shuffle(order.begin(), order.end(), block.random);
    bool progress = run_ready(order);
    if (stopped) return;
    if (emu_settings.async_mode == kRandom && (block.random() & 1)) progress |= tma_deliver(false);
    if (progress) continue;
    if (run_spinning(order) || stopped) continue;
    if (!tma_deliver(emu_settings.async_mode != kRandom)) return report_deadlock();
  }
}

void run_block() {
  block.shared_bytes = 0;
  static_arrays.clear();
  block.agents = block.threads + kMbarriers + block.warps;
  memset(arena, 0xff, kSharedArena);
  start_clocks();
  start_threads();
  barriers_reset();
  mbarriers_reset();
  tma_reset();
  counters_new_block();
  emu_dynamic_shared();
  schedule();
  if (!stopped) {
    tma_finish();
    wgmma_finish();
  }
  collectives_reset();
  counters_end_block();
  blocks_run++;
}

void run_blocks() {
  uint32_t number = 0;
  for (block.index[2] = 0; block.index[2] < block.grid[2]; block.index[2]++)
    for (block.index[1] = 0; block.index[1] < block.grid[1]; block.index[1]++)
      for (block.index[0] = 0; block.index[0] < block.grid[0]; block.index[0]++) {
        block.number = number++;
        run_block();
        if (stopped) return;
      }
}

void check_shared_limit(size_t bytes) {
  if (bytes > size_t(emu_settings.shared_limit))
    stop(Kind::misuse, 0, "the kernel asks for %zu bytes of shared memory; this architecture has %d a block", bytes,
         emu_settings.shared_limit);
}

}  // namespace

void leave_launch() {
  hooks_off = false;
  if (!current) throw LeftLaunch{};
  to_scheduler();
  __builtin_unreachable();
}

void block_until(State state, const char *waits_in, int waits_on, Site site) {
  current->state = state;
  current->waits_in = waits_in;
  current->waits_on = waits_on;
  current->waits_at = site;
  check_time(site);
  to_scheduler();
}

uint32_t shared_offset(const void *pointer, const char *what, Site site) {
  const uintptr_t offset = uintptr_t(pointer) - uintptr_t(arena);
  if (offset >= kSharedArena) stop(Kind::misuse, site, "%s: the address is not in shared memory", what);
  return uint32_t(offset);
}

}  // namespace emu

using namespace emu;

extern "C" {

unsigned emu_thread_index(int axis) { return current->index[axis]; }
unsigned emu_block_index(int axis) { return block.index[axis]; }
unsigned emu_block_dim(int axis) { return block.dim[axis]; }
unsigned emu_grid_dim(int axis) { return block.grid[axis]; }
unsigned emu_thread(void) { return unsigned(current->id); }

void *emu_dynamic_shared(void) {
  if (block.shared_bytes == 0 && dynamic_bytes) {
    block.shared_bytes = dynamic_bytes;
    shadow_reset_shared(0, dynamic_bytes);
  }
  return arena;
}

void *emu_static_shared(int id, size_t bytes, size_t align) {
  const auto known = static_arrays.find(id);
  if (known != static_arrays.end()) return arena + known->second;
  const size_t offset = (block.shared_bytes + align - 1) / align * align;
  check_shared_limit(offset + bytes);
  shadow_reset_shared(block.shared_bytes, offset + bytes);
  block.shared_bytes = offset + bytes;
  static_arrays[id] = offset;
  return arena + offset;
}

uint32_t emu_shared_address(const void *pointer) { return shared_offset(pointer, "shared address", site_of(EMU_PC())); }

int emu_launch(const char *name, const unsigned grid[3], const unsigned dim[3], size_t shared_bytes,
               void (*kernel)(void *), void *arguments) {
  std::copy(grid, grid + 3, block.grid);
  std::copy(dim, dim + 3, block.dim);
  block.threads = int(dim[0] * dim[1] * dim[2]);
  block.warps = (block.threads + kWarp - 1) / kWarp;
  block.random.seed(unsigned(emu_settings.seed));
  launched = name;
  launches.push_back({name, {grid[0], grid[1], grid[2]}, {dim[0], dim[1], dim[2]}, shared_bytes});
  dynamic_bytes = shared_bytes;
  kernel_function = kernel;
  kernel_arguments = arguments;
  current = nullptr;
  host_frame = uintptr_t(__builtin_frame_address(0));
  try {
    if (block.threads < 1 || block.threads > 1024)
      stop(Kind::misuse, 0, "a block of %d threads; 1 to 1024 can be launched", block.threads);
    if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0)
      stop(Kind::misuse, 0, "a grid of %u x %u x %u blocks cannot be launched", grid[0], grid[1], grid[2]);
    check_shared_limit(shared_bytes);
    make_room();
    shadow_new_launch();
    const Faults faults;
    run_blocks();
  } catch (const LeftLaunch &) {
  }
  current = nullptr;
  give_back_stacks();
  return stopped ? 1 : 0;
}

}  // extern "C"
