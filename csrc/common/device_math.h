// Arithmetic on pairs of 16-bit numbers, which fill a thread's register.
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include <cstdint>
#include <type_traits>

#include "macros.h"
#include "ptx.h"

namespace hstu {

// Rounds two sums to nearest even and packs them into the low and the high half of a word.
template <typename Element>
HSTU_DEVICE uint32_t rounded_pair(float low, float high) {
  if constexpr (std::is_same_v<Element, cutlass::half_t>) {
    return ptx::cvt_f16x2(low, high);
  } else {
    return ptx::cvt_bf16x2(low, high);
  }
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
  if constexpr (std::is_same_v<Element, cutlass::half_t>) {
    return ptx::max_nan_abs_f16x2(a, b);
  } else {
    return ptx::max_nan_abs_bf16x2(a, b);
  }
}

// Returns a word with a constant in both halves.
constexpr uint32_t twice_half(uint16_t bits) { return uint32_t{bits} << 16 | bits; }

}  // namespace hstu
