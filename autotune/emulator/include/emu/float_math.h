// CUDA's single and double precision intrinsics by libm. The approximate ones (__expf, ...) are exact to the last bits
// here: how far the hardware is off is not modelled. Rounding modes other than to nearest are not covered.
#pragma once
#include <cmath>
#include <cstdlib>

#include "emu/float16.h"

using std::abs;
using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;

// ---- approximate

EMU_INLINE float __expf(float x) { return expf(x); }
EMU_INLINE float __exp2f(float x) { return exp2f(x); }
EMU_INLINE float __exp10f(float x) { return exp10f(x); }
EMU_INLINE float __logf(float x) { return logf(x); }
EMU_INLINE float __log2f(float x) { return log2f(x); }
EMU_INLINE float __log10f(float x) { return log10f(x); }
EMU_INLINE float __sinf(float x) { return sinf(x); }
EMU_INLINE float __cosf(float x) { return cosf(x); }
EMU_INLINE float __tanf(float x) { return tanf(x); }
EMU_INLINE float __tanhf(float x) { return tanhf(x); }
EMU_INLINE float __powf(float x, float y) { return powf(x, y); }
EMU_INLINE float __fdividef(float x, float y) { return x / y; }
EMU_INLINE float __saturatef(float x) { return x > 0 ? fminf(x, 1) : 0; }  // NaN becomes 0
EMU_INLINE float rsqrtf(float x) { return 1 / sqrtf(x); }
EMU_INLINE double rsqrt(double x) { return 1 / sqrt(x); }
EMU_INLINE void __sincosf(float x, float *sine, float *cosine) { *sine = sinf(x), *cosine = cosf(x); }

// ---- IEEE, rounded to nearest even

EMU_INLINE float __fadd_rn(float x, float y) { return x + y; }
EMU_INLINE float __fsub_rn(float x, float y) { return x - y; }
EMU_INLINE float __fmul_rn(float x, float y) { return x * y; }
EMU_INLINE float __fdiv_rn(float x, float y) { return x / y; }
EMU_INLINE float __frcp_rn(float x) { return 1 / x; }
EMU_INLINE float __fsqrt_rn(float x) { return sqrtf(x); }
EMU_INLINE float __frsqrt_rn(float x) { return float(1 / sqrt(double(x))); }
EMU_INLINE float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
EMU_INLINE double __dadd_rn(double x, double y) { return x + y; }
EMU_INLINE double __dsub_rn(double x, double y) { return x - y; }
EMU_INLINE double __dmul_rn(double x, double y) { return x * y; }
EMU_INLINE double __ddiv_rn(double x, double y) { return x / y; }
EMU_INLINE double __drcp_rn(double x) { return 1 / x; }
EMU_INLINE double __dsqrt_rn(double x) { return sqrt(x); }
EMU_INLINE double __fma_rn(double x, double y, double z) { return fma(x, y, z); }

// ---- conversions

EMU_INLINE int __float2int_rn(float x) { return int(rintf(x)); }
EMU_INLINE int __float2int_rz(float x) { return int(x); }
EMU_INLINE int __float2int_rd(float x) { return int(floorf(x)); }
EMU_INLINE int __float2int_ru(float x) { return int(ceilf(x)); }
EMU_INLINE unsigned __float2uint_rn(float x) { return unsigned(rintf(x)); }
EMU_INLINE float __int2float_rn(int x) { return float(x); }
EMU_INLINE float __uint2float_rn(unsigned x) { return float(x); }
EMU_INLINE int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
EMU_INLINE unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
EMU_INLINE float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
EMU_INLINE float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
EMU_INLINE long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }
EMU_INLINE double __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }

// ---- max and min: of a number and a NaN, the number

#define EMU_MAX_MIN(TYPE)                                            \
  EMU_INLINE TYPE max(TYPE a, TYPE b) { return a < b ? b : a; }      \
  EMU_INLINE TYPE min(TYPE a, TYPE b) { return b < a ? b : a; }
EMU_MAX_MIN(int)
EMU_MAX_MIN(unsigned)
EMU_MAX_MIN(long)
EMU_MAX_MIN(unsigned long)
EMU_MAX_MIN(long long)
EMU_MAX_MIN(unsigned long long)
#undef EMU_MAX_MIN
EMU_INLINE unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
EMU_INLINE unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }
EMU_INLINE unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
EMU_INLINE unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
EMU_INLINE float max(float a, float b) { return fmaxf(a, b); }
EMU_INLINE float min(float a, float b) { return fminf(a, b); }
EMU_INLINE double max(double a, double b) { return fmax(a, b); }
EMU_INLINE double min(double a, double b) { return fmin(a, b); }
EMU_INLINE double max(float a, double b) { return fmax(a, b); }
EMU_INLINE double max(double a, float b) { return fmax(a, b); }
EMU_INLINE double min(float a, double b) { return fmin(a, b); }
EMU_INLINE double min(double a, float b) { return fmin(a, b); }
