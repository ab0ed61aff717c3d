// The element types of tensors and their conversion to what the CPU kernels compute with.
#pragma once

#include "simd.h"

namespace hstu::cpu::HSTU_CPU_ISA {

struct BFloat16 {
  uint16_t bits;
};

using Float16 = _Float16;

HSTU_INLINE float to_float(float x) { return x; }
HSTU_INLINE double to_float(double x) { return x; }
HSTU_INLINE float to_float(Float16 x) { return static_cast<float>(x); }
HSTU_INLINE float to_float(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
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
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
  return {static_cast<uint16_t>((x != x ? bits | 0x400000 : rounded) >> 16)};
}
template <>
HSTU_INLINE BFloat16 from_float<BFloat16>(double x) {
  return from_float<BFloat16>(static_cast<float>(x));
}

}  // namespace hstu::cpu::HSTU_CPU_ISA
