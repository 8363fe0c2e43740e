// Shadow of shared memory: races, reads of what nobody wrote, data that is still in flight, missing proxy fences.
#include "cell.h"

namespace emu {
namespace {

std::vector<Cell> cells;  // a cell for each granule of the arena
size_t used = 0;          // cells that were touched since shared_forget

int shift() { return emu_settings.granule == 1 ? 0 : 1; }

bool inside(uint32_t offset, int bytes, const char *verb, const Access &access) {
  if (offset + bytes <= block.shared_bytes) return true;
  finding(Kind::out_of_bounds, access.epoch.site, {}, "%s of %d bytes at shared+0x%x; the block has 0x%zx bytes", verb,
          bytes, offset, block.shared_bytes);
  return false;
}

template <class Visit>
void each_cell(uint32_t offset, int bytes, Visit visit) {
  const uint32_t last = (offset + bytes - 1) >> shift();
  for (uint32_t i = offset >> shift(); i <= last; i++) visit(cells[i], i << shift());
}

// True after a finding: an access has one, whatever the number of its cells.
bool check_read(Cell &cell, uint32_t at, const Access &access) {
  const Epoch &write = cell.write;
  const Site site = access.epoch.site;
  if (cell.flags & kPending)
    finding(Kind::in_flight, site, other_of(write),
            "read of shared+0x%x while an asynchronous copy into it is in flight", at);
  else if (write.clock == 0)
    finding(Kind::uninitialised, site, {}, "read of shared+0x%x, which nobody has written", at);
  else if (!ordered(write, access) && !(access.atomic && (cell.flags & kAtomicWrite)))
    finding(Kind::race, site, other_of(write), "read of shared+0x%x after an unsynchronised write", at);
  else if (access.async_proxy && !(cell.flags & kAsyncWrite) && write.clock > access.fenced[write.agent])
    finding(Kind::proxy, site, other_of(write),
            "asynchronous read of shared+0x%x: no fence.proxy.async since it was written", at);
  else return false;
  return true;
}

bool check_write(const Cell &cell, uint32_t at, const Access &access) {
  const Epoch &write = cell.write;
  const Site site = access.epoch.site;
  const bool both_atomic = access.atomic && (cell.flags & kAtomicWrite);
  if (cell.flags & kPending) {
    finding(Kind::in_flight, site, other_of(write),
            "write of shared+0x%x while an asynchronous copy into it is in flight", at);
    return true;
  }
  const bool unordered = write.clock && !both_atomic && !ordered(write, access);
  const Epoch *reader = unordered_reader(cell, access);
  if (unordered) finding(Kind::race, site, other_of(write), "write of shared+0x%x after an unsynchronised write", at);
  if (reader) finding(Kind::race, site, other_of(*reader), "write of shared+0x%x after an unsynchronised read", at);
  return unordered || reader;
}

}  // namespace

Access generic(int thread, Site site) {
  Access access;
  access.thread = thread;
  access.epoch = Epoch{0, uint16_t(thread), site, block.number};
  if (!detecting()) return access;
  access.seen = clocks_of(thread);
  access.fenced = fenced_of(thread);
  access.epoch.clock = access.seen[thread];
  return access;
}

void shadow_reset_shared(size_t from, size_t to) {
  if (!detecting()) return;
  if (cells.empty()) cells.resize(kSharedArena);
  const size_t last = (to + emu_settings.granule - 1) >> shift();
  for (size_t i = from >> shift(); i < last; i++) {
    if (cells[i].readers == kMany) give_back_readers(cells[i].more);
    cells[i] = Cell{};
  }
  used = std::max(used, last);
}

void shared_forget() {
  std::fill(cells.begin(), cells.begin() + used, Cell{});
  used = 0;
}

void shared_read(uint32_t offset, int bytes, const Access &access) {
  if (!detecting() || !inside(offset, bytes, "read", access)) return;
  bool reported = false;
  each_cell(offset, bytes, [&](Cell &cell, uint32_t at) {
    reported = reported || check_read(cell, at, access);
    remember_read(cell, access);
  });
}

void shared_check_write(uint32_t offset, int bytes, const Access &access) {
  if (!detecting() || !inside(offset, bytes, "write", access)) return;
  bool reported = false;
  each_cell(offset, bytes, [&](Cell &cell, uint32_t at) { reported = reported || check_write(cell, at, access); });
}

void shared_write(uint32_t offset, int bytes, const Access &access) {
  if (!detecting() || !inside(offset, bytes, "write", access)) return;
  const uint8_t flags = access.atomic ? kAtomicWrite : 0;
  bool reported = false;
  each_cell(offset, bytes, [&](Cell &cell, uint32_t at) {
    reported = reported || check_write(cell, at, access);
    remember_write(cell, access.epoch, flags);
  });
}

void shared_set_written(uint32_t offset, int bytes, const Epoch &epoch, bool async_proxy) {
  if (!detecting()) return;
  each_cell(offset, bytes, [&](Cell &cell, uint32_t) { remember_write(cell, epoch, async_proxy ? kAsyncWrite : 0); });
}

void shared_set_pending(uint32_t offset, int bytes, const Epoch &epoch) {
  if (!detecting()) return;
  each_cell(offset, bytes, [&](Cell &cell, uint32_t) { remember_write(cell, epoch, kPending); });
}

void shared_clear_pending(uint32_t offset, int bytes) {
  if (!detecting()) return;
  each_cell(offset, bytes, [&](Cell &cell, uint32_t) { cell.flags &= ~kPending; });
}

void shared_unchanged_since(uint32_t offset, int bytes, const Clock *at_issue, int thread, Site site,
                            const char *what) {
  if (!detecting()) return;
  bool reported = false;
  each_cell(offset, bytes, [&](Cell &cell, uint32_t at) {
    const Epoch &write = cell.write;
    if (reported || (write.clock <= at_issue[write.agent] && !(cell.flags & kPending))) return;
    reported = true;
    finding(Kind::in_flight, site, other_of(write), "shared+0x%x was overwritten before %s by thread %d had read it",
            at, what, thread);
  });
}

}  // namespace emu
