// Counters: what a kernel author tunes by, exact because every access is seen.
//
// Lanes of a warp run one after the other here, so the accesses that a GPU would serve as one request are put together
// again: the n-th access of each lane at a place belongs to the n-th request of the warp there. That is exact while the
// lanes go the same way between two meetings (barrier or warp collective), which completes all requests begun before.
#include "core.h"

namespace emu {
namespace {

struct Request {  // of a warp: the bytes that each lane asks for
  unsigned lanes = 0;
  int bytes = 0;
  uintptr_t address[kWarp];
};

struct Lanes {  // of one warp at one place
  uint32_t visits[kWarp] = {};
  uint32_t finished = 0;     // requests of `all` that every lane has been at
  std::vector<Request> all;  // since the lanes last met
  bool listed = false;       // in `begun`
};

struct Totals {
  int64_t bytes = 0, requests = 0, units = 0, ideal = 0;  // units: sectors (global) or wavefronts (shared)
};

struct Waits {
  std::string name;
  int64_t count = 0;
};

struct Place {
  Totals of[4];  // by Space
  std::vector<std::pair<std::string, double>> flops;
  Waits waits;
};

std::vector<Place> places;                  // by site
std::vector<Lanes> lanes;                   // (site, space, warp)
std::vector<std::vector<size_t>> begun;     // warp -> what has requests that may be incomplete
std::vector<std::vector<uint32_t>> waited;  // (site, warp) -> executions by each lane
struct InFlight {
  int64_t bytes = 0, peak = 0;
};
std::vector<InFlight> in_flight;  // of the block, by owner
int64_t peak = 0;                 // of any block

bool is_global(Space space) { return space == Space::global_read || space == Space::global_write; }

Place &place_of(Site site) {
  if (site >= places.size()) places.resize(site + 1);
  return places[site];
}

// ---- global memory: 32-byte sectors

void add_global(Totals &totals, const Request &request) {
  uintptr_t sorted[kWarp];
  int count = 0;
  for (int lane = 0; lane < kWarp; lane++)
    if (request.lanes >> lane & 1) sorted[count++] = request.address[lane];
  std::sort(sorted, sorted + count);
  uintptr_t end = 0, next_sector = 0;  // of what was counted so far
  int64_t distinct = 0;
  for (int i = 0; i < count; i++) {
    const uintptr_t from = std::max(sorted[i], end), to = sorted[i] + request.bytes;
    if (to <= from) continue;
    distinct += int64_t(to - from);
    const uintptr_t first = std::max(from / 32, next_sector), last = (to - 1) / 32;
    if (last >= first) totals.units += int64_t(last - first + 1);
    next_sector = last + 1;
    end = to;
  }
  totals.ideal += (distinct + 31) / 32;
}

// ---- shared memory: 32 banks of 4 bytes. Lanes that ask for the same word share it; others of its bank wait.

int passes(const uintptr_t *address, const int *bytes, int count) {
  uintptr_t words[kWarp * 4];
  int found = 0;
  for (int i = 0; i < count; i++)
    for (uintptr_t word = address[i] / 4; word <= (address[i] + bytes[i] - 1) / 4; word++) words[found++] = word;
  std::sort(words, words + found);
  found = int(std::unique(words, words + found) - words);
  int in_bank[32] = {}, most = 0;
  for (int i = 0; i < found; i++) most = std::max(most, ++in_bank[words[i] % 32]);
  return most;
}

// Requests wider than a word are served in phases of 32 words: half a warp at 8 bytes a lane, a quarter at 16.
void add_shared(Totals &totals, const Request &request) {
  const int in_phase = request.bytes <= 4 ? 32 : request.bytes <= 8 ? 16 : 8;
  for (int first = 0; first < kWarp; first += in_phase) {
    uintptr_t address[kWarp];
    int bytes[kWarp], count = 0;
    for (int lane = first; lane < first + in_phase; lane++)
      if (request.lanes >> lane & 1) {
        address[count] = request.address[lane];
        bytes[count++] = std::min(request.bytes, 16);
      }
    if (!count) continue;
    totals.units += passes(address, bytes, count);
    totals.ideal += 1;
  }
}

void finish(Site site, int space, const Request &request) {
  Totals &totals = place_of(site).of[space];
  totals.requests++;
  if (is_global(Space(space))) add_global(totals, request);
  else add_shared(totals, request);
}

size_t lanes_index(Site site, int space, int warp) { return (size_t(site) * 4 + space) * block.warps + warp; }

void finish_all(size_t index) {
  Lanes &at = lanes[index];
  for (size_t i = at.finished; i < at.all.size(); i++)
    if (at.all[i].lanes) finish(Site(index / block.warps / 4), int(index / block.warps % 4), at.all[i]);
  at.all.clear();
  at.finished = 0;
  at.listed = false;
  std::fill(at.visits, at.visits + kWarp, 0);
}

}  // namespace

void count_access(Space space, int thread, const void *pointer, int bytes, Site site) {
  if (!emu_settings.count) return;
  const int warp = warp_of(thread), lane = lane_of(thread), kind = int(space);
  place_of(site).of[kind].bytes += bytes;
  const size_t index = lanes_index(site, kind, warp);
  if (index >= lanes.size()) lanes.resize((size_t(site) + 1) * 4 * block.warps);
  Lanes &at = lanes[index];
  if (!at.listed) begun[warp].push_back(index);
  at.listed = true;
  const uint32_t visit = at.visits[lane]++;
  if (visit >= at.all.size()) at.all.resize(visit + 1);
  Request &request = at.all[visit];
  request.lanes |= 1u << lane;
  request.bytes = bytes;
  request.address[lane] = uintptr_t(pointer);
  for (; at.finished < at.all.size() && at.all[at.finished].lanes == all_lanes(warp); at.finished++)
    finish(site, kind, at.all[at.finished]);
}

void flush_requests(int warp) {
  if (!emu_settings.count) return;
  for (size_t index : begun[warp]) finish_all(index);
  begun[warp].clear();
}

void count_matrix_rows(Space space, const uint32_t *offsets, int rows, Site site) {
  if (!emu_settings.count) return;
  Totals &totals = place_of(site).of[int(space)];
  totals.bytes += 16 * rows;
  totals.requests++;
  for (int first = 0; first < rows; first += 8) {
    uintptr_t address[8];
    int bytes[8];
    const int count = std::min(8, rows - first);
    for (int i = 0; i < count; i++) address[i] = offsets[first + i], bytes[i] = 16;
    totals.units += passes(address, bytes, count);
    totals.ideal += 1;
  }
}

void count_bulk(Space space, const void *pointer, size_t bytes, Site site) {
  if (!emu_settings.count || bytes == 0) return;
  Totals &totals = place_of(site).of[int(space)];
  const uintptr_t address = uintptr_t(pointer);
  totals.bytes += int64_t(bytes);
  totals.requests++;
  totals.units += int64_t((address + bytes - 1) / 32 - address / 32 + 1);
  totals.ideal += int64_t((bytes + 31) / 32);
}

void count_flops(const char *instruction, double flops, Site site) {
  if (!emu_settings.count) return;
  auto &all = place_of(site).flops;
  for (auto &[name, sum] : all)
    if (name == instruction) {
      sum += flops;
      return;
    }
  all.emplace_back(instruction, flops);
}

void count_barrier(const char *name, Site site) {
  if (!emu_settings.count) return;
  Waits &waits = place_of(site).waits;
  waits.name = name;
  waits.count++;
}

// As often as the lane that has been there most.
void count_wait(const char *instruction, Site site) {
  if (!emu_settings.count) return;
  Waits &waits = place_of(site).waits;
  waits.name = instruction;
  const size_t index = size_t(site) * block.warps + warp_of(current->id);
  if (index >= waited.size()) waited.resize((size_t(site) + 1) * block.warps);
  auto &by_lane = waited[index];
  if (by_lane.empty()) by_lane.assign(kWarp + 1, 0);
  const uint32_t times = ++by_lane[lane_of(current->id)];
  if (times <= by_lane[kWarp]) return;
  by_lane[kWarp] = times;
  waits.count++;
}

void count_in_flight(int owner, int64_t bytes) {
  InFlight &own = in_flight[owner];
  own.bytes += bytes;
  own.peak = std::max(own.peak, own.bytes);
}

int64_t peak_in_flight() { return peak; }

void counters_new_block() {
  in_flight.assign(block.agents, {});
  waited.clear();
  begun.assign(block.warps, {});
}

void counters_end_block() {
  for (int warp = 0; warp < block.warps; warp++) flush_requests(warp);
  lanes.clear();
  int64_t sum = 0;
  for (const InFlight &own : in_flight) sum += own.peak;
  peak = std::max(peak, sum);
}

void counters_forget() {
  places.clear();
  lanes.clear();
  waited.clear();
  peak = 0;
}

namespace {

std::string flops_json(const Place &place) {
  std::string out;
  for (const auto &[name, sum] : place.flops) {
    char text[128];
    snprintf(text, sizeof text, "%s\"%s\":%.0f", out.empty() ? "" : ",", name.c_str(), sum);
    out += text;
  }
  return out;
}

bool is_empty(const Place &place) {
  for (const Totals &totals : place.of)
    if (totals.bytes) return false;
  return place.flops.empty() && place.waits.count == 0;
}

}  // namespace

std::string sites_json() {
  std::string out;
  for (size_t site = 0; site < places.size(); site++) {
    const Place &place = places[site];
    if (is_empty(place)) continue;
    const Totals &gr = place.of[0], &gw = place.of[1], &sr = place.of[2], &sw = place.of[3];
    char text[640];
    snprintf(text, sizeof text,
             "%s{\"pc\":%zu,\"global_read\":%ld,\"global_written\":%ld,\"global_requests\":%ld,\"sectors\":%ld,"
             "\"ideal_sectors\":%ld,\"shared_read\":%ld,\"shared_written\":%ld,\"shared_requests\":%ld,"
             "\"wavefronts\":%ld,\"ideal_wavefronts\":%ld,\"flops\":{",
             out.empty() ? "" : ",", size_t(offset_of(Site(site))), long(gr.bytes), long(gw.bytes),
             long(gr.requests + gw.requests), long(gr.units + gw.units), long(gr.ideal + gw.ideal), long(sr.bytes),
             long(sw.bytes), long(sr.requests + sw.requests), long(sr.units + sw.units), long(sr.ideal + sw.ideal));
    out += text + flops_json(place) + "},\"waits\":{";
    if (place.waits.count) {
      snprintf(text, sizeof text, "\"%s\":%ld", place.waits.name.c_str(), long(place.waits.count));
      out += text;
    }
    out += "}}";
  }
  return out;
}

}  // namespace emu
