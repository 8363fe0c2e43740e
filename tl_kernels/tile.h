// What the tile DSL cannot say on target "c": transposing a tile inside registers.
// A scalar transposed load costs four times as much, a third of a whole forward pass at K = 64.
#pragma once
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
}
