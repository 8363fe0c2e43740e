// Global memory: the arguments' buffers, who wrote and read which element in this launch, and which bytes were touched.
//
// Blocks of a launch are not ordered with each other, so a write and another access of one element by two blocks race
// unless both are atomic, whichever ran first here. Within a block the vector clocks decide, as for shared memory.
#include <sys/mman.h>

#include "cell.h"

namespace emu {
namespace {

struct Buffer {
  uintptr_t low, high;
  bool read_only;
  std::string name;
  Cell *cells = nullptr;  // none for what nobody may write
  size_t cells_bytes = 0;
  std::vector<uint64_t> was_read, was_written;  // a bit for each granule
  int64_t bytes_read = 0, bytes_written = 0;
};
std::vector<Buffer> buffers;
size_t latest = 0;  // the buffer of the latest access

Buffer *buffer_of(uintptr_t address, size_t bytes) {
  auto holds = [&](const Buffer &b) { return address >= b.low && address + bytes <= b.high; };
  if (latest < buffers.size() && holds(buffers[latest])) return &buffers[latest];
  for (size_t i = 0; i < buffers.size(); i++)
    if (holds(buffers[i])) {
      latest = i;
      return &buffers[i];
    }
  return nullptr;
}

// Memory that is nobody's argument and yet the kernel's own: stacks of threads and host, constants of the image.
bool is_private(uintptr_t address) {
  return address - uintptr_t(stacks) < stacks_bytes || address - host_frame < kHostFrames || in_image(address);
}

// Bytes from an address to the nearest byte of [low, high); 0 inside.
uintptr_t distance(uintptr_t address, uintptr_t low, uintptr_t high) {
  return address >= high ? address - high + 1 : low > address ? low - address : 0;
}

const Buffer *nearest_buffer(uintptr_t address) {
  const Buffer *nearest = nullptr;
  for (const Buffer &b : buffers)
    if (!nearest || distance(address, b.low, b.high) < distance(address, nearest->low, nearest->high)) nearest = &b;
  return nearest;
}

void out_of_bounds(uintptr_t address, size_t bytes, const char *verb, Site site) {
  const std::string name = address_name(reinterpret_cast<void *>(address));
  const Buffer *nearest = nearest_buffer(address);
  if (name[0] == 's' || !nearest)
    return finding(Kind::out_of_bounds, site, {}, "%s of %zu bytes at %s", verb, bytes, name.c_str());
  finding(Kind::out_of_bounds, site, {}, "%s of %zu bytes at %s, which has %zu bytes", verb, bytes, name.c_str(),
          size_t(nearest->high - nearest->low));
}

void mark(std::vector<uint64_t> &bits, const Buffer &buffer, uintptr_t address, size_t bytes) {
  if (bits.empty()) bits.resize(((buffer.high - buffer.low) >> granule_shift()) / 64 + 1);
  const size_t last = (address + bytes - 1 - buffer.low) >> granule_shift();
  for (size_t i = (address - buffer.low) >> granule_shift(); i <= last; i++) bits[i / 64] |= uint64_t(1) << (i % 64);
}

int64_t marked(const std::vector<uint64_t> &bits) {
  int64_t granules = 0;
  for (uint64_t word : bits) granules += __builtin_popcountll(word);
  return granules << granule_shift();
}

void make_cells(Buffer &buffer) {
  if (buffer.cells) return;
  buffer.cells_bytes = (((buffer.high - buffer.low) >> granule_shift()) + 1) * sizeof(Cell);
  void *memory =
      mmap(nullptr, buffer.cells_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  buffer.cells = static_cast<Cell *>(memory);
}

void drop_cells(Buffer &buffer) {
  if (buffer.cells) munmap(buffer.cells, buffer.cells_bytes);
  buffer.cells = nullptr;
}

const char *where(const Epoch &epoch) { return epoch.block == block.number ? "" : " by another block"; }

bool check(const Cell &cell, const Buffer &buffer, size_t at, bool write, const Access &access) {
  const Epoch &last = cell.write;
  const char *verb = write ? "write" : "read", *name = buffer.name.c_str();
  const Site site = access.epoch.site;
  if ((cell.flags & kPending) && last.block == block.number) {
    finding(Kind::in_flight, site, other_of(last), "%s of %s at byte %zu, which a TMA store is still writing", verb, name, at);
    return true;
  }
  if (write && cell.readers) {
    finding(Kind::in_flight, site, {}, "write of %s at byte %zu, which an asynchronous copy is still reading", name, at);
    return true;
  }
  const bool both_atomic = access.atomic && (cell.flags & kAtomicWrite);
  const bool unordered = last.clock && !both_atomic && !ordered(last, access);
  const Epoch *before = conflict(cell, access, write);
  if (unordered)
    finding(Kind::race, site, other_of(last), "%s of %s at byte %zu after an unsynchronised write%s", verb, name, at,
            where(last));
  if (before)
    finding(Kind::race, site, other_of(*before), "%s of %s at byte %zu after an unsynchronised %s%s", verb, name, at,
            before->writes ? "write" : "read", where(*before));
  return unordered || before;
}

void check_cells(Buffer &buffer, uintptr_t address, size_t bytes, bool write, const Access &access) {
  make_cells(buffer);
  bool reported = false;
  const int shift = granule_shift();
  const size_t last = (address + bytes - 1 - buffer.low) >> shift;
  for (size_t i = (address - buffer.low) >> shift; i <= last; i++) {
    Cell &cell = buffer.cells[i];
    reported = reported || check(cell, buffer, i << shift, write, access);
    if (!write) remember_read(cell, access);
    else if (access.atomic) remember_atomic_write(cell, access);
    else remember_write(cell, access.epoch, 0);
  }
}

}  // namespace

std::string address_name(const void *pointer) {
  const uintptr_t address = uintptr_t(pointer), shared = uintptr_t(arena);
  const Buffer *nearest = nearest_buffer(address);
  char text[160];
  const uintptr_t to_shared = distance(address, shared, shared + kSharedArena);
  if (!nearest || to_shared < distance(address, nearest->low, nearest->high))
    snprintf(text, sizeof text, "shared%c0x%zx", address < shared ? '-' : '+',
             size_t(address < shared ? shared - address : address - shared));
  else snprintf(text, sizeof text, "byte %ld of %s", long(intptr_t(address - nearest->low)), nearest->name.c_str());
  return text;
}

bool global_read(const void *pointer, size_t bytes, const Access &access) {
  const uintptr_t address = uintptr_t(pointer);
  Buffer *buffer = buffer_of(address, bytes);
  if (!buffer) {
    if (is_private(address)) return true;
    out_of_bounds(address, bytes, "read", access.epoch.site);
    return false;
  }
  buffer->bytes_read += int64_t(bytes);
  if (emu_settings.count) mark(buffer->was_read, *buffer, address, bytes);
  if (detecting() && !buffer->read_only) check_cells(*buffer, address, bytes, false, access);
  return true;
}

bool global_write(const void *pointer, size_t bytes, const Access &access) {
  const uintptr_t address = uintptr_t(pointer);
  Buffer *buffer = buffer_of(address, bytes);
  if (!buffer) {
    if (is_private(address)) return true;
    out_of_bounds(address, bytes, "write", access.epoch.site);
    return false;
  }
  buffer->bytes_written += int64_t(bytes);
  if (emu_settings.count) mark(buffer->was_written, *buffer, address, bytes);
  if (buffer->read_only) {
    finding(Kind::read_only, access.epoch.site, {}, "write of %s, which is read-only", buffer->name.c_str());
    return true;
  }
  if (detecting()) check_cells(*buffer, address, bytes, true, access);
  return true;
}

namespace {

// Calls visit with each cell of bytes that somebody may write.
template <class Visit>
void each_cell(const void *pointer, size_t bytes, Visit visit) {
  const uintptr_t address = uintptr_t(pointer);
  Buffer *buffer = bytes ? buffer_of(address, bytes) : nullptr;
  if (!detecting() || !buffer || buffer->read_only) return;
  make_cells(*buffer);
  const size_t last = (address + bytes - 1 - buffer->low) >> granule_shift();
  for (size_t i = (address - buffer->low) >> granule_shift(); i <= last; i++) visit(buffer->cells[i]);
}

}  // namespace

void global_begin_read(const void *pointer, size_t bytes) {
  each_cell(pointer, bytes, [](Cell &cell) { cell.readers++; });
}

void global_end_read(const void *pointer, size_t bytes) {
  each_cell(pointer, bytes, [](Cell &cell) { cell.readers--; });
}

void global_set_pending(const void *pointer, size_t bytes, bool pending) {
  each_cell(pointer, bytes, [&](Cell &cell) { cell.flags = pending ? cell.flags | kPending : cell.flags & ~kPending; });
}

void shadow_new_launch() {
  for (Buffer &buffer : buffers) drop_cells(buffer);
  shared_forget();
  lists_forget();
}

void buffers_forget() {
  for (Buffer &buffer : buffers) drop_cells(buffer);
  buffers.clear();
}

std::string buffers_json() {
  std::string out;
  for (const Buffer &buffer : buffers) {
    char text[256];
    snprintf(
        text, sizeof text,
        "%s{\"name\":\"%s\",\"bytes\":%zu,\"read\":%ld,\"written\":%ld,\"unique_read\":%ld,\"unique_written\":%ld}",
        out.empty() ? "" : ",", buffer.name.c_str(), size_t(buffer.high - buffer.low), long(buffer.bytes_read),
        long(buffer.bytes_written), long(marked(buffer.was_read)), long(marked(buffer.was_written)));
    out += text;
  }
  return out;
}

}  // namespace emu

extern "C" __attribute__((visibility("default"))) void emu_add_buffer(void *pointer, size_t bytes, int read_only,
                                                                      const char *name) {
  emu::buffers.push_back(
      {uintptr_t(pointer), uintptr_t(pointer) + bytes, read_only != 0, name, nullptr, 0, {}, {}, 0, 0});
}
