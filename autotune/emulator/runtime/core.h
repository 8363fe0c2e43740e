// What the core shares with nobody but itself: findings as they are kept, buffers, the scheduler's inside.
#pragma once
#include <algorithm>
#include <array>
#include <map>

#include "runtime.h"

namespace emu {

struct Finding {
  Kind kind;
  std::string text, kernel;
  int thread;
  uint32_t block;
  Site site;
  Other other;
  std::array<unsigned, 3> grid;  // of the launch
  long count;
};

struct Waiting {  // after a deadlock: threads that wait in the same place
  std::string threads, in;
  Site site;
};

struct Launch {
  std::string kernel;
  std::array<unsigned, 3> grid, dim;
  size_t shared_bytes;
};

extern std::vector<Finding> findings;
extern std::vector<Waiting> waits;
extern std::vector<Launch> launches;
extern bool stopped;
extern bool hooks_off;        // while a collective works on behalf of a warp
extern std::string launched;  // name of the kernel that runs
extern double deadline;       // of the steady clock, 0 is none
extern long switches, blocks_run;
extern char *stacks;
extern size_t stacks_bytes;
extern uintptr_t host_frame;  // of emu_launch: the kernel's arguments lie above it
constexpr size_t kHostFrames = 64 * 1024;

void check_time(Site site);
void catch_signals();
void restore_signals();
struct Faults {  // while it lives, what the CPU faults on is a finding
  Faults() { catch_signals(); }
  ~Faults() { restore_signals(); }
};
[[noreturn]] void leave_launch();
bool in_image(uintptr_t address);
uintptr_t offset_of(Site site);
void forget_findings();

std::string barrier_status(int id);
void collectives_reset();
void report_divergence();

void shadow_reset_shared(size_t from, size_t to);
void shadow_new_launch();
void shared_forget();
void buffers_forget();
std::string buffers_json();

void counters_forget();
void counters_new_block();
void counters_end_block();
std::string sites_json();
int64_t peak_in_flight();

}  // namespace emu
