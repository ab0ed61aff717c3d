// The element types of tensors and their conversion to what the CPU kernels compute with.
#pragma once

#include "simd.h"

namespace hstu::cpu::HSTU_CPU_ISA {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

// float8_e4m3fn, which only a quantized cache has. It has no infinities.
struct E4m3 {
  uint8_t bits;
};

HSTU_INLINE float as_float(uint32_t bits) {
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

HSTU_INLINE uint32_t as_bits(float x) {
  uint32_t result;
  std::memcpy(&result, &x, sizeof(result));
  return result;
}

HSTU_INLINE float to_float(float x) { return x; }
HSTU_INLINE double to_float(double x) { return x; }
HSTU_INLINE float to_float(BFloat16 x) { return as_float(static_cast<uint32_t>(x.bits) << 16); }

// Has no branches, so that loops over it are vectorized even if the compiler has no fp16 type.
HSTU_INLINE float to_float(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  // The product changes the exponent's bias from 15 to 127, also for subnormal numbers.
  const float magnitude = as_float(static_cast<uint32_t>(x.bits & 0x7fff) << 13) * 0x1p112f;
  const uint32_t special = magnitude >= 65536.0f ? 0x7f800000 : 0;  // infinity and NaN
  return as_float(sign | special | as_bits(magnitude));
}

// Works like the conversion above; the exponent's bias changes from 7 to 127.
HSTU_INLINE float to_float(E4m3 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80) << 24;
  const uint32_t magnitude = x.bits & 0x7f;
  const uint32_t special = magnitude == 0x7f ? 0x7fc00000 : 0;  // NaN
  return as_float(sign | special | as_bits(as_float(magnitude << 20) * 0x1p120f));
}

template <typename T>
HSTU_INLINE T from_float(double x) {
  return static_cast<T>(x);
}
template <typename T>
HSTU_INLINE T from_float(float x) {
  return static_cast<T>(x);
}
// Rounds to nearest, ties to even; a NaN stays a NaN.
template <>
HSTU_INLINE BFloat16 from_float<BFloat16>(float x) {
  const uint32_t bits = as_bits(x);
  const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
  return {static_cast<uint16_t>((x != x ? bits | 0x400000 : rounded) >> 16)};
}
template <>
HSTU_INLINE Float16 from_float<Float16>(float x) {
  const uint32_t bits = as_bits(x);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  // Normal: subtract 112 from the exponent and round off the low 13 bits.
  const uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // Subnormal: adding 1/2 leaves the rounded multiple of 2^-24 in the low bits.
  const uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000;
  uint32_t half = magnitude < 0x38800000 ? subnormal : normal;
  half = magnitude >= 0x477ff000 ? 0x7c00 : half;  // rounds to infinity
  half = magnitude > 0x7f800000 ? 0x7e00 : half;   // NaN
  return {static_cast<uint16_t>(sign | half)};
}
template <>
HSTU_INLINE Float16 from_float<Float16>(double x) {
  return from_float<Float16>(static_cast<float>(x));
}
template <>
HSTU_INLINE BFloat16 from_float<BFloat16>(double x) {
  return from_float<BFloat16>(static_cast<float>(x));
}

}  // namespace hstu::cpu::HSTU_CPU_ISA
