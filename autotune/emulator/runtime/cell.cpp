#include "cell.h"

namespace emu {
namespace {

std::vector<Readers> lists;
std::vector<int32_t> unused;

// A reader that the new one is ordered after needs no entry: who is ordered after the new one is after it, too.
template <class List>
int drop_ordered(List &list, int count, const Access &access) {
  int kept = 0;
  for (int i = 0; i < count; i++)
    if (!ordered(list[i], access)) list[kept++] = list[i];
  return kept;
}

}  // namespace

Readers &more_readers(int32_t index) { return lists[index]; }

int32_t take_readers() {
  if (unused.empty()) {
    lists.emplace_back();
    return int32_t(lists.size()) - 1;
  }
  const int32_t index = unused.back();
  unused.pop_back();
  return index;
}

void give_back_readers(int32_t index) {
  lists[index].clear();
  unused.push_back(index);
}

void readers_forget() {
  lists.clear();
  unused.clear();
}

void remember_read(Cell &cell, const Access &access) {
  if (cell.readers == kMany) {
    Readers &list = lists[cell.more];
    list.resize(drop_ordered(list, int(list.size()), access));
    list.push_back(access.epoch);
    return;
  }
  if (cell.readers == 1 && cell.read[0].agent == access.epoch.agent && cell.read[0].block == access.epoch.block) {
    cell.read[0] = access.epoch;  // the common case: the same thread again
    return;
  }
  cell.readers = uint8_t(drop_ordered(cell.read, cell.readers, access));
  if (cell.readers < Cell::kInline) {
    cell.read[cell.readers++] = access.epoch;
    return;
  }
  const int32_t index = take_readers();
  lists[index].assign(cell.read, cell.read + Cell::kInline);
  lists[index].push_back(access.epoch);
  cell.more = index;
  cell.readers = kMany;
}

const Epoch *unordered_reader(const Cell &cell, const Access &access) {
  const Epoch *first = cell.readers == kMany ? lists[cell.more].data() : cell.read;
  const size_t count = cell.readers == kMany ? lists[cell.more].size() : cell.readers;
  for (size_t i = 0; i < count; i++)
    if (!ordered(first[i], access)) return &first[i];
  return nullptr;
}

}  // namespace emu
