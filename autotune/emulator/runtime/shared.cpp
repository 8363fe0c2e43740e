// Shadow of shared memory: races, reads of what nobody wrote, data that is still in flight, missing proxy fences.
#include "cell.h"

namespace emu {
namespace {

std::vector<Cell> cells;  // a cell for each granule of the arena
size_t used = 0;          // cells that were touched since shared_forget

bool inside(uint32_t offset, int bytes, const char *verb, const Access &access) {
  if (offset + bytes <= block.shared_bytes) return true;
  finding(Kind::out_of_bounds, access.epoch.site, {}, "%s of %d bytes at shared+0x%x; the block has 0x%zx bytes", verb,
          bytes, offset, block.shared_bytes);
  return false;
}

template <class Visit>
void each_cell(uint32_t offset, int bytes, Visit visit) {
  const uint32_t last = (offset + bytes - 1) >> granule_shift();
  for (uint32_t i = offset >> granule_shift(); i <= last; i++) visit(cells[i], i << granule_shift());
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
  else if (const Epoch *atomic = conflict(cell, access, false))
    finding(Kind::race, site, other_of(*atomic), "read of shared+0x%x after an unsynchronised write", at);
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
  const Epoch *before = conflict(cell, access, true);
  if (unordered) finding(Kind::race, site, other_of(write), "write of shared+0x%x after an unsynchronised write", at);
  if (before)
    finding(Kind::race, site, other_of(*before), "write of shared+0x%x after an unsynchronised %s", at,
            before->writes ? "write" : "read");
  return unordered || before;
}

}  // namespace

Access generic(int thread, Site site) {
  Access access;
  access.epoch = Epoch{0, thread, site, block.number};
  if (!detecting()) return access;
  access.seen = clocks_of(thread);
  access.fenced = fenced_of(thread);
  access.epoch.clock = access.seen[thread];
  return access;
}

void shadow_reset_shared(size_t from, size_t to) {
  if (!detecting()) return;
  if (cells.empty()) cells.resize(kSharedArena);
  const size_t last = (to + emu_settings.granule - 1) >> granule_shift();
  for (size_t i = from >> granule_shift(); i < last; i++) {
    if (cells[i].count == kMany) forget_accesses(cells[i]);
    cells[i] = Cell{};
  }
  used = std::max(used, last);
}

void shared_forget() {
  std::fill(cells.begin(), cells.begin() + used, Cell{});
  used = 0;
}

void shared_read(uint32_t offset, int bytes, const Access &access) {
  if (!inside(offset, bytes, "read", access) || !detecting()) return;
  bool reported = false;
  each_cell(offset, bytes, [&](Cell &cell, uint32_t at) {
    reported = reported || check_read(cell, at, access);
    remember_read(cell, access);
  });
}

void shared_check_write(uint32_t offset, int bytes, const Access &access) {
  if (!inside(offset, bytes, "write", access) || !detecting()) return;
  bool reported = false;
  each_cell(offset, bytes, [&](Cell &cell, uint32_t at) { reported = reported || check_write(cell, at, access); });
}

void shared_write(uint32_t offset, int bytes, const Access &access) {
  if (!inside(offset, bytes, "write", access) || !detecting()) return;
  bool reported = false;
  each_cell(offset, bytes, [&](Cell &cell, uint32_t at) {
    reported = reported || check_write(cell, at, access);
    if (access.atomic) remember_atomic_write(cell, access);
    else remember_write(cell, access.epoch, 0);
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
