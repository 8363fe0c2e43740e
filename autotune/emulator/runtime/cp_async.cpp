// cp.async: copies of 4, 8 or 16 bytes from global to shared memory (PTX ISA, "cp.async", ".commit_group",
// ".wait_group", ".mbarrier.arrive").
//
// A copy's destination is in flight from its issue to the wait of the thread that issued it, whenever its bytes move:
// at the wait (late), at issue (early), or either (random). From the wait on it counts as that thread's own write.
#include "async.h"

namespace emu {
namespace {

void move_bytes(const CpAsync &copy) {
  memcpy(arena + copy.shared, copy.global, size_t(copy.source_bytes));
  memset(arena + copy.shared + copy.source_bytes, 0, size_t(copy.bytes - copy.source_bytes));
}

void land(const CpAsync &copy, const Epoch &writer) {
  if (!copy.landed) move_bytes(copy);
  if (copy.source_bytes > 0) global_end_read(copy.global, size_t(copy.source_bytes));
  shared_set_written(copy.shared, copy.bytes, writer, false);
  count_in_flight(current->id, -copy.bytes);
}

Epoch own_epoch(const CpAsync &copy) {
  if (!detecting()) return {};
  return Epoch{clocks_of(current->id)[current->id], current->id, copy.site, block.number};
}

void land_all(std::vector<CpAsync> &copies) {
  for (const CpAsync &copy : copies) land(copy, own_epoch(copy));
  copies.clear();
}

void check_copy(uint32_t shared, const void *global, int bytes, int source_bytes, Site site) {
  if (bytes != 4 && bytes != 8 && bytes != 16)
    stop(Kind::misuse, site, "cp.async of %d bytes; it copies 4, 8 or 16", bytes);
  if (source_bytes < 0 || source_bytes > bytes)
    stop(Kind::misuse, site, "cp.async of %d bytes cannot read %d bytes", bytes, source_bytes);
  if (shared % bytes)
    stop(Kind::misuse, site, "cp.async of %d bytes to shared+0x%x, which is not aligned to them", bytes, shared);
  if (source_bytes > 0 && uintptr_t(global) % bytes)
    stop(Kind::misuse, site, "cp.async of %d bytes from %s, which is not aligned to them", bytes,
         address_name(global).c_str());
  require_shared(shared, bytes, "cp.async", site);
}

void issue(CpAsync copy) {
  const Access access = generic(current->id, copy.site);
  if (copy.source_bytes > 0) {
    count_access(Space::global_read, current->id, copy.global, copy.source_bytes, copy.site);
    if (!global_read(copy.global, size_t(copy.source_bytes), access)) copy.source_bytes = 0;
    else global_begin_read(copy.global, size_t(copy.source_bytes));
  }
  count_access(Space::shared_write, current->id, arena + copy.shared, copy.bytes, copy.site);
  count_in_flight(current->id, copy.bytes);
  shared_check_write(copy.shared, copy.bytes, access);
  shared_set_pending(copy.shared, copy.bytes, access.epoch);
  copy.landed = moves_at_issue();
  if (copy.landed) move_bytes(copy);
  current->copies.push_back(copy);
}

// The arrival happens once the thread's copies so far have landed; here that is at once, in every mode. They become
// writes of the mbarrier's agent, so that even the thread itself must wait before it reads them; its other writes are
// not released, because the hardware arrives on its own and not in program order.
void arrive_after_copies(Mbarrier &mbarrier, bool noinc, Site site) {
  auto land_for_barrier = [&](std::vector<CpAsync> &copies) {
    for (const CpAsync &copy : copies) land(copy, mbarrier_write(mbarrier, copy.site));
    copies.clear();
  };
  for (auto &group : current->copy_groups) land_for_barrier(group);
  land_for_barrier(current->copies);
  if (!noinc) mbarrier.pending++;
  mbarrier_arrive(mbarrier, 1, site);
}

}  // namespace

void copies_finish(Thread &thread) {
  thread.copy_groups.push_back(std::move(thread.copies));
  thread.copies.clear();
  for (const auto &group : thread.copy_groups)
    for (const CpAsync &copy : group) {
      finding(Kind::leak, copy.site, {}, "cp.async that the thread never waited for");
      count_in_flight(thread.id, -copy.bytes);
    }
  thread.copy_groups.clear();
}

}  // namespace emu

using namespace emu;

extern "C" {

void emu_cp_async(void *shared, const void *global, int bytes, int source_bytes) {
  const Site site = site_of(EMU_PC());
  const uint32_t offset = shared_offset(shared, "cp.async", site);
  check_copy(offset, global, bytes, source_bytes, site);
  issue(CpAsync{offset, global, bytes, source_bytes, false, site});
}

void emu_cp_async_commit(void) {
  current->copy_groups.push_back(std::move(current->copies));
  current->copies.clear();
}

void emu_cp_async_wait(int groups_left) {
  count_wait("cp.async.wait_group", site_of(EMU_PC()));
  while (int(current->copy_groups.size()) > groups_left) {
    land_all(current->copy_groups.front());
    current->copy_groups.pop_front();
  }
  if (groups_left == 0) land_all(current->copies);
}

void emu_cp_async_mbarrier_arrive(void *barrier, int noinc) {
  const Site site = site_of(EMU_PC());
  arrive_after_copies(mbarrier_at(barrier, "cp.async.mbarrier.arrive", site), noinc != 0, site);
}

}  // extern "C"
