// What the tile DSL cannot say on target "c": transposing a tile inside registers, converting rows of fp16,
// decays in double, and prefetching. A scalar transposed load costs four times as much, a third of a whole forward pass at K = 64; fp16 by
// integer arithmetic made a forward pass 1.4 times as long as fp32, the instruction for it no longer than fp32.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

extern "C" {

// dst[j * dst_stride + i] = src[i * src_stride + j] for a 16 x 16 tile of floats.
// Four rounds of interleaving row i with row i + 8 are a transposition of 16 rows.
static inline __attribute__((always_inline)) int32_t tile_transpose16(float* dst, int32_t dst_stride, float* src,
                                                                      int32_t src_stride) {
  typedef float Row __attribute__((vector_size(64)));
  typedef int32_t Index __attribute__((vector_size(64)));
  const Index low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  const Index high = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  Row row[16], next[16];
  for (int i = 0; i < 16; ++i) memcpy(&row[i], src + (int64_t)i * src_stride, sizeof(Row));
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 8; ++i) {
      next[2 * i] = __builtin_shuffle(row[i], row[i + 8], low);
      next[2 * i + 1] = __builtin_shuffle(row[i], row[i + 8], high);
    }
    memcpy(row, next, sizeof(row));
  }
  for (int i = 0; i < 16; ++i) memcpy(dst + (int64_t)i * dst_stride, &row[i], sizeof(Row));
  return 0;
}

// dst[0 .. n) = src[0 .. n) from fp16 bits; exact.
static inline __attribute__((always_inline)) int32_t tile_load_half(float* dst, uint16_t* src, int32_t n) {
  int32_t i = 0;
#ifdef __AVX512F__
  for (; i + 16 <= n; i += 16) _mm512_storeu_ps(dst + i, _mm512_cvtph_ps(_mm256_loadu_si256((__m256i*)(src + i))));
#endif
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((__m128i*)(src + i))));
  for (; i < n; ++i) dst[i] = _cvtsh_ss(src[i]);
  return 0;
}

// dst[0 .. n) = src[0 .. n) as fp16 bits, to nearest even.
static inline __attribute__((always_inline)) int32_t tile_store_half(uint16_t* dst, float* src, int32_t n) {
  int32_t i = 0;
#ifdef __AVX512F__
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256((__m256i*)(dst + i), _mm512_cvtps_ph(_mm512_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i*)(dst + i), _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < n; ++i) dst[i] = _cvtss_sh(src[i], _MM_FROUND_TO_NEAREST_INT);
  return 0;
}

// exp(x), wrong by 1e-14 of itself at most; 0 for -inf.
static inline __attribute__((always_inline)) double tile_exp_double(double x) {
  const double t = x > -745 ? (x < 709 ? x : 709) : -745;  // -745 for a NaN, too
  const double whole = (double)(int32_t)(t * 1.4426950408889634 + (t < 0 ? -0.5 : 0.5));
  const double r = t - whole * 0.6931471805599453;  // |r| < 0.35
  double p = 1;
  for (int k = 11; k > 0; --k) p = p * (r * (1.0 / k)) + 1;
  const int64_t half = (int64_t)whole / 2;  // 2^whole in two factors, each in range
  const int64_t bits[2] = {(half + 1023) << 52, ((int64_t)whole - half + 1023) << 52};
  double power[2];
  memcpy(power, bits, sizeof power);
  return x == x ? p * power[0] * power[1] : x;
}

// x[0 .. n) = exp(x), rounded once.
static inline __attribute__((always_inline)) int32_t tile_exp(float* x, int32_t n) {
  for (int32_t i = 0; i < n; ++i) x[i] = (float)tile_exp_double(x[i]);
  return 0;
}

// Of the gates g of a chunk of C <= 64 tokens, the products of e_t = exp(g_t): inside[i * C + j] over j < t <= i, 0 for
// j > i; first[i] over t <= i; last[j] over t > j. In double and rounded once: an error of a decay is in all that it
// multiplies, and does not average out.
static inline __attribute__((always_inline)) int32_t tile_decays(float* inside, float* first, float* last, float* g,
                                                                 int32_t C) {
  double e[64], row[64] = {}, product = 1;
  for (int32_t i = 0; i < C; ++i) e[i] = tile_exp_double(g[i]);
  for (int32_t i = 0; i < C; ++i) {
    for (int32_t j = 0; j < C; ++j) row[j] *= e[i];
    row[i] = 1;
    for (int32_t j = 0; j < C; ++j) inside[i * C + j] = (float)row[j];
    first[i] = (float)(product *= e[i]);
  }
  for (int32_t j = 0; j < C; ++j) last[j] = (float)row[j];
  return 0;
}

// Asks for a piece of `bytes` bytes in each of `rows` rows, stride_bytes apart, the first at p. Any address is allowed.
#define TILE_PREFETCH(name, type)                                                                                  \
  static inline __attribute__((always_inline)) int32_t name(type* p, int64_t stride_bytes, int32_t rows,           \
                                                            int32_t bytes) {                                       \
    for (int32_t i = 0; i < rows; ++i)                                                                             \
      for (int32_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char*)p + i * stride_bytes + b, 0, 3);     \
    return 0;                                                                                                      \
  }
TILE_PREFETCH(tile_prefetch_float32, float)
TILE_PREFETCH(tile_prefetch_uint16, uint16_t)
#undef TILE_PREFETCH
}
