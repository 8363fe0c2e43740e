// half, bfloat16 and tf32, scalar and in pairs. Arithmetic is done in fp32 and rounded once, to nearest even.
//
// CUDA's own types and CUTLASS's wrappers of them are one type here: generated code only ever converts between them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "emu/vectors.h"

namespace emu {

EMU_INLINE uint32_t float_bits(float value) { return __builtin_bit_cast(uint32_t, value); }
EMU_INLINE float bits_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }

struct HalfFormat {
  static constexpr uint16_t infinity = 0x7c00, lowest = 0xfbff, not_a_number = 0x7fff;

  // The F16C instructions: g++ before 12 has no _Float16.
  static EMU_INLINE uint16_t narrow(float value) {
    typedef float Floats __attribute__((vector_size(16)));
    return __builtin_ia32_vcvtps2ph(Floats{value}, 0 /* to nearest even */)[0];
  }
  static EMU_INLINE float widen(uint16_t bits) {
    typedef short Halves __attribute__((vector_size(16)));
    return __builtin_ia32_vcvtph2ps(Halves{short(bits)})[0];
  }
};

struct Bfloat16Format {
  static constexpr uint16_t infinity = 0x7f80, lowest = 0xff7f, not_a_number = 0x7fff;

  static EMU_INLINE uint16_t narrow(float value) {
    if (value != value) return not_a_number;
    uint32_t bits = float_bits(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  static EMU_INLINE float widen(uint16_t bits) { return bits_float(uint32_t(bits) << 16); }
};

template <class Format>
struct __align__(2) Float16 {
  uint16_t storage;

  Float16() = default;
  // Explicit, as CUTLASS's are: with one operand of another type, arithmetic is that of float.
  template <class T, class = std::enable_if_t<std::is_convertible_v<T, float> && !std::is_same_v<T, Float16>>>
  explicit EMU_INLINE Float16(T value) : storage(Format::narrow(float(value))) {}

  static EMU_INLINE Float16 bitcast(uint16_t bits) {
    Float16 value;
    value.storage = bits;
    return value;
  }
  EMU_INLINE uint16_t raw() const { return storage; }
  EMU_INLINE operator float() const { return Format::widen(storage); }
  explicit EMU_INLINE operator bool() const { return (storage & 0x7fff) != 0; }
  EMU_INLINE Float16 to_half() const { return *this; }
  EMU_INLINE Float16 to_nv_bfloat16() const { return *this; }

  EMU_INLINE Float16 operator-() const { return bitcast(storage ^ 0x8000); }
  EMU_INLINE Float16 operator+() const { return *this; }
  EMU_INLINE Float16 &operator+=(Float16 other) { return *this = *this + other; }
  EMU_INLINE Float16 &operator-=(Float16 other) { return *this = *this - other; }
  EMU_INLINE Float16 &operator*=(Float16 other) { return *this = *this * other; }
  EMU_INLINE Float16 &operator/=(Float16 other) { return *this = *this / other; }
  EMU_INLINE Float16 &operator++() { return *this = Float16(float(*this) + 1); }
  EMU_INLINE Float16 &operator--() { return *this = Float16(float(*this) - 1); }

  friend EMU_INLINE Float16 operator+(Float16 a, Float16 b) { return Float16(float(a) + float(b)); }
  friend EMU_INLINE Float16 operator-(Float16 a, Float16 b) { return Float16(float(a) - float(b)); }
  friend EMU_INLINE Float16 operator*(Float16 a, Float16 b) { return Float16(float(a) * float(b)); }
  friend EMU_INLINE Float16 operator/(Float16 a, Float16 b) { return Float16(float(a) / float(b)); }
  friend EMU_INLINE bool operator<(Float16 a, Float16 b) { return float(a) < float(b); }
  friend EMU_INLINE bool operator>(Float16 a, Float16 b) { return float(a) > float(b); }
  friend EMU_INLINE bool operator<=(Float16 a, Float16 b) { return float(a) <= float(b); }
  friend EMU_INLINE bool operator>=(Float16 a, Float16 b) { return float(a) >= float(b); }
  friend EMU_INLINE bool operator==(Float16 a, Float16 b) { return float(a) == float(b); }
  friend EMU_INLINE bool operator!=(Float16 a, Float16 b) { return float(a) != float(b); }
};

template <class T>
struct __align__(4) Pair {
  T x, y;

  Pair() = default;
  EMU_INLINE Pair(T x, T y) : x(x), y(y) {}

  friend EMU_INLINE Pair operator+(Pair a, Pair b) { return {a.x + b.x, a.y + b.y}; }
  friend EMU_INLINE Pair operator-(Pair a, Pair b) { return {a.x - b.x, a.y - b.y}; }
  friend EMU_INLINE Pair operator*(Pair a, Pair b) { return {a.x * b.x, a.y * b.y}; }
  friend EMU_INLINE Pair operator/(Pair a, Pair b) { return {a.x / b.x, a.y / b.y}; }
  friend EMU_INLINE Pair operator-(Pair a) { return {-a.x, -a.y}; }
};

}  // namespace emu

using half_t = emu::Float16<emu::HalfFormat>;
using bfloat16_t = emu::Float16<emu::Bfloat16Format>;
using half = half_t;
using __half = half_t;
using half2 = emu::Pair<half_t>;
using __half2 = half2;
using nv_bfloat16 = bfloat16_t;
using __nv_bfloat16 = bfloat16_t;
using nv_bfloat162 = emu::Pair<bfloat16_t>;
using __nv_bfloat162 = nv_bfloat162;

// fp32 with 10 bits of mantissa; ties away from zero, as cvt.rna.tf32.f32 does.
struct tfloat32_t {
  uint32_t storage;

  tfloat32_t() = default;
  template <class T, class = std::enable_if_t<std::is_convertible_v<T, float> && !std::is_same_v<T, tfloat32_t>>>
  explicit EMU_INLINE tfloat32_t(T value) : storage(emu::float_bits(float(value))) {
    if (std::isfinite(float(value))) storage = (storage + 0x1000) & ~0x1fffu;
  }
  EMU_INLINE operator float() const { return emu::bits_float(storage); }
};

namespace cutlass {
using ::bfloat16_t;
using ::half_t;
using ::tfloat32_t;

namespace platform {
template <class T>
struct numeric_limits : std::numeric_limits<T> {};

template <class Format>
struct numeric_limits<emu::Float16<Format>> {
  static constexpr bool is_specialized = true, has_infinity = true;
  static EMU_INLINE emu::Float16<Format> infinity() { return emu::Float16<Format>::bitcast(Format::infinity); }
  static EMU_INLINE emu::Float16<Format> lowest() { return emu::Float16<Format>::bitcast(Format::lowest); }
};
}  // namespace platform
}  // namespace cutlass

// ---- conversions

EMU_INLINE half_t __float2half(float x) { return half_t(x); }
EMU_INLINE half_t __float2half_rn(float x) { return half_t(x); }
EMU_INLINE float __half2float(half_t x) { return x; }
EMU_INLINE bfloat16_t __float2bfloat16(float x) { return bfloat16_t(x); }
EMU_INLINE bfloat16_t __float2bfloat16_rn(float x) { return bfloat16_t(x); }
EMU_INLINE float __bfloat162float(bfloat16_t x) { return x; }

EMU_INLINE half2 __float22half2_rn(float2 v) { return {half_t(v.x), half_t(v.y)}; }
EMU_INLINE half2 __floats2half2_rn(float x, float y) { return {half_t(x), half_t(y)}; }
EMU_INLINE float2 __half22float2(half2 v) { return {v.x, v.y}; }
EMU_INLINE nv_bfloat162 __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }
EMU_INLINE nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {bfloat16_t(x), bfloat16_t(y)}; }
EMU_INLINE float2 __bfloat1622float2(nv_bfloat162 v) { return {v.x, v.y}; }

EMU_INLINE half2 make_half2(half_t x, half_t y) { return {x, y}; }
EMU_INLINE half2 __halves2half2(half_t x, half_t y) { return {x, y}; }
EMU_INLINE half2 __half2half2(half_t x) { return {x, x}; }
EMU_INLINE nv_bfloat162 make_bfloat162(bfloat16_t x, bfloat16_t y) { return {x, y}; }
EMU_INLINE nv_bfloat162 __halves2bfloat162(bfloat16_t x, bfloat16_t y) { return {x, y}; }
EMU_INLINE nv_bfloat162 __bfloat162bfloat162(bfloat16_t x) { return {x, x}; }

template <class Format>
EMU_INLINE emu::Float16<Format> __low2half(emu::Pair<emu::Float16<Format>> v) { return v.x; }
template <class Format>
EMU_INLINE emu::Float16<Format> __high2half(emu::Pair<emu::Float16<Format>> v) { return v.y; }
template <class Format>
EMU_INLINE float __low2float(emu::Pair<emu::Float16<Format>> v) { return v.x; }
template <class Format>
EMU_INLINE float __high2float(emu::Pair<emu::Float16<Format>> v) { return v.y; }

template <class Format>
EMU_INLINE unsigned __pack_half2(emu::Float16<Format> low, emu::Float16<Format> high) {
  return unsigned(high.storage) << 16 | low.storage;
}
EMU_INLINE unsigned __pack_nv_bfloat162(bfloat16_t low, bfloat16_t high) { return __pack_half2(low, high); }

// ---- functions of one 16-bit float: evaluated in fp32, rounded once

#define EMU_UNARY(NAME, EXPRESSION)                                                     \
  template <class Format>                                                               \
  EMU_INLINE emu::Float16<Format> NAME(emu::Float16<Format> value) {                    \
    float x = value;                                                                    \
    return emu::Float16<Format>(EXPRESSION);                                            \
  }
EMU_UNARY(hexp, expf(x))
EMU_UNARY(hexp2, exp2f(x))
EMU_UNARY(hexp10, exp10f(x))
EMU_UNARY(hlog, logf(x))
EMU_UNARY(hlog2, log2f(x))
EMU_UNARY(hlog10, log10f(x))
EMU_UNARY(hlog1p, log1pf(x))
EMU_UNARY(hsqrt, sqrtf(x))
EMU_UNARY(hrsqrt, 1 / sqrtf(x))
EMU_UNARY(hrcp, 1 / x)
EMU_UNARY(hsin, sinf(x))
EMU_UNARY(hcos, cosf(x))
EMU_UNARY(htan, tanf(x))
EMU_UNARY(hsinh, sinhf(x))
EMU_UNARY(hcosh, coshf(x))
EMU_UNARY(htanh, tanhf(x))
EMU_UNARY(hatan, atanf(x))
EMU_UNARY(herf, erff(x))
EMU_UNARY(hfloor, floorf(x))
EMU_UNARY(hceil, ceilf(x))
EMU_UNARY(htrunc, truncf(x))
EMU_UNARY(hrint, rintf(x))
EMU_UNARY(hnearbyint, nearbyintf(x))
#undef EMU_UNARY

template <class Format>
EMU_INLINE emu::Float16<Format> __habs(emu::Float16<Format> x) {
  return emu::Float16<Format>::bitcast(x.storage & 0x7fff);
}
template <class Format>
EMU_INLINE emu::Float16<Format> __hneg(emu::Float16<Format> x) { return -x; }
template <class Format>
EMU_INLINE bool __hisnan(emu::Float16<Format> x) { return std::isnan(float(x)); }
template <class Format>
EMU_INLINE int __hisinf(emu::Float16<Format> x) { return std::isinf(float(x)) ? (x < 0 ? -1 : 1) : 0; }

// ---- functions of two

#define EMU_BINARY(NAME, EXPRESSION)                                                    \
  template <class Format>                                                               \
  EMU_INLINE emu::Float16<Format> NAME(emu::Float16<Format> a, emu::Float16<Format> b) { \
    float x = a, y = b;                                                                 \
    return emu::Float16<Format>(EXPRESSION);                                            \
  }
EMU_BINARY(__hadd, x + y)
EMU_BINARY(__hadd_rn, x + y)
EMU_BINARY(__hsub, x - y)
EMU_BINARY(__hsub_rn, x - y)
EMU_BINARY(__hmul, x * y)
EMU_BINARY(__hmul_rn, x * y)
EMU_BINARY(__hdiv, x / y)
EMU_BINARY(__hmax, fmaxf(x, y))
EMU_BINARY(__hmin, fminf(x, y))
EMU_BINARY(__hmax_nan, std::isnan(x) || std::isnan(y) ? NAN : fmaxf(x, y))
EMU_BINARY(__hmin_nan, std::isnan(x) || std::isnan(y) ? NAN : fminf(x, y))
EMU_BINARY(hpow, powf(x, y))
EMU_BINARY(hfmod, fmodf(x, y))
#undef EMU_BINARY

#define EMU_COMPARE(NAME, OPERATOR)                                                     \
  template <class Format>                                                               \
  EMU_INLINE bool NAME(emu::Float16<Format> a, emu::Float16<Format> b) { return a OPERATOR b; }
EMU_COMPARE(__hlt, <)
EMU_COMPARE(__hle, <=)
EMU_COMPARE(__hgt, >)
EMU_COMPARE(__hge, >=)
EMU_COMPARE(__heq, ==)
EMU_COMPARE(__hne, !=)
#undef EMU_COMPARE

template <class Format>
EMU_INLINE emu::Float16<Format> __hfma(emu::Float16<Format> a, emu::Float16<Format> b, emu::Float16<Format> c) {
  return emu::Float16<Format>(fmaf(a, b, c));
}

// ---- the same on pairs

#define EMU_PAIR_UNARY(NAME, SCALAR)                                                    \
  template <class Format>                                                               \
  EMU_INLINE emu::Pair<emu::Float16<Format>> NAME(emu::Pair<emu::Float16<Format>> a) {  \
    return {SCALAR(a.x), SCALAR(a.y)};                                                  \
  }
EMU_PAIR_UNARY(__habs2, __habs)
EMU_PAIR_UNARY(__hneg2, __hneg)
EMU_PAIR_UNARY(h2exp, hexp)
EMU_PAIR_UNARY(h2exp2, hexp2)
EMU_PAIR_UNARY(h2log, hlog)
EMU_PAIR_UNARY(h2log2, hlog2)
EMU_PAIR_UNARY(h2rcp, hrcp)
EMU_PAIR_UNARY(h2rsqrt, hrsqrt)
EMU_PAIR_UNARY(h2sqrt, hsqrt)
#undef EMU_PAIR_UNARY

#define EMU_PAIR_BINARY(NAME, SCALAR)                                                   \
  template <class Format>                                                               \
  EMU_INLINE emu::Pair<emu::Float16<Format>> NAME(emu::Pair<emu::Float16<Format>> a,    \
                                                  emu::Pair<emu::Float16<Format>> b) {  \
    return {SCALAR(a.x, b.x), SCALAR(a.y, b.y)};                                        \
  }
EMU_PAIR_BINARY(__hadd2, __hadd)
EMU_PAIR_BINARY(__hsub2, __hsub)
EMU_PAIR_BINARY(__hmul2, __hmul)
EMU_PAIR_BINARY(__h2div, __hdiv)
EMU_PAIR_BINARY(__hmax2, __hmax)
EMU_PAIR_BINARY(__hmin2, __hmin)
EMU_PAIR_BINARY(__hmax2_nan, __hmax_nan)
EMU_PAIR_BINARY(__hmin2_nan, __hmin_nan)
#undef EMU_PAIR_BINARY

template <class T>
EMU_INLINE emu::Pair<T> __hfma2(emu::Pair<T> a, emu::Pair<T> b, emu::Pair<T> c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
