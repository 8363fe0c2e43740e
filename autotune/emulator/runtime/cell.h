// One cell of shadow memory: who wrote last, and who has read since (FastTrack's epochs, with a short list of readers).
#pragma once
#include "core.h"

namespace emu {

enum : uint8_t {
  kPending = 1,  // an asynchronous copy into it is in flight
  kAtomicWrite = 2,
  kAsyncWrite = 4,  // through the async proxy
};

struct Cell {
  static constexpr int kInline = 3;
  Epoch write;
  Epoch read[kInline];
  uint8_t flags, readers;  // readers in `read`, or kMany
  int32_t more;            // index of the list that has them all
};
constexpr uint8_t kMany = 255;

// An access is ordered after an epoch of its own block that it has seen. Blocks are never ordered with each other.
inline bool ordered(const Epoch &epoch, const Access &access) {
  return epoch.block == block.number && (epoch.agent == access.epoch.agent || epoch.clock <= access.seen[epoch.agent]);
}

using Readers = std::vector<Epoch>;
Readers &more_readers(int32_t index);
int32_t take_readers();
void give_back_readers(int32_t index);
void readers_forget();  // when no cell has any

void remember_read(Cell &cell, const Access &access);
// A reader that the access is not ordered after, or null.
const Epoch *unordered_reader(const Cell &cell, const Access &access);
inline void remember_write(Cell &cell, const Epoch &epoch, uint8_t flags) {
  if (cell.readers == kMany) give_back_readers(cell.more);
  cell.readers = 0;
  cell.write = epoch;
  cell.flags = flags;
}

inline Other other_of(const Epoch &epoch) {
  return Other{epoch.agent < block.threads ? epoch.agent : -1, epoch.site, epoch.block};
}

}  // namespace emu
