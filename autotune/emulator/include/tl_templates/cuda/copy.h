// cp.async, and loads and stores of a given width.
#pragma once
#include "common.h"

namespace tl {

TL_DEVICE void cp_async_commit() { emu_cp_async_commit(); }

// wait<0> is emitted as cp.async.wait_all, which waits for copies that were not committed, too.
template <int groups_left>
TL_DEVICE void cp_async_wait() { emu_cp_async_wait(groups_left); }

template <int bytes>
TL_DEVICE void cp_async_gs(const void *shared, const void *global) {
  static_assert(bytes == 16 || bytes == 8 || bytes == 4);
  emu_cp_async(const_cast<void *>(shared), global, bytes, bytes);
}

template <int bytes>
TL_DEVICE void cp_async_gs_conditional(const void *shared, const void *global, bool condition) {
  static_assert(bytes == 16 || bytes == 8 || bytes == 4);
  emu_cp_async(const_cast<void *>(shared), global, bytes, condition ? bytes : 0);
}

#define TL_ACCESS(BITS, TYPE)                                                                                   \
  TL_DEVICE TYPE load_global_##BITS(const void *from) { return *static_cast<const TYPE *>(from); }              \
  TL_DEVICE TYPE load_shared_##BITS(const void *from) { return *static_cast<const TYPE *>(from); }              \
  TL_DEVICE TYPE load_global_##BITS##_conditional(const void *from, bool condition) {                           \
    TYPE value{};                                                                                               \
    if (condition) value = *static_cast<const TYPE *>(from);                                                    \
    return value;                                                                                               \
  }                                                                                                             \
  TL_DEVICE void store_global_##BITS(void *to, TYPE value) { *static_cast<TYPE *>(to) = value; }                \
  TL_DEVICE void store_shared_##BITS(void *to, TYPE value) { *static_cast<TYPE *>(to) = value; }                \
  TL_DEVICE void store_global_##BITS##_conditional(void *to, TYPE value, bool condition) {                      \
    if (condition) *static_cast<TYPE *>(to) = value;                                                            \
  }
TL_ACCESS(32, uint32_t)
TL_ACCESS(64, uint2)
TL_ACCESS(128, uint4)
#undef TL_ACCESS

}  // namespace tl
