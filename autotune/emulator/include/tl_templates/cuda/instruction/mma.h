// mma.sync: fp16, bf16, tf32, int8, fp64. fp8 and int4 are not covered, nor are sm_75's shapes.
#pragma once
#include "../common.h"

namespace tl {
namespace detail {

// Registers of a lane hold M x K, K x N and M x N elements, divided among 32 lanes.
constexpr int element_bits(DataType type) {
  switch (type) {
    case DataType::kInt8:
    case DataType::kUInt8: return 8;
    case DataType::kFloat16:
    case DataType::kBFloat16: return 16;
    case DataType::kFloat64: return 64;
    default: return 32;
  }
}

constexpr bool mma_is_covered(DataType a, DataType b, DataType c, int m, int n, int k) {
  if (a != b) return false;
  if (a == DataType::kFloat64) return c == DataType::kFloat64 && m == 8 && n == 8 && k == 4;
  if (m != 16 || n != 8) return false;
  switch (a) {
    case DataType::kFloat16: return (c == DataType::kFloat16 || c == DataType::kFloat32) && (k == 8 || k == 16);
    case DataType::kBFloat16: return c == DataType::kFloat32 && k == 16;
    case DataType::kTensorFloat32: return c == DataType::kFloat32 && (k == 4 || k == 8);
    case DataType::kInt8:
    case DataType::kUInt8: return c == DataType::kInt32 && k == 32;
    default: return false;
  }
}

}  // namespace detail

template <DataType A, DataType B, DataType C, int M, int N, int K, bool TransA, bool TransB, bool Saturate = false,
          class CRegister, class ARegister, class BRegister>
TL_DEVICE void mma_sync(CRegister *c, const ARegister *a, const BRegister *b) {
  static_assert(detail::mma_is_covered(A, B, C, M, N, K) && !TransA && TransB && !Saturate,
                "tl::mma_sync: not covered");
  EMU_CHECK_OPERAND(c, M * N * detail::element_bits(C) / 256, "mma.sync, operand c");
  EMU_CHECK_OPERAND(a, M * K * detail::element_bits(A) / 256, "mma.sync, operand a");
  EMU_CHECK_OPERAND(b, N * K * detail::element_bits(B) / 256, "mma.sync, operand b");
  emu_mma(int(A), int(B), int(C), M, N, K, c, a, b);
}

}  // namespace tl
