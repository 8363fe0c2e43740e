// Element types: names for reports, sizes, and the bit patterns of the formats that C++ has no type for.
//
// PTX ISA, "Fundamental Types" and "Alternate Floating-Point Data Formats". Decoding is exact; encoding rounds to the
// nearest even value, as cvt.rn does.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "emu/abi.h"

namespace emu {

inline const char *type_name(int type) {
  switch (type) {
    case EMU_S8: return "s8";
    case EMU_U8: return "u8";
    case EMU_S32: return "s32";
    case EMU_E4M3: return "e4m3";
    case EMU_E5M2: return "e5m2";
    case EMU_F16: return "f16";
    case EMU_BF16: return "bf16";
    case EMU_F32: return "f32";
    case EMU_TF32: return "tf32";
    case EMU_F64: return "f64";
    default: return "?";
  }
}

// Bytes of one element; 0 for a type that is not emulated.
inline int type_bytes(int type) {
  switch (type) {
    case EMU_S8: case EMU_U8: case EMU_E4M3: case EMU_E5M2: return 1;
    case EMU_F16: case EMU_BF16: return 2;
    case EMU_S32: case EMU_F32: case EMU_TF32: return 4;
    case EMU_F64: return 8;
    default: return 0;
  }
}

inline bool is_byte_integer(int type) { return type == EMU_S8 || type == EMU_U8; }

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// Both formulas below are evaluated and one is masked out: a branch would keep the loops of decode from being
// vectorised.
inline float choose(bool first, uint32_t first_bits, uint32_t second_bits) {
  const uint32_t mask = 0u - uint32_t(first);
  return float_of((first_bits & mask) | (second_bits & ~mask));
}

inline float decode_f16(uint16_t half) {
  const int32_t magnitude = half & 0x7fff;
  const uint32_t sign = uint32_t(half & 0x8000) << 16;
  const uint32_t to_largest = uint32_t(magnitude >= 0x7c00) * 0x38000000u;  // infinities and NaNs
  const uint32_t normal = (uint32_t(magnitude) << 13) + 0x38000000u + to_largest;
  return choose(magnitude < 0x400, sign | bits_of(float(magnitude) * 0x1p-24f), sign | normal);
}

inline uint16_t encode_f16(float value) {
  uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7fff);                               // NaN
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);                              // 65520 and more
  if (magnitude < 0x38800000) return uint16_t(sign | uint32_t(std::lrint(float_of(magnitude) * 0x1p24f)));
  uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return uint16_t(sign | ((rounded - 0x38000000) >> 13));
}

inline float decode_bf16(uint16_t bits) { return float_of(uint32_t(bits) << 16); }

inline uint16_t encode_bf16(float value) {
  uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The tensor core reads the upper 19 bits of a register that holds a tf32 operand.
inline float decode_tf32(uint32_t bits) { return float_of(bits & 0xffffe000u); }

// e5m2 is the upper half of an f16. e4m3 has no infinity and one NaN pattern.
inline float decode_e5m2(uint8_t bits) { return decode_f16(uint16_t(bits << 8)); }

inline float decode_e4m3(uint8_t bits) {
  const int32_t magnitude = bits & 0x7f;
  const uint32_t sign = uint32_t(bits & 0x80) << 24;
  const uint32_t to_nan = uint32_t(magnitude == 0x7f) * 0x7fc00000u;
  const uint32_t normal = ((uint32_t(magnitude) << 20) + ((127 - 7) << 23)) | to_nan;
  return choose(magnitude < 8, sign | bits_of(float(magnitude) * 0x1p-9f), sign | normal);
}

// `count` consecutive elements as floats: exact for every type that a matrix operand of the tensor core has, but f64.
void decode(int type, const void *from, int count, float *out);

}  // namespace emu
