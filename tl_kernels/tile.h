// What the tile DSL cannot say on target "c": transposing a tile inside registers, converting rows of fp16, and
// prefetching. A scalar transposed load costs four times as much, a third of a whole forward pass at K = 64; fp16 by
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
