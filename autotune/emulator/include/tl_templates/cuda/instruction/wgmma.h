// wgmma: fp16, bf16, tf32, int8, with A in shared memory (ss) or in registers (rs). fp8 is not covered.
#pragma once
#include "../common.h"

namespace tl {
namespace detail {

constexpr bool is_byte(DataType type) { return type == DataType::kInt8 || type == DataType::kUInt8; }

// What the instruction set has. Elements of other sizes than 16 bits are K-major, integers keep their sign.
constexpr bool wgmma_is_covered(DataType a, DataType b, DataType c, int m, int n, int k, bool mn_major, int sign_a,
                                int sign_b) {
  if (m != 64 || n < 8 || n > 256 || n % 8 || sign_a * sign_a != 1 || sign_b * sign_b != 1) return false;
  if (is_byte(a) && is_byte(b)) return c == DataType::kInt32 && k == 32 && !mn_major && sign_a == 1 && sign_b == 1;
  if (a != b) return false;
  switch (a) {
    case DataType::kFloat16: return (c == DataType::kFloat16 || c == DataType::kFloat32) && k == 16;
    case DataType::kBFloat16: return c == DataType::kFloat32 && k == 16;
    case DataType::kTensorFloat32: return c == DataType::kFloat32 && k == 8 && !mn_major;
    default: return false;
  }
}

}  // namespace detail

// 128 threads hold 64 x N results: N / 2 registers of 32 bits each, half as many for fp16.
#define TL_CHECK_ACCUMULATOR(c) EMU_CHECK_OPERAND(c, C == DataType::kFloat16 ? N : 2 * N, "wgmma, operand c")

template <DataType A, DataType B, DataType C, int M, int N, int K, bool MnMajorA, bool MnMajorB, int SignA = 1,
          int SignB = 1, bool = false>
TL_DEVICE void wgmma_ss(uint64_t descriptor_a, uint64_t descriptor_b, uint32_t *c, bool accumulate) {
  static_assert(detail::wgmma_is_covered(A, B, C, M, N, K, MnMajorA || MnMajorB, SignA, SignB),
                "tl::wgmma_ss: not covered");
  TL_CHECK_ACCUMULATOR(c);
  emu_wgmma(int(A), int(B), int(C), N, K, MnMajorA, MnMajorB, SignA, SignB, descriptor_a, nullptr, descriptor_b, c,
            accumulate);
}

template <DataType A, DataType B, DataType C, int M, int N, int K, bool MnMajorA, bool MnMajorB, int SignA = 1,
          int SignB = 1, bool = false>
TL_DEVICE void wgmma_rs(const uint32_t *a, uint64_t descriptor_b, uint32_t *c, bool accumulate) {
  static_assert(detail::wgmma_is_covered(A, B, C, M, N, K, MnMajorB, SignA, SignB) && !MnMajorA,
                "tl::wgmma_rs: not covered");
  TL_CHECK_ACCUMULATOR(c);
  EMU_CHECK_OPERAND(a, 16, "wgmma, operand a");
  emu_wgmma(int(A), int(B), int(C), N, K, 0, MnMajorB, SignA, SignB, 0, a, descriptor_b, c, accumulate);
}

#undef TL_CHECK_ACCUMULATOR

}  // namespace tl
