// Conversions between e4m3 and 16-bit or fp32 numbers.
#pragma once

#include <cuda_fp8.h>

#include "device_math.h"
#include "macros.h"

namespace hstu {

// Converts four values, the lowest byte first, times the scale of their row and head, and rounds
// them.
template <typename Element>
HSTU_DEVICE uint2 dequantized(uint32_t four, float scale) {
  const auto pair = [scale](uint32_t bits) {
    const auto two = static_cast<__nv_fp8x2_storage_t>(bits);
    const float2 x = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
    return rounded_pair<Element>(scale * x.x, scale * x.y);
  };
  return {pair(four & 0xffff), pair(four >> 16)};
}

// Rounds four numbers, the first into the lowest byte. Numbers out of range become the largest
// ones, and NaN stays NaN.
HSTU_DEVICE uint32_t e4m3_quad(float a, float b, float c, float d) {
  uint32_t word;
  asm("{.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};}"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

// The same for two pairs in fp16.
HSTU_DEVICE uint32_t e4m3_quad(uint32_t a, uint32_t b) {
  uint32_t word;
  asm("{.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n"
      "mov.b32 %0, {low, high};}"
      : "=r"(word)
      : "r"(a), "r"(b));
  return word;
}

}  // namespace hstu
