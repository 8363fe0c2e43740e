// What Python sees of a run: settings in, one JSON text out.
#include <chrono>

#include "core.h"

#define EMU_EXPORT __attribute__((visibility("default")))

namespace emu {

extern "C" EMU_EXPORT Settings emu_settings;
Settings emu_settings = {1, 1, kLate, kAscending, 0, 2, 50, 227 * 1024, 120.0};

namespace {

const char *name_of(Kind kind) {
  static const char *const names[] = {"race",     "uninitialised", "out_of_bounds", "read_only",
                                      "proxy",    "in_flight",     "divergence",    "barrier",
                                      "deadlock", "timeout",       "misuse",        "leak"};
  return names[int(kind)];
}

std::string quoted(const std::string &text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out + "\"";
}

std::string indices(uint32_t number, const std::array<unsigned, 3> &grid) {
  const unsigned x = std::max(1u, grid[0]), y = std::max(1u, grid[1]);
  char text[64];
  snprintf(text, sizeof text, "[%u,%u,%u]", number % x, number / x % y, number / (x * y));
  return text;
}

std::string findings_json() {
  std::string out;
  for (const Finding &f : findings) {
    char text[256];
    snprintf(text, sizeof text, ",\"thread\":%d,\"pc\":%zu,\"other_thread\":%d,\"other_pc\":%zu,\"count\":%ld}",
             f.thread, size_t(offset_of(f.site)), f.other.thread, size_t(offset_of(f.other.site)), f.count);
    out += (out.empty() ? "{\"kind\":" : ",{\"kind\":") + quoted(name_of(f.kind)) + ",\"message\":" + quoted(f.text) +
           ",\"kernel\":" + quoted(f.kernel) + ",\"block\":" + indices(f.block, f.grid) +
           ",\"other_block\":" + indices(f.other.block, f.grid) + text;
  }
  return out;
}

std::string waits_json() {
  std::string out;
  for (const Waiting &w : waits)
    out += (out.empty() ? "{\"threads\":" : ",{\"threads\":") + quoted(w.threads) + ",\"in\":" + quoted(w.in) +
           ",\"pc\":" + std::to_string(offset_of(w.site)) + "}";
  return out;
}

std::string launches_json() {
  std::string out;
  for (const Launch &l : launches) {
    char text[160];
    snprintf(text, sizeof text, ",\"grid\":[%u,%u,%u],\"block\":[%u,%u,%u],\"shared_bytes\":%zu}", l.grid[0], l.grid[1],
             l.grid[2], l.dim[0], l.dim[1], l.dim[2], l.shared_bytes);
    out += (out.empty() ? "{\"kernel\":" : ",{\"kernel\":") + quoted(l.kernel) + text;
  }
  return out;
}

}  // namespace
}  // namespace emu

using namespace emu;

extern "C" EMU_EXPORT void emu_reset(void) {
  forget_findings();
  buffers_forget();
  counters_forget();
  waits.clear();
  launches.clear();
  switches = blocks_run = 0;
  deadline = 0;
  if (emu_settings.max_seconds > 0) {
    using namespace std::chrono;
    deadline = duration<double>(steady_clock::now().time_since_epoch()).count() + emu_settings.max_seconds;
  }
}

extern "C" EMU_EXPORT const char *emu_results(void) {
  static std::string out;
  out = "{\"findings\":[" + findings_json() + "],\"waits\":[" + waits_json() +
        "],\"stopped\":" + (stopped ? "true" : "false") + ",\"blocks\":" + std::to_string(blocks_run) +
        ",\"switches\":" + std::to_string(switches) + ",\"peak_async_bytes\":" + std::to_string(peak_in_flight()) +
        ",\"launches\":[" + launches_json() + "],\"buffers\":[" + buffers_json() + "],\"sites\":[" + sites_json() +
        "]}";
  return out.c_str();
}
