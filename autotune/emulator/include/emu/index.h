// threadIdx and its kin. A kernel gets local copies of them (see rewrite.py); these here serve the headers it uses.
#pragma once
#include "emu/abi.h"
#include "emu/vectors.h"

static constexpr int warpSize = 32;

namespace emu {

EMU_INLINE uint3 thread_index() { return {emu_thread_index(0), emu_thread_index(1), emu_thread_index(2)}; }
EMU_INLINE uint3 block_index() { return {emu_block_index(0), emu_block_index(1), emu_block_index(2)}; }
EMU_INLINE dim3 block_dim() { return {emu_block_dim(0), emu_block_dim(1), emu_block_dim(2)}; }
EMU_INLINE dim3 grid_dim() { return {emu_grid_dim(0), emu_grid_dim(1), emu_grid_dim(2)}; }

template <unsigned (*Read)(int)>
struct Coordinates {
  template <int Axis>
  struct Coordinate {
    EMU_INLINE operator unsigned() const { return Read(Axis); }
  };
  Coordinate<0> x;
  Coordinate<1> y;
  Coordinate<2> z;
};

}  // namespace emu

static constexpr emu::Coordinates<emu_thread_index> threadIdx{};
static constexpr emu::Coordinates<emu_block_index> blockIdx{};
static constexpr emu::Coordinates<emu_block_dim> blockDim{};
static constexpr emu::Coordinates<emu_grid_dim> gridDim{};
