// One cell of shadow memory: who wrote last, and which accesses since then a later one may conflict with (FastTrack's
// epochs, with a short list).
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
  Epoch since[kInline];  // reads, and atomic writes that the last one is not ordered after
  uint8_t flags, count;  // entries of `since`, or kMany
  uint16_t readers;      // asynchronous copies that read it now (global memory)
  int32_t more;          // index of the list that has them all
};
constexpr uint8_t kMany = 255;

// An access is ordered after an epoch of its own block that it has seen. Blocks are never ordered with each other.
inline bool ordered(const Epoch &epoch, const Access &access) {
  return epoch.block == block.number &&
         (epoch.agent == access.epoch.agent || epoch.clock <= access.seen[epoch.agent]);
}

void forget_accesses(Cell &cell);
void lists_forget();  // when no cell has any

void remember_read(Cell &cell, const Access &access);
void remember_atomic_write(Cell &cell, const Access &access);
// An access since the last write that conflicts with this one and that it is not ordered after, or null. Reads conflict
// with atomic writes alone; atomic accesses do not conflict with each other.
const Epoch *conflict(const Cell &cell, const Access &access, bool write);

inline void remember_write(Cell &cell, const Epoch &epoch, uint8_t flags) {
  if (cell.count == kMany) forget_accesses(cell);
  cell.count = 0;
  cell.write = epoch;
  cell.flags = flags;
}

inline Other other_of(const Epoch &epoch) {
  return Other{epoch.agent < block.threads ? epoch.agent : -1, epoch.site, epoch.block};
}

}  // namespace emu
