#include "cell.h"

#include <utility>

namespace emu {
namespace {

struct List {
  std::vector<Epoch> all;
  size_t compact_at = 0;  // entries, at which those that need not be kept are dropped
};
std::vector<List> lists;
std::vector<int32_t> unused;
constexpr size_t kCompactAt = 16;

// Of other blocks, which are ordered with nobody, one access of each sort stands for all.
struct Foreign {
  bool met[2][2] = {};
  bool first(const Epoch &epoch) { return !std::exchange(met[epoch.atomic][epoch.writes], true); }
};

// An access that a later one is ordered after needs no entry: who is ordered after the later one is after it, too, and
// who is not conflicts with the later one as well. A read does not conflict with what an atomic write does, though.
bool must_keep(const Epoch &old, const Access &access, bool write, Foreign &foreign) {
  if (old.block != block.number) return foreign.first(old);
  return !ordered(old, access) || (old.writes && !write);
}

int drop_needless(Epoch *list, int count, const Access &access, bool write) {
  Foreign foreign;
  int kept = 0;
  for (int i = 0; i < count; i++)
    if (must_keep(list[i], access, write, foreign)) list[kept++] = list[i];
  return kept;
}

int32_t take_list() {
  if (unused.empty()) {
    lists.emplace_back();
    return int32_t(lists.size()) - 1;
  }
  const int32_t index = unused.back();
  unused.pop_back();
  return index;
}

void add_to_list(List &list, const Epoch &epoch, const Access &access, bool write) {
  if (list.all.size() >= list.compact_at) {
    list.all.resize(size_t(drop_needless(list.all.data(), int(list.all.size()), access, write)));
    list.compact_at = std::max(kCompactAt, 2 * list.all.size());
  }
  list.all.push_back(epoch);
}

void add(Cell &cell, const Epoch &epoch, const Access &access, bool write) {
  if (cell.count == kMany) return add_to_list(lists[cell.more], epoch, access, write);
  cell.count = uint8_t(drop_needless(cell.since, cell.count, access, write));
  if (cell.count < Cell::kInline) {
    cell.since[cell.count++] = epoch;
    return;
  }
  cell.more = take_list();
  cell.count = kMany;
  List &list = lists[cell.more];
  list.all.assign(cell.since, cell.since + Cell::kInline);
  list.compact_at = kCompactAt;
  list.all.push_back(epoch);
}

bool conflicts(const Epoch &old, const Access &access, bool write) {
  if (!write && !old.writes) return false;
  return !(access.atomic && old.atomic) && !ordered(old, access);
}

}  // namespace

void forget_accesses(Cell &cell) {
  lists[cell.more].all.clear();
  unused.push_back(cell.more);
  cell.count = 0;
}

void lists_forget() {
  lists.clear();
  unused.clear();
}

void remember_read(Cell &cell, const Access &access) {
  Epoch epoch = access.epoch;
  epoch.atomic = access.atomic;
  if (cell.count == 1 && cell.since[0].agent == epoch.agent && cell.since[0].block == epoch.block &&
      !cell.since[0].writes) {
    cell.since[0] = epoch;  // the common case: the same thread again
    return;
  }
  add(cell, epoch, access, false);
}

void remember_atomic_write(Cell &cell, const Access &access) {
  Epoch epoch = access.epoch;
  epoch.atomic = epoch.writes = true;
  if ((cell.flags & kAtomicWrite) && cell.write.clock && !ordered(cell.write, access))
    add(cell, cell.write, access, true);
  cell.write = epoch;
  cell.flags = kAtomicWrite;
}

const Epoch *conflict(const Cell &cell, const Access &access, bool write) {
  const Epoch *first = cell.count == kMany ? lists[cell.more].all.data() : cell.since;
  const size_t count = cell.count == kMany ? lists[cell.more].all.size() : cell.count;
  for (size_t i = 0; i < count; i++)
    if (conflicts(first[i], access, write)) return &first[i];
  return nullptr;
}

}  // namespace emu
