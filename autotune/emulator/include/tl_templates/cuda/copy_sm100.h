// 256-bit loads and stores. The rest of TileLang's header, tensor memory and 2-SM TMA, is not covered.
#pragma once
#include "copy_sm90.h"

namespace tl {

template <class T>
TL_DEVICE T load_global_256(const T *from) {
  static_assert(sizeof(T) == 32);
  return *from;
}

template <class T>
TL_DEVICE T load_global_256_conditional(const T *from, bool condition) {
  static_assert(sizeof(T) == 32);
  T value{};
  if (condition) value = *from;
  return value;
}

template <class T>
TL_DEVICE void store_global_256(void *to, const T &value) {
  static_assert(sizeof(T) == 32);
  *static_cast<T *>(to) = value;
}

template <class T>
TL_DEVICE void store_global_256_conditional(void *to, const T &value, bool condition) {
  static_assert(sizeof(T) == 32);
  if (condition) *static_cast<T *>(to) = value;
}

TL_DEVICE unsigned long long pack_float16x4(half_t x, half_t y, half_t z, half_t w) {
  return emu::pack<unsigned long long>(x, y, z, w);
}
TL_DEVICE unsigned long long pack_bfloat16x4(bfloat16_t x, bfloat16_t y, bfloat16_t z, bfloat16_t w) {
  return emu::pack<unsigned long long>(x, y, z, w);
}

}  // namespace tl
