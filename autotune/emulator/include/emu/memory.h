// Barriers and fences of a block, atomics, and loads by another name.
//
// Not here, since nothing stands behind them: __activemask, __nanosleep.
#pragma once
#include <type_traits>

#include "emu/abi.h"
#include "emu/float16.h"

EMU_INLINE void __syncthreads() { emu_barrier_sync(0, 0); }
EMU_INLINE int __syncthreads_count(int predicate) { return emu_barrier_count(predicate); }
EMU_INLINE int __syncthreads_or(int predicate) { return emu_barrier_count(predicate) != 0; }
EMU_INLINE int __syncthreads_and(int predicate) { return emu_barrier_count(!predicate) == 0; }
EMU_INLINE void __threadfence() { emu_threadfence(); }
EMU_INLINE void __threadfence_block() { emu_threadfence(); }
EMU_INLINE void __threadfence_system() { emu_threadfence(); }

template <class T>
EMU_INLINE T __ldg(const T *pointer) { return *pointer; }

template <class T>
EMU_INLINE uint32_t __cvta_generic_to_shared(const T *pointer) { return emu_shared_address(pointer); }

// ---- atomics

namespace emu {

// emu_atomic has checked the access and no other thread can come between: what follows is plain, and not hooked.
template <class T, class Update>
EMU_UNCHECKED T exchange(T *address, T operand, Update) {
  T old = *address;
  *address = Update::apply(old, operand);
  return old;
}

template <class T>
EMU_UNCHECKED T exchange_if(T *address, T expected, T desired) {
  T old = *address;
  if (old == expected) *address = desired;
  return old;
}

struct Keep;  // a load

template <class Update, class T>
EMU_INLINE T atomic(T *address, T operand) {
  if constexpr (std::is_same_v<Update, Keep>) emu_atomic_load(address, sizeof(T));
  else emu_atomic(address, sizeof(T));
  return exchange(address, operand, Update{});
}

#define EMU_UPDATE(NAME, EXPRESSION)                                           \
  struct NAME {                                                                \
    template <class T>                                                         \
    static EMU_UNCHECKED T apply(T old, T value) { return EXPRESSION; }        \
  };
EMU_UPDATE(Sub, old - value)
EMU_UPDATE(Max, old < value ? value : old)
EMU_UPDATE(Min, value < old ? value : old)
EMU_UPDATE(And, old & value)
EMU_UPDATE(Or, old | value)
EMU_UPDATE(Xor, old ^ value)
EMU_UPDATE(Set, value)
EMU_UPDATE(Keep, old)
EMU_UPDATE(Increment, old >= value ? 0 : old + 1)
EMU_UPDATE(Decrement, old == 0 || old > value ? value : old - 1)
#undef EMU_UPDATE

struct Add {
  template <class T>
  static EMU_UNCHECKED T apply(T old, T value) { return old + value; }
  static EMU_UNCHECKED float2 apply(float2 old, float2 value) { return {old.x + value.x, old.y + value.y}; }
  static EMU_UNCHECKED float4 apply(float4 old, float4 value) {
    return {old.x + value.x, old.y + value.y, old.z + value.z, old.w + value.w};
  }
};

}  // namespace emu

// The operand takes the type that is in memory, as it does in CUDA's overloads.
#define EMU_ATOMIC(NAME, UPDATE)                                               \
  template <class T>                                                           \
  EMU_INLINE T NAME(T *address, std::common_type_t<T> value) {                 \
    return emu::atomic<emu::UPDATE>(address, value);                           \
  }
EMU_ATOMIC(atomicAdd, Add)
EMU_ATOMIC(atomicSub, Sub)
EMU_ATOMIC(atomicMax, Max)
EMU_ATOMIC(atomicMin, Min)
EMU_ATOMIC(atomicAnd, And)
EMU_ATOMIC(atomicOr, Or)
EMU_ATOMIC(atomicXor, Xor)
EMU_ATOMIC(atomicExch, Set)
EMU_ATOMIC(atomicInc, Increment)
EMU_ATOMIC(atomicDec, Decrement)
#undef EMU_ATOMIC

template <class T>
EMU_INLINE T atomicCAS(T *address, std::common_type_t<T> expected, std::common_type_t<T> desired) {
  emu_atomic(address, sizeof(T));
  return emu::exchange_if(address, expected, desired);
}
