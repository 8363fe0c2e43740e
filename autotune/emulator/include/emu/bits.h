// Integer intrinsics.
#pragma once
#include <cstdint>

#include "emu/qualifiers.h"

EMU_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
EMU_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
EMU_INLINE int __ffs(int x) { return __builtin_ffs(x); }
EMU_INLINE int __ffsll(long long x) { return __builtin_ffsll(x); }
EMU_INLINE int __clz(int x) { return x ? __builtin_clz(x) : 32; }
EMU_INLINE int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }

EMU_INLINE unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; bit++) reversed |= (x >> bit & 1) << (31 - bit);
  return reversed;
}

EMU_INLINE int __mulhi(int x, int y) { return int((int64_t(x) * y) >> 32); }
EMU_INLINE unsigned __umulhi(unsigned x, unsigned y) { return unsigned((uint64_t(x) * y) >> 32); }

// Byte i of the result is the byte of {y, x} that nibble i of the selector names; its top bit replicates the sign.
EMU_INLINE unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  uint64_t bytes = uint64_t(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    unsigned nibble = selector >> 4 * i & 15;
    unsigned byte = bytes >> 8 * (nibble & 7) & 0xff;
    if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << 8 * i;
  }
  return result;
}

EMU_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) << (shift & 31) >> 32);
}
EMU_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}

// Index of the offset-th set bit of mask, counted from bit `base` upwards (downwards for a negative offset), or -1.
EMU_INLINE unsigned __fns(unsigned mask, unsigned base, int offset) {
  int step = offset < 0 ? -1 : 1, wanted = offset < 0 ? -offset : offset;
  if (wanted == 0) return mask >> base & 1 ? base : ~0u;
  for (int bit = int(base); 0 <= bit && bit < 32; bit += step) {
    if (mask >> bit & 1 && --wanted == 0) return unsigned(bit);
  }
  return ~0u;
}

EMU_INLINE int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += int(int8_t(a >> 8 * i)) * int8_t(b >> 8 * i);
  return c;
}
EMU_INLINE unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; i++) c += (a >> 8 * i & 0xff) * (b >> 8 * i & 0xff);
  return c;
}
