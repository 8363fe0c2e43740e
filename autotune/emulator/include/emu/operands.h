// Registers of an instruction live in local arrays. One that ends too early is caught here: what the runtime does with
// a pointer is not seen by the compiler's own bounds checks.
#pragma once
#include "emu/abi.h"
#include "emu/qualifiers.h"

#if __GNUC__ >= 12
#define EMU_OBJECT_SIZE(pointer) __builtin_dynamic_object_size(pointer, 0)
#else
#define EMU_OBJECT_SIZE(pointer) __builtin_object_size(pointer, 0)  // known for constant offsets only
#endif

// The size is unknown, and then the greatest there is, for what is not a local array.
#define EMU_CHECK_OPERAND(pointer, bytes, what)                                                                \
  do {                                                                                                         \
    if (EMU_OBJECT_SIZE(pointer) < size_t(bytes)) emu_fail(what ": the local array ends inside this operand"); \
  } while (0)
