// ldmatrix and stmatrix of 8x8 matrices of 16-bit elements. The 8-bit m16n8 form is not covered.
#pragma once
#include "common.h"

namespace tl {

#define TL_LDMATRIX(COUNT)                                                                   \
  TL_DEVICE void ptx_ldmatrix_x##COUNT(const void *shared, void *registers) {                \
    EMU_CHECK_OPERAND(registers, 4 * COUNT, "ldmatrix.x" #COUNT);                            \
    emu_ldmatrix(COUNT, 0, shared, registers);                                               \
  }                                                                                          \
  TL_DEVICE void ptx_ldmatrix_x##COUNT##_trans(const void *shared, void *registers) {        \
    EMU_CHECK_OPERAND(registers, 4 * COUNT, "ldmatrix.x" #COUNT ".trans");                   \
    emu_ldmatrix(COUNT, 1, shared, registers);                                               \
  }
TL_LDMATRIX(1)
TL_LDMATRIX(2)
TL_LDMATRIX(4)
#undef TL_LDMATRIX

#define TL_STMATRIX(NAME, COUNT, TRANSPOSED)                                                 \
  template <class... Values>                                                                 \
  TL_DEVICE void NAME(const void *shared, const Values &...values) {                         \
    static_assert(sizeof...(Values) == COUNT, #NAME " stores as many registers as matrices"); \
    const int32_t registers[] = {int32_t(values)...};                                        \
    emu_stmatrix(COUNT, TRANSPOSED, const_cast<void *>(shared), registers);                  \
  }
#define TL_STMATRIX_BOTH(COUNT)                       \
  TL_STMATRIX(ptx_stmatrix_m8n8_x##COUNT, COUNT, 0)   \
  TL_STMATRIX(ptx_stmatrix_m8n8_x##COUNT##_trans, COUNT, 1) \
  TL_STMATRIX(ptx_stmatrix_x##COUNT, COUNT, 0)        \
  TL_STMATRIX(ptx_stmatrix_x##COUNT##_trans, COUNT, 1)
TL_STMATRIX_BOTH(1)
TL_STMATRIX_BOTH(2)
TL_STMATRIX_BOTH(4)
#undef TL_STMATRIX_BOTH
#undef TL_STMATRIX

}  // namespace tl
