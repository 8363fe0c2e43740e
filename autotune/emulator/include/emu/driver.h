// The part of the CUDA driver API that TileLang's host wrapper calls: it encodes tensor maps.
#pragma once
#include <cstdint>

#include "emu/abi.h"

struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};

typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
enum CUresult : int { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };

// Only their numbers matter: the wrapper casts integers to them.
enum CUtensorMapDataType : int {};
enum CUtensorMapInterleave : int {};
enum CUtensorMapSwizzle : int {};
enum CUtensorMapL2promotion : int {};
enum CUtensorMapFloatOOBfill : int {};

inline CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *global,
                                       const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                       const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2_promotion,
                                       CUtensorMapFloatOOBfill oob_fill) {
  int error = emu_tensor_map_encode(map, type, rank, global, dims, strides, box, element_strides, interleave, swizzle,
                                    l2_promotion, oob_fill);
  return error ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

#define CUTLASS_CUDA_DRIVER_WRAPPER_CALL(function) function
