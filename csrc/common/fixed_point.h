// Fixed-point numbers of 32 bits, whose sums do not depend on the order of additions.
#pragma once

#include <cstdint>
#include <cstring>

#include "macros.h"

namespace hstu {

// Numbers up to a known largest one become integers below 2^kBits, so that 2^(31 - kBits) of them
// can be added. The largest number must be representable in bf16 or fp16.
class FixedPoint {
 public:
  static constexpr int kBits = 20;

  // `largest_bits` are the bits of the largest absolute value, which is finite.
  static HSTU_HOST_DEVICE FixedPoint of_largest(uint32_t largest_bits) {
    // The largest number is below 2^(exponent - 126), and the scale 2^(exponent_of_scale - 127).
    const int exponent = static_cast<int>(largest_bits >> 23);
    const int wanted = 126 - exponent + kBits + 127;
    const int exponent_of_scale = wanted < kMost ? wanted : kMost;
    return {to_float_bits(exponent_of_scale), to_float_bits(254 - exponent_of_scale)};
  }

  // Converts a number up to the largest one.
  HSTU_HOST_DEVICE int small_to_integer(float x) const {
    // NOTE: the last bit of `sum` stands for 1, so that its low bits are the rounded integer. This
    // is faster than a conversion.
    constexpr float kShift = 0x1.8p23f;
    float sum;
#if defined(__CUDA_ARCH__)
    sum = __fmaf_rn(x, scale_, kShift);
#else
    sum = x * scale_ + kShift;
#endif
    return static_cast<int>(bits_of(sum) - bits_of(kShift));
  }

  // Converts a sum of such numbers.
  HSTU_HOST_DEVICE int to_integer(float x) const {
#if defined(__CUDA_ARCH__)
    return __float2int_rn(x * scale_);
#else
    return static_cast<int>(__builtin_rintf(x * scale_));
#endif
  }

  HSTU_HOST_DEVICE float to_float(int n) const { return static_cast<float>(n) * inverse_; }

  FixedPoint() = default;

 private:
  static constexpr int kMost = 253;  // so that the inverse is no denormal number

  HSTU_HOST_DEVICE FixedPoint(float scale, float inverse) : scale_(scale), inverse_(inverse) {}

  static HSTU_HOST_DEVICE float to_float_bits(int exponent) {
    const uint32_t bits = static_cast<uint32_t>(exponent) << 23;
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
  }
  static HSTU_HOST_DEVICE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
  }

  float scale_ = 1;
  float inverse_ = 1;
};

}  // namespace hstu
