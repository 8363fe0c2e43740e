// CUDA's built-in vector types, with CUDA's alignments, so that an access to one is one access of its width.
#pragma once
#include <cstdint>

#include "emu/qualifiers.h"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;

#define EMU_VECTOR(NAME, TYPE, ALIGN2, ALIGN4)                                                       \
  struct NAME##1 { TYPE x; };                                                                        \
  struct __align__(ALIGN2) NAME##2 { TYPE x, y; };                                                   \
  struct NAME##3 { TYPE x, y, z; };                                                                  \
  struct __align__(ALIGN4) NAME##4 { TYPE x, y, z, w; };                                             \
  EMU_INLINE NAME##1 make_##NAME##1(TYPE x) { return {x}; }                                          \
  EMU_INLINE NAME##2 make_##NAME##2(TYPE x, TYPE y) { return {x, y}; }                               \
  EMU_INLINE NAME##3 make_##NAME##3(TYPE x, TYPE y, TYPE z) { return {x, y, z}; }                    \
  EMU_INLINE NAME##4 make_##NAME##4(TYPE x, TYPE y, TYPE z, TYPE w) { return {x, y, z, w}; }

EMU_VECTOR(char, signed char, 2, 4)
EMU_VECTOR(uchar, unsigned char, 2, 4)
EMU_VECTOR(short, short, 4, 8)
EMU_VECTOR(ushort, unsigned short, 4, 8)
EMU_VECTOR(int, int, 8, 16)
EMU_VECTOR(uint, unsigned int, 8, 16)
EMU_VECTOR(long, long, 16, 16)
EMU_VECTOR(ulong, unsigned long, 16, 16)
EMU_VECTOR(longlong, long long, 16, 16)
EMU_VECTOR(ulonglong, unsigned long long, 16, 16)
EMU_VECTOR(float, float, 8, 16)
EMU_VECTOR(double, double, 16, 16)
#undef EMU_VECTOR

using int4_t = int4;

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
