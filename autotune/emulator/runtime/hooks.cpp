// What g++'s sanitizers call before each memory access of a kernel: -fsanitize=thread for every load and store whose
// address may be known elsewhere, -fsanitize=bounds and object-size for arrays of known size. Their libraries are not
// linked; these functions take the place of theirs.
#include "core.h"

namespace emu {
namespace {

void local(uintptr_t address, int bytes, Site site) {
  if (wgmma_registers_in_flight(current->id, reinterpret_cast<void *>(address), bytes))
    finding(Kind::in_flight, site, {}, "registers of a wgmma are touched before it was waited for");
}

void touch_global(void *pointer, int bytes, bool write, bool atomic, Site site) {
  Access access = generic(current->id, site);
  access.atomic = atomic;
  const bool inside = write ? global_write(pointer, bytes, access) : global_read(pointer, bytes, access);
  if (!inside) {
    stopped = true;
    leave_launch();
  }
  if (uintptr_t(pointer) - host_frame < kHostFrames || in_image(uintptr_t(pointer))) return;
  count_access(write ? Space::global_write : Space::global_read, current->id, pointer, bytes, site);
}

void touch_shared(uint32_t offset, int bytes, bool write, bool atomic, Site site) {
  Access access = generic(current->id, site);
  access.atomic = atomic;
  if (write) shared_write(offset, bytes, access);
  else shared_read(offset, bytes, access);
  count_access(write ? Space::shared_write : Space::shared_read, current->id, arena + offset, bytes, site);
}

// A GPU faults on an address that is not a multiple of what it loads or stores; so may the CPU's vector moves.
void check_alignment(uintptr_t address, int bytes, Site site) {
  const bool power_of_two = (bytes & (bytes - 1)) == 0;
  if (power_of_two && bytes <= 16 && address % bytes)
    stop(Kind::misuse, site, "access of %d bytes at %s, which is not a multiple of them", bytes,
         address_name(reinterpret_cast<void *>(address)).c_str());
}

inline void touch(void *pointer, int bytes, bool write, bool atomic, void *pc) {
  if (!current || hooks_off) return;
  const uintptr_t address = uintptr_t(pointer);
  if (address - uintptr_t(stacks) < stacks_bytes) {
    if (block.has_async_proxy) local(address, bytes, site_of(pc));
    return;
  }
  const Site site = site_of(pc);
  check_time(site);
  check_alignment(address, bytes, site);
  const uintptr_t offset = address - uintptr_t(arena);
  if (offset < kSharedArena) touch_shared(uint32_t(offset), bytes, write, atomic, site);
  else touch_global(pointer, bytes, write, atomic, site);
}

}  // namespace
}  // namespace emu

using emu::touch;

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}

#define EMU_HOOKS(bytes)                                                                           \
  void __tsan_read##bytes(void *p) { touch(p, bytes, false, false, EMU_PC()); }                    \
  void __tsan_write##bytes(void *p) { touch(p, bytes, true, false, EMU_PC()); }                    \
  void __tsan_unaligned_read##bytes(void *p) { touch(p, bytes, false, false, EMU_PC()); }          \
  void __tsan_unaligned_write##bytes(void *p) { touch(p, bytes, true, false, EMU_PC()); }          \
  void __tsan_volatile_read##bytes(void *p) { touch(p, bytes, false, false, EMU_PC()); }           \
  void __tsan_volatile_write##bytes(void *p) { touch(p, bytes, true, false, EMU_PC()); }           \
  void __tsan_unaligned_volatile_read##bytes(void *p) { touch(p, bytes, false, false, EMU_PC()); } \
  void __tsan_unaligned_volatile_write##bytes(void *p) { touch(p, bytes, true, false, EMU_PC()); }
EMU_HOOKS(1)
EMU_HOOKS(2)
EMU_HOOKS(4)
EMU_HOOKS(8)
EMU_HOOKS(16)
#undef EMU_HOOKS

void __tsan_read_range(void *p, unsigned long bytes) { touch(p, int(bytes), false, false, EMU_PC()); }
void __tsan_write_range(void *p, unsigned long bytes) { touch(p, int(bytes), true, false, EMU_PC()); }

// An atomic reads and writes; the write is what the others must be ordered with.
void emu_atomic(void *address, int bytes) { touch(address, bytes, true, true, EMU_PC()); }
void emu_atomic_load(void *address, int bytes) { touch(address, bytes, false, true, EMU_PC()); }

// ---- -fsanitize=bounds and object-size. The layouts are those of GCC's ubsan (gcc/ubsan.cc).

struct UbsanPlace {
  const char *file;
  uint32_t line, column;
};
struct UbsanType {
  uint16_t kind, info;
  char name[1];
};
struct UbsanBounds {
  UbsanPlace place;
  const UbsanType *array, *index;
};
struct UbsanAccess {
  UbsanPlace place;
  const UbsanType *type;
  unsigned char log_alignment, kind;
};

// The access itself would hit another variable of the fiber, so the launch ends.
void __ubsan_handle_out_of_bounds(UbsanBounds *data, void *index) {
  emu::stop(emu::Kind::out_of_bounds, emu::site_of(EMU_PC()), "index %ld of an array %s", long(intptr_t(index)),
            data->array->name);
}
void __ubsan_handle_out_of_bounds_abort(UbsanBounds *data, void *index) {
  emu::stop(emu::Kind::out_of_bounds, emu::site_of(EMU_PC()), "index %ld of an array %s", long(intptr_t(index)),
            data->array->name);
}
void __ubsan_handle_type_mismatch_v1(UbsanAccess *data, void *) {
  emu::stop(emu::Kind::out_of_bounds, emu::site_of(EMU_PC()), "access of %s beyond the end of a local array",
            data->type->name);
}
void __ubsan_handle_type_mismatch_v1_abort(UbsanAccess *data, void *) {
  emu::stop(emu::Kind::out_of_bounds, emu::site_of(EMU_PC()), "access of %s beyond the end of a local array",
            data->type->name);
}

}  // extern "C"
