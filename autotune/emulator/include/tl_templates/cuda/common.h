// Takes the place of TileLang's common.h: CUDA itself, packing, packed arithmetic, descriptors, named barriers.
//
// Headers here have TileLang's names and declare what TileLang's do, as far as the emulator covers it. What it does not
// cover is not declared, so that a kernel that needs it fails to build and the error names it.
#pragma once
#include <cassert>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cuda/std/limits"
#include "emu/abi.h"
#include "emu/bits.h"
#include "emu/driver.h"
#include "emu/float16.h"
#include "emu/float_math.h"
#include "emu/host.h"
#include "emu/index.h"
#include "emu/memory.h"
#include "emu/operands.h"
#include "emu/vectors.h"
#include "emu/warp.h"
#include "math_constants.h"

// ---- packing bytes and 16-bit values into wider vectors

TL_DEVICE unsigned make_uint(unsigned char x0, unsigned char x1, unsigned char x2, unsigned char x3) {
  return unsigned(x3) << 24 | unsigned(x2) << 16 | unsigned(x1) << 8 | x0;
}

TL_DEVICE int make_int(signed char x0, signed char x1, signed char x2, signed char x3) {
  return int(make_uint(x0, x1, x2, x3));
}

template <class T>
TL_DEVICE unsigned pack_b8x4(T x0, T x1, T x2, T x3) {
  static_assert(sizeof(T) == 1);
  auto byte = [](T x) __attribute__((always_inline)) { return __builtin_bit_cast(unsigned char, x); };
  return make_uint(byte(x0), byte(x1), byte(x2), byte(x3));
}

namespace emu {

// A vector from its scalars, lowest address first.
template <class Vector, class Element, class... Rest>
EMU_INLINE Vector pack(Element first, Rest... rest) {
  static_assert(sizeof(Vector) == (1 + sizeof...(rest)) * sizeof(Element), "as many elements as fill the vector");
  const Element elements[] = {first, static_cast<Element>(rest)...};
  Vector vector;
  __builtin_memcpy(&vector, elements, sizeof(Vector));
  return vector;
}

// Picks an overload by the number of its arguments.
template <int Count, class... Arguments>
using If = std::enable_if_t<sizeof...(Arguments) == Count, int>;

}  // namespace emu

template <class... Bytes, emu::If<8, Bytes...> = 0>
TL_DEVICE int2 make_int2(Bytes... bytes) { return emu::pack<int2>(static_cast<signed char>(bytes)...); }
template <class... Bytes, emu::If<16, Bytes...> = 0>
TL_DEVICE int4 make_int4(Bytes... bytes) { return emu::pack<int4>(static_cast<signed char>(bytes)...); }
template <class... Shorts, emu::If<8, Shorts...> = 0>
TL_DEVICE int4 make_int4(Shorts... shorts) { return emu::pack<int4>(static_cast<short>(shorts)...); }
template <class... Ints, emu::If<8, Ints...> = 0>
TL_DEVICE longlong4 make_longlong4(Ints... ints) { return emu::pack<longlong4>(static_cast<int>(ints)...); }
template <class... Bytes, emu::If<32, Bytes...> = 0>
TL_DEVICE longlong4 make_longlong4(Bytes... bytes) { return emu::pack<longlong4>(static_cast<signed char>(bytes)...); }

template <class... Bytes, emu::If<8, Bytes...> = 0>
TL_DEVICE uint2 make_uint2(Bytes... bytes) { return emu::pack<uint2>(static_cast<unsigned char>(bytes)...); }
template <class... Bytes, emu::If<16, Bytes...> = 0>
TL_DEVICE uint4 make_uint4(Bytes... bytes) { return emu::pack<uint4>(static_cast<unsigned char>(bytes)...); }
template <class... Shorts, emu::If<8, Shorts...> = 0>
TL_DEVICE uint4 make_uint4(Shorts... shorts) { return emu::pack<uint4>(static_cast<unsigned short>(shorts)...); }
template <class... Bytes, emu::If<32, Bytes...> = 0>
TL_DEVICE ulonglong4 make_ulonglong4(Bytes... bytes) {
  return emu::pack<ulonglong4>(static_cast<unsigned char>(bytes)...);
}

// ---- int4 and uint4, two to a byte, the even one low

TL_DEVICE int8_t tl_pack_int4x2(int low, int high) { return int8_t((low & 15) | (high & 15) << 4); }
TL_DEVICE uint8_t tl_pack_uint4x2(unsigned low, unsigned high) { return uint8_t((low & 15) | (high & 15) << 4); }

TL_DEVICE unsigned tl_uint4_packed_load(const unsigned char *packed, int index) {
  return packed[index >> 1] >> (index & 1) * 4 & 15;
}
TL_DEVICE int tl_int4_packed_load(const signed char *packed, int index) {
  unsigned value = static_cast<unsigned char>(packed[index >> 1]) >> (index & 1) * 4 & 15;
  return int(value ^ 8) - 8;
}
TL_DEVICE void tl_uint4_packed_store(unsigned char *packed, int index, unsigned value) {
  int shift = (index & 1) * 4;
  unsigned char kept = packed[index >> 1] & ~(15 << shift);
  packed[index >> 1] = kept | (value & 15) << shift;
}
TL_DEVICE void tl_int4_packed_store(signed char *packed, int index, int value) {
  int shift = (index & 1) * 4;
  unsigned char kept = static_cast<unsigned char>(packed[index >> 1]) & ~(15 << shift);
  packed[index >> 1] = static_cast<signed char>(kept | (value & 15) << shift);
}

// ---- shared addresses, dot products

TL_DEVICE uint32_t smem_ptr_to_uint(const void *pointer) { return emu_shared_address(pointer); }
TL_DEVICE unsigned cast_smem_ptr_to_int(const void *pointer) { return emu_shared_address(pointer); }

template <class In, class Out>
TL_DEVICE void DP4A(In *a, In *b, Out *c) {
  *c = __dp4a(*(int *)a, *(int *)b, *(int *)c);
}

namespace tl {

using ::tfloat32_t;

enum class DataType : int {
  kInt4 = 0,
  kUInt4 = 1,
  kInt8 = 2,
  kUInt8 = 3,
  kInt16 = 4,
  kUInt16 = 5,
  kInt32 = 6,
  kUInt32 = 7,
  kInt64 = 8,
  kUInt64 = 9,
  kFloat8_e4m3 = 10,
  kFloat8_e5m2 = 11,
  kFloat16 = 12,
  kBFloat16 = 13,
  kFloat16x2 = 14,
  kFloat32 = 15,
  kTensorFloat32 = 16,
  kFloat64 = 17,
  kBit1 = 18,
  kBit8 = 19,
  kBit16 = 20,
  kBit32 = 21,
  kBit64 = 22,
  kFloat6_e2m3fn = 23,
  kFloat6_e3m2fn = 24,
  kFloat4_e2m1fn = 25,
};

// ---- scalars and vectors of them

TL_DEVICE float fast_rcp(float x) { return 1 / x; }

template <class T>
TL_DEVICE T fast_max(T a, T b) { return a < b ? b : a; }
template <>
TL_DEVICE float fast_max(float a, float b) { return fmaxf(a, b); }
template <class T>
TL_DEVICE T fast_min(T a, T b) { return b < a ? b : a; }
template <>
TL_DEVICE float fast_min(float a, float b) { return fminf(a, b); }

template <class Vector, class Unit>
TL_DEVICE Vector broadcast(const Unit unit) {
  static_assert(sizeof(Vector) % sizeof(Unit) == 0);
  Vector vector;
  for (size_t at = 0; at < sizeof(Vector); at += sizeof(Unit)) {
    __builtin_memcpy(reinterpret_cast<char *>(&vector) + at, &unit, sizeof(Unit));
  }
  return vector;
}

template <class Vector, class Element, class... Rest>
TL_DEVICE Vector make_vec(const Element first, const Rest... rest) { return emu::pack<Vector>(first, rest...); }

template <class T>
TL_DEVICE bool Any(T *values, int size) {
  for (int i = 0; i < size; i++) {
    if (values[i]) return true;
  }
  return false;
}

template <class T>
TL_DEVICE bool All(T *values, int size) {
  for (int i = 0; i < size; i++) {
    if (!values[i]) return false;
  }
  return true;
}

template <int exponent = 1, class T>
TL_DEVICE T pow_of_int(T x) {
  T result = x;
  for (int i = 1; i < exponent; i++) result *= x;
  return result;
}

TL_DEVICE float RoundTiesAwayFromZero(float x) { return roundf(x); }
TL_DEVICE double RoundTiesAwayFromZero(double x) { return round(x); }
TL_DEVICE half_t RoundTiesAwayFromZero(half_t x) { return half_t(roundf(x)); }
TL_DEVICE bfloat16_t RoundTiesAwayFromZero(bfloat16_t x) { return bfloat16_t(roundf(x)); }

// ---- pairs; generated code keeps 16-bit ones in a uint1

template <class T>
TL_DEVICE T from_uint1(uint1 bits) { return __builtin_bit_cast(T, bits); }
template <class T>
TL_DEVICE uint1 to_uint1(T value) { return __builtin_bit_cast(uint1, value); }
TL_DEVICE uint1 pack_half2(half_t low, half_t high) { return {__pack_half2(low, high)}; }

#define TL_PACKED(NAME, FLOAT, PAIR)                                                          \
  TL_DEVICE float2 NAME(float2 a, float2 b) { return {FLOAT(a.x, b.x), FLOAT(a.y, b.y)}; }    \
  TL_DEVICE half2 NAME(half2 a, half2 b) { return PAIR(a, b); }                               \
  TL_DEVICE nv_bfloat162 NAME(nv_bfloat162 a, nv_bfloat162 b) { return PAIR(a, b); }
TL_PACKED(add2, __fadd_rn, __hadd2)
TL_PACKED(sub2, __fsub_rn, __hsub2)
TL_PACKED(mul2, __fmul_rn, __hmul2)
TL_PACKED(max2, fmaxf, __hmax2)
TL_PACKED(min2, fminf, __hmin2)
#undef TL_PACKED

TL_DEVICE float2 fma2(float2 a, float2 b, float2 c) { return {fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y)}; }
TL_DEVICE half2 fma2(half2 a, half2 b, half2 c) { return __hfma2(a, b, c); }
TL_DEVICE nv_bfloat162 fma2(nv_bfloat162 a, nv_bfloat162 b, nv_bfloat162 c) { return __hfma2(a, b, c); }

TL_DEVICE half2 max2_nan(half2 a, half2 b) { return __hmax2_nan(a, b); }
TL_DEVICE nv_bfloat162 max2_nan(nv_bfloat162 a, nv_bfloat162 b) { return __hmax2_nan(a, b); }
TL_DEVICE half2 min2_nan(half2 a, half2 b) { return __hmin2_nan(a, b); }
TL_DEVICE nv_bfloat162 min2_nan(nv_bfloat162 a, nv_bfloat162 b) { return __hmin2_nan(a, b); }

TL_DEVICE float2 abs2(float2 a) { return {fabsf(a.x), fabsf(a.y)}; }
TL_DEVICE half2 abs2(half2 a) { return __habs2(a); }
TL_DEVICE nv_bfloat162 abs2(nv_bfloat162 a) { return __habs2(a); }

// ---- descriptors of wgmma's operands in shared memory
//
//   bits  0-13  address / 16          bits 32-45  stride between groups of 8 rows / 16
//   bits 16-29  leading stride / 16   bits 62-63  swizzle: 0 none, 1 128 bytes, 2 64 bytes, 3 32 bytes

struct GmmaDescriptor {
  uint64_t desc_ = 0;

  GmmaDescriptor() = default;
  constexpr GmmaDescriptor(uint64_t bits) : desc_(bits) {}
  constexpr operator uint64_t() const { return desc_; }

  // In units of 16 bytes; a carry out of the low word is lost, as it is on the device.
  TL_DEVICE void advance(uint32_t offset) { desc_ = (desc_ & ~uint64_t(0xffffffff)) | uint32_t(desc_ + offset); }
  template <class T>
  TL_DEVICE GmmaDescriptor operator+(const T &offset) const {
    GmmaDescriptor moved(desc_);
    moved.advance(uint32_t(offset));
    return moved;
  }
};

template <int layout_type = 0, int leading_byte_offset = 0, int stride_byte_offset = 0, class T>
TL_DEVICE void initialize_wgmma_descriptor(GmmaDescriptor &descriptor, T *start_address) {
  constexpr uint64_t leading = leading_byte_offset & 0x3fff, stride = stride_byte_offset & 0x3fff;
  uint64_t address = emu_shared_address(start_address) >> 4 & 0x3fff;
  descriptor.desc_ = address | leading << 16 | stride << 32 | uint64_t(layout_type) << 62;
}

template <class T>
TL_DEVICE void increase_descriptor_offset(GmmaDescriptor &descriptor, T bytes) {
  descriptor.advance(uint32_t(bytes >> 4));
}

// ---- barriers among some of the block's threads

TL_DEVICE void __sync_thread_partial(int barrier_id = 0, int thread_count = 0) {
  emu_barrier_sync(barrier_id, thread_count);
}
TL_DEVICE void __named_barrier_arrive(int barrier_id, int thread_count) {
  emu_barrier_arrive(barrier_id, thread_count);
}

// ---- st.bulk: zeros

template <uint64_t bytes, uint64_t value>
TL_DEVICE void st_bulk_shared(void *shared) {
  static_assert(value == 0 && bytes % 8 == 0, "st.bulk writes zeros, eight bytes at a time");
  for (uint64_t i = 0; i < bytes / 8; i++) static_cast<uint64_t *>(shared)[i] = 0;
}

// ---- shuffles of anything up to eight bytes

template <class T>
TL_DEVICE T shfl_sync(unsigned mask, T value, int source_lane) { return __shfl_sync(mask, value, source_lane); }
template <class T>
TL_DEVICE T shfl_xor_sync(unsigned mask, T value, int lane_mask) { return __shfl_xor_sync(mask, value, lane_mask); }
template <class T>
TL_DEVICE T shfl_down_sync(unsigned mask, T value, int delta) { return __shfl_down_sync(mask, value, delta); }
template <class T>
TL_DEVICE T shfl_up_sync(unsigned mask, T value, int delta) { return __shfl_up_sync(mask, value, delta); }

}  // namespace tl
