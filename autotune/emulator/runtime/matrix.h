// What the warp's and the warpgroup's matrix products (matrix.cpp, wgmma.cpp) share: fragments and the product itself.
//
// PTX ISA, "Matrix Fragments for mma.m16n8k16" and its siblings. Lane l holds rows l/4 and l/4 + 8 of a tile of 16
// rows. In a register of an operand lie the 4 bytes from column (l % 4) * 4 / bytes on; accumulators come in pairs of
// columns.
#pragma once
#include "emu/abi.h"

namespace emu {

struct Product {                                 // c[m, n] += a[m, k] b[k, n]
  int a_type, b_type, c_type, m, n, k;
};

// "mma.m16n8k16.f32.f16.f16": the name that counters use. Kept for good.
const char *product_name(const char *instruction, const Product &product);

// 16 x k operand A and 16 x n accumulators of the lanes, row-major floats. `kept` is false where c counts as zero.
// s32 accumulators are added to in store_accumulators, as integers: their tile holds the products' exact sum alone.
void load_a_fragment(int type, const void *const registers[32], int k, float *tile);
void load_accumulators(int type, void *const registers[32], int n, bool kept, float *tile);
void store_accumulators(int type, void *const registers[32], int n, bool kept, const float *tile);

// c[rows, columns] += a[rows, depth] b[depth, columns], all row-major; rows a multiple of 4, columns of 8.
void multiply_add(const float *a, const float *b, float *c, int rows, int columns, int depth);
void transpose(const float *from, int rows, int columns, float *to);

}  // namespace emu
