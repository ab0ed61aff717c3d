// The conversion of e4m3 to 16-bit numbers; ptx.h has conversions to e4m3.
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

}  // namespace hstu
