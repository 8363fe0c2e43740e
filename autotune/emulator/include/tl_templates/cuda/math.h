// clamp. TileLang's header also makes hexp and its kin approximate; here they are exact (emu/float16.h).
#pragma once
#include "common.h"

namespace tl {

// A NaN among the operands is the result.
TL_DEVICE float clamp(float x, float low, float high) {
  if (isnan(x)) return x;
  if (isnan(low)) return low;
  return isnan(high) ? high : fminf(fmaxf(x, low), high);
}

TL_DEVICE double clamp(double x, double low, double high) {
  if (isnan(x)) return x;
  if (isnan(low)) return low;
  return isnan(high) ? high : fmin(fmax(x, low), high);
}

template <class T>
TL_DEVICE T clamp(T x, T low, T high) { return T(clamp(float(x), float(low), float(high))); }

TL_DEVICE half2 clamp2(half2 x, half2 low, half2 high) { return min2_nan(max2_nan(x, low), high); }
TL_DEVICE nv_bfloat162 clamp2(nv_bfloat162 x, nv_bfloat162 low, nv_bfloat162 high) {
  return min2_nan(max2_nan(x, low), high);
}

}  // namespace tl
