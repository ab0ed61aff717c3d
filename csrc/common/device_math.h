// Arithmetic on a thread's registers.
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include <cstdint>
#include <type_traits>

#include "macros.h"

namespace hstu {

// Rounds two sums to nearest even and packs them into the low and the high half of a word.
template <typename Element>
HSTU_DEVICE uint32_t rounded_pair(float low, float high) {
  uint32_t word;
  if constexpr (std::is_same_v<Element, cutlass::half_t>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
}

// The same in fp16, with numbers out of its range replaced by its largest ones.
HSTU_DEVICE uint32_t half_pair(float low, float high) {
  uint32_t word;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// Adds two numbers in fp16.
HSTU_DEVICE uint32_t add_half_pairs(uint32_t x, uint32_t y) {
  uint32_t sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(y));
  return sum;
}

// Unpacks the 16-bit numbers in the low and the high half of a word.
template <typename Element>
HSTU_DEVICE float low_half(uint32_t word) {
  return static_cast<float>(Element::bitcast(static_cast<uint16_t>(word)));
}
template <typename Element>
HSTU_DEVICE float high_half(uint32_t word) {
  return static_cast<float>(Element::bitcast(static_cast<uint16_t>(word >> 16)));
}

// Returns for each half the number with the larger absolute value, or NaN if one is NaN. The signs
// of the result are undefined.
template <typename Element>
HSTU_DEVICE uint32_t larger_magnitudes(uint32_t a, uint32_t b) {
  uint32_t word;
  if constexpr (std::is_same_v<Element, cutlass::half_t>) {
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  }
  return word;
}

// Arithmetic on pairs of fp16 numbers. Subnormal numbers are not flushed to zero.
HSTU_DEVICE uint32_t fma_half_pairs(uint32_t x, uint32_t y, uint32_t z) {
  uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
  return result;
}
HSTU_DEVICE uint32_t multiply_half_pairs(uint32_t x, uint32_t y) {
  uint32_t result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  return result;
}
// The result is limited to [0, 1]; NaN becomes 0.
HSTU_DEVICE uint32_t saturating_fma_half_pairs(uint32_t x, uint32_t y, uint32_t z) {
  uint32_t result;
  asm("fma.rn.sat.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
  return result;
}
HSTU_DEVICE uint32_t tanh_approx_half_pair(uint32_t x) {
  uint32_t result;
  asm("tanh.approx.f16x2 %0, %1;" : "=r"(result) : "r"(x));
  return result;
}

// Returns a word with a constant in both halves.
constexpr uint32_t twice_half(uint16_t bits) { return uint32_t{bits} << 16 | bits; }

HSTU_DEVICE float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace hstu
