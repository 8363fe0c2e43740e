// Atomics on scalars and on vectors of two and four. The vector ones add element by element, each atomically.
//
// A memory order other than relaxed is a fence before the operation (release) or after it (acquire).
#pragma once
#include "common.h"

namespace emu {

enum Order { kRelaxed = 0, kConsume = 1, kAcquire = 2, kRelease = 3, kAcquireRelease = 4, kSequential = 5 };

template <class Update, class T>
EMU_INLINE T ordered_atomic(T *address, T value, int order) {
  if (order >= kRelease) emu_threadfence();
  T old = atomic<Update>(address, value);
  if (order != kRelaxed && order != kRelease) emu_threadfence();
  return old;
}

// Two 16-bit elements out of a pair, an fp32 pair, their bits, or a pointer to either.
template <class T, class Value>
EMU_INLINE Pair<T> to_pair(Value value) {
  if constexpr (std::is_pointer_v<Value>) {
    using Element = std::remove_cv_t<std::remove_pointer_t<Value>>;
    if constexpr (std::is_same_v<Element, float>) return {T(value[0]), T(value[1])};
    return *reinterpret_cast<const Pair<T> *>(value);
  } else if constexpr (std::is_same_v<Value, float2>) {
    return {T(value.x), T(value.y)};
  } else {
    return __builtin_bit_cast(Pair<T>, value);
  }
}

// An fp32 vector, or a pointer to one.
template <class Vector, class Value>
EMU_INLINE Vector to_vector(Value value) {
  if constexpr (std::is_pointer_v<Value>) {
    return *reinterpret_cast<const Vector *>(value);
  } else {
    return value;
  }
}

template <class T, class Value>
EMU_INLINE Pair<T> add_pair(T *address, Value value, int order) {
  return ordered_atomic<Add>(reinterpret_cast<Pair<T> *>(address), to_pair<T>(value), order);
}

// There is no atomic of four 16-bit elements on most devices: TileLang too makes it two of two.
template <class T, class Value>
EMU_INLINE uint2 add_two_pairs(T *address, const Value *values, int order) {
  Pair<T> low = add_pair(address, values, order);
  Pair<T> high = add_pair(address + 2, values + 2, order);
  return {__builtin_bit_cast(unsigned, low), __builtin_bit_cast(unsigned, high)};
}

}  // namespace emu

#define TL_ATOMIC(NAME, UPDATE)                                                    \
  template <class T, class Value>                                                  \
  TL_DEVICE void NAME(T *address, Value value, int order = emu::kRelaxed) {        \
    emu::ordered_atomic<emu::UPDATE>(address, T(value), order);                    \
  }                                                                                \
  template <class T, class Value>                                                  \
  TL_DEVICE T NAME##Ret(T *address, Value value, int order = emu::kRelaxed) {      \
    return emu::ordered_atomic<emu::UPDATE>(address, T(value), order);             \
  }
TL_ATOMIC(AtomicAdd, Add)
TL_ATOMIC(AtomicMax, Max)
TL_ATOMIC(AtomicMin, Min)
TL_ATOMIC(AtomicOr, Or)
#undef TL_ATOMIC

template <class T>
TL_DEVICE std::remove_const_t<T> AtomicLoad(T *address, int order) {
  using Value = std::remove_const_t<T>;
  return emu::ordered_atomic<emu::Keep>(const_cast<Value *>(address), Value(), order);
}

template <class T, class Value>
TL_DEVICE void AtomicStore(T *address, Value value, int order) {
  emu::ordered_atomic<emu::Set>(address, T(value), order);
}

#define TL_ATOMIC_PAIRS(TYPE)                                                                      \
  template <class Value>                                                                           \
  TL_DEVICE void AtomicAddx2(TYPE *address, Value value, int order = emu::kRelaxed) {              \
    emu::add_pair(address, value, order);                                                          \
  }                                                                                                \
  template <class Value>                                                                           \
  TL_DEVICE emu::Pair<TYPE> AtomicAddx2Ret(TYPE *address, Value value, int order = emu::kRelaxed) { \
    return emu::add_pair(address, value, order);                                                   \
  }                                                                                                \
  template <class Value>                                                                           \
  TL_DEVICE void AtomicAddx4(TYPE *address, Value *values, int order = emu::kRelaxed) {            \
    emu::add_two_pairs(address, values, order);                                                    \
  }                                                                                                \
  template <class Value>                                                                           \
  TL_DEVICE uint2 AtomicAddx4Ret(TYPE *address, Value *values, int order = emu::kRelaxed) {        \
    return emu::add_two_pairs(address, values, order);                                             \
  }
TL_ATOMIC_PAIRS(half_t)
TL_ATOMIC_PAIRS(bfloat16_t)
#undef TL_ATOMIC_PAIRS

template <class Value>
TL_DEVICE float2 AtomicAddx2Ret(float *address, Value value, int order = emu::kRelaxed) {
  float2 operand = emu::to_vector<float2>(value);
  return emu::ordered_atomic<emu::Add>(reinterpret_cast<float2 *>(address), operand, order);
}
template <class Value>
TL_DEVICE float4 AtomicAddx4Ret(float *address, Value value, int order = emu::kRelaxed) {
  float4 operand = emu::to_vector<float4>(value);
  return emu::ordered_atomic<emu::Add>(reinterpret_cast<float4 *>(address), operand, order);
}
template <class Value>
TL_DEVICE void AtomicAddx2(float *address, Value value, int order = emu::kRelaxed) {
  AtomicAddx2Ret(address, value, order);
}
template <class Value>
TL_DEVICE void AtomicAddx4(float *address, Value value, int order = emu::kRelaxed) {
  AtomicAddx4Ret(address, value, order);
}
