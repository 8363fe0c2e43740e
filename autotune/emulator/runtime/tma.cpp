// TMA: bulk copies between global and shared memory through the async proxy (PTX ISA, "cp.async.bulk",
// "cp.async.bulk.tensor", "cp.reduce.async.bulk").
//
// A load's destination is in flight from its issue until its bytes land and are taken off the mbarrier's transaction
// count: at once (early), when no thread can run (late), or at any step and in any order (random). What it writes
// carries the clock of the mbarrier's agent. A store reads shared memory between its issue and the wait of the thread
// that issued it. Its bytes move at either end; its source must be written, fenced and ordered at issue, and not change
// until the wait. Not modelled: im2col, gather, interleave, element strides, clusters and multicast, cache hints, atom
// swizzles.
#include <deque>

#include "elements.h"
#include "tensor_map.h"

namespace emu {
namespace {

// ---- issue, both directions

const TensorMap &map_at(const void *pointer, int rank, Site site) {
  auto map = static_cast<const TensorMap *>(pointer);
  if (map->magic != kMapMagic)
    stop(Kind::misuse, site, "TMA: the tensor map was not encoded by cuTensorMapEncodeTiled");
  if (rank >= 0 && map->rank != rank)
    stop(Kind::misuse, site, "TMA: %d coordinates for a tensor map of rank %d", rank, map->rank);
  return *map;
}

Transfer tensor_transfer(const void *map, const void *shared, int rank, const int32_t *coordinates, Site site) {
  Transfer transfer{};
  transfer.is_tensor = true;
  transfer.map = map_at(map, rank, site);
  std::copy(coordinates, coordinates + rank, transfer.coordinates);
  transfer.bytes = uint32_t(transfer.map.strides[0]);
  for (int i = 0; i < rank; i++) transfer.bytes *= transfer.map.box[i];
  transfer.shared = shared_offset(shared, "TMA", site);
  transfer.thread = current->id;
  transfer.site = site;
  if (transfer.shared % 128)
    stop(Kind::misuse, site, "TMA: the tile at shared+0x%x is not aligned to 128 bytes", transfer.shared);
  require_shared(transfer.shared, transfer.bytes, "TMA", site);
  return transfer;
}

Transfer bulk_transfer(const void *global, const void *shared, uint32_t bytes, Site site) {
  Transfer transfer{};
  transfer.global = static_cast<char *>(const_cast<void *>(global));
  transfer.bytes = bytes;
  transfer.shared = shared_offset(shared, "cp.async.bulk", site);
  transfer.thread = current->id;
  transfer.site = site;
  if (bytes % kChunk || transfer.shared % kChunk || uintptr_t(global) % kChunk)
    stop(Kind::misuse, site, "cp.async.bulk of %u bytes, global %p, shared+0x%x: all must be multiples of 16", bytes,
         global, transfer.shared);
  require_shared(transfer.shared, bytes, "cp.async.bulk", site);
  return transfer;
}

// False if a row is not inside one buffer: the copy must not happen.
bool count_and_check_global(const Transfer &transfer, bool write, bool atomic) {
  Access access = generic(transfer.thread, transfer.site);
  access.atomic = atomic;
  bool allowed = true;
  each_row(transfer, [&](const Row &row) {
    const size_t bytes = row.end - row.begin;
    if (bytes == 0) return;
    count_bulk(write ? Space::global_write : Space::global_read, row.global, bytes, transfer.site);
    allowed &= write ? global_write(row.global, bytes, access) : global_read(row.global, bytes, access);
  });
  return allowed;
}

// ---- loads

struct Load {
  Transfer transfer;
  Mbarrier *mbarrier;
  bool allowed;
};
std::deque<Load> loads;                          // in flight, oldest first

void fill(const Transfer &transfer, char *chunk) {
  memset(chunk, 0, kChunk);
  if (!transfer.is_tensor || !transfer.map.fill_nan) return;
  const MapType &type = kMapTypes[transfer.map.type];
  for (uint32_t at = 0; at < kChunk; at += uint32_t(type.bytes)) {
    if (type.bytes == 8) memcpy(chunk + at + 4, &type.nan, 4);
    else memcpy(chunk + at, &type.nan, size_t(type.bytes));
  }
}

void move_load(const Load &load) {
  char outside[kChunk];
  fill(load.transfer, outside);
  each_chunk(load.transfer, [&](const Chunk &chunk) {
    if (chunk.end - chunk.begin < kChunk || !load.allowed) memcpy(arena + chunk.shared, outside, kChunk);
    if (load.allowed) memcpy(arena + chunk.shared + chunk.begin, chunk.global, chunk.end - chunk.begin);
  });
}

void deliver(const Load &load) {
  const Transfer &transfer = load.transfer;
  move_load(load);
  if (load.allowed) each_row(transfer, [](const Row &row) { global_end_read(row.global, row.end - row.begin); });
  shared_set_written(transfer.shared, int(transfer.bytes), mbarrier_write(*load.mbarrier, transfer.site), true);
  mbarrier_complete_tx(*load.mbarrier, transfer.bytes, transfer.site);
}

void issue_load(const Transfer &transfer, void *barrier, const char *name) {
  block.has_async_proxy = true;
  Mbarrier &mbarrier = mbarrier_at(barrier, name, transfer.site);
  mbarrier_require_fenced(mbarrier, name, transfer.site);
  const Load load{transfer, &mbarrier, count_and_check_global(transfer, false, false)};
  if (load.allowed) each_row(transfer, [](const Row &row) { global_begin_read(row.global, row.end - row.begin); });
  Access access = generic(transfer.thread, transfer.site);
  access.async_proxy = true;
  shared_check_write(transfer.shared, int(transfer.bytes), access);
  shared_set_pending(transfer.shared, int(transfer.bytes), access.epoch);
  count_bulk(Space::shared_write, arena + transfer.shared, transfer.bytes, transfer.site);
  count_in_flight(mbarrier.agent, transfer.bytes);
  if (emu_settings.async_mode == kEarly) deliver(load);
  else loads.push_back(load);
}

}  // namespace


bool tma_deliver(bool oldest) {
  if (loads.empty()) return false;
  const size_t index = oldest ? 0 : block.random() % loads.size();
  const Load load = loads[index];
  loads.erase(loads.begin() + long(index));
  deliver(load);
  return true;
}

void tma_finish() {
  for (const Load &load : loads)
    finding(Kind::leak, load.transfer.site, {}, "a TMA load of %u bytes was in flight at the kernel's end",
            load.transfer.bytes);
  loads.clear();
  mbarriers_finish();
}

// ---- stores

struct BulkStore {
  Transfer transfer;
  int add;                                       // EmuType of what is added, 0: plain store
  bool allowed, moved;
  Moment issue;
};

namespace {

Pool<BulkStore> pool;

void add_element(int type, char *to, const char *from) {
  if (type == EMU_S32) {
    uint32_t a, b;
    memcpy(&a, to, 4);
    memcpy(&b, from, 4);
    a += b;
    memcpy(to, &a, 4);
    return;
  }
  float a = 0, b = 0;
  decode(type, to, 1, &a);
  decode(type, from, 1, &b);
  a += b;
  const uint16_t half = type == EMU_F16 ? encode_f16(a) : encode_bf16(a);
  if (type == EMU_F32) memcpy(to, &a, 4);
  else memcpy(to, &half, 2);
}

void move_store(BulkStore &store) {
  store.moved = true;
  if (!store.allowed) return;
  each_chunk(store.transfer, [&](const Chunk &chunk) {
    const char *from = arena + chunk.shared + chunk.begin;
    const uint32_t bytes = chunk.end - chunk.begin;
    if (!store.add) {
      memcpy(chunk.global, from, bytes);
      return;
    }
    const uint32_t step = uint32_t(type_bytes(store.add));
    for (uint32_t at = 0; at < bytes; at += step) add_element(store.add, chunk.global + at, from + at);
  });
}

bool is_whole(const Transfer &transfer) {
  bool whole = true;
  each_row(transfer, [&](const Row &row) { whole &= row.end - row.begin == row.row_bytes; });
  return whole;
}

// Of a clipped tile only the part that is stored was read: the rest may be uninitialised.
template <class Visit>
void each_source(const Transfer &transfer, Visit visit) {
  if (is_whole(transfer)) return visit(transfer.shared, int(transfer.bytes));
  each_chunk(transfer, [&](const Chunk &chunk) {
    if (chunk.end > chunk.begin) visit(chunk.shared + chunk.begin, int(chunk.end - chunk.begin));
  });
}

// The read is over now, so that is when it is remembered. Changes that are ordered after the issue are found by
// shared_unchanged_since alone, hence today's clocks in `seen`.
void check_source(const BulkStore &store) {
  const Transfer &transfer = store.transfer;
  Access access = generic(transfer.thread, transfer.site);
  access.async_proxy = true;
  access.fenced = store.issue.fenced.data();
  each_source(transfer, [&](uint32_t offset, int bytes) {
    shared_unchanged_since(offset, bytes, store.issue.clocks.data(), transfer.thread, transfer.site, "a TMA store");
    shared_read(offset, bytes, access);
  });
}

// What a store writes is there for its thread after a full wait, and for others when that is ordered before them; after
// .read alone it may still be on its way.
std::vector<std::vector<Transfer>> unsettled;    // by thread

void set_pending(const Transfer &transfer, bool pending) {
  each_row(transfer, [&](const Row &row) { global_set_pending(row.global, row.end - row.begin, pending); });
}

void settle(int thread) {
  for (const Transfer &transfer : unsettled[thread]) set_pending(transfer, false);
  unsettled[thread].clear();
}

void complete(BulkStore *store) {
  if (!store->moved) move_store(*store);
  if (detecting()) check_source(*store);
  count_in_flight(store->transfer.thread, -int64_t(store->transfer.bytes));
  if (store->allowed && !store->add) unsettled[store->transfer.thread].push_back(store->transfer);
  pool.give_back(store);
}

void complete_oldest(Thread &thread) {
  for (BulkStore *store : thread.store_groups.front()) complete(store);
  thread.store_groups.pop_front();
}

void issue_store(const Transfer &transfer, int add) {
  block.has_async_proxy = true;
  BulkStore *store = pool.take();
  store->transfer = transfer;
  store->add = add;
  store->moved = false;
  store->allowed = count_and_check_global(transfer, true, add != 0);
  store->issue.take(transfer.thread);
  if (detecting()) tick(transfer.thread);        // its later writes are not known to the store
  count_bulk(Space::shared_read, arena + transfer.shared, transfer.bytes, transfer.site);
  count_in_flight(transfer.thread, transfer.bytes);
  if (store->allowed && !add) set_pending(transfer, true);
  if (moves_at_issue()) move_store(*store);
  current->stores.push_back(store);
}

void leave(std::vector<BulkStore *> &stores, const char *what) {
  for (BulkStore *store : stores) {
    finding(Kind::leak, store->transfer.site, {}, "a TMA store was never %s by its thread", what);
    complete(store);
  }
  stores.clear();
}

}  // namespace

void tma_reset() {
  loads.clear();
  unsettled.assign(size_t(block.threads), {});
}

void bulk_stores_finish(Thread &thread) {
  for (auto &group : thread.store_groups) leave(group, "waited for");
  thread.store_groups.clear();
  leave(thread.stores, "committed");
}

}  // namespace emu

using namespace emu;

extern "C" {

void emu_tma_prefetch(const void *map) { map_at(map, -1, site_of(EMU_PC())); }

void emu_tma_load(const void *map, void *barrier, void *shared, int rank, const int32_t *coordinates) {
  issue_load(tensor_transfer(map, shared, rank, coordinates, site_of(EMU_PC())), barrier, "TMA load");
}

void emu_bulk_load(void *shared, const void *global, void *barrier, uint32_t bytes) {
  issue_load(bulk_transfer(global, shared, bytes, site_of(EMU_PC())), barrier, "cp.async.bulk");
}

void emu_tma_store(const void *map, const void *shared, int rank, const int32_t *coordinates, int add) {
  const Site site = site_of(EMU_PC());
  const Transfer transfer = tensor_transfer(map, shared, rank, coordinates, site);
  const int element = kMapTypes[transfer.map.type].element;
  if (add && !element) stop(Kind::misuse, site, "cp.reduce.async.bulk.tensor: elements of this type cannot be added");
  issue_store(transfer, add ? element : 0);
}

void emu_bulk_store(void *global, const void *shared, uint32_t bytes, int add_f32) {
  issue_store(bulk_transfer(global, shared, bytes, site_of(EMU_PC())), add_f32 ? EMU_F32 : 0);
}

void emu_bulk_commit(void) {
  current->store_groups.push_back(std::move(current->stores));
  current->stores.clear();
}

// .read waits until the sources were read; the stores themselves may then still be in flight.
void emu_bulk_wait(int groups_left, int read) {
  count_wait(read ? "cp.async.bulk.wait_group.read" : "cp.async.bulk.wait_group", site_of(EMU_PC()));
  while (int(current->store_groups.size()) > groups_left) complete_oldest(*current);
  if (!read) settle(current->id);
}

}  // extern "C"
