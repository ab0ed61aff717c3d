// Codes of e4m3, their descales, and the norms of rows of codes.
#pragma once

#include <cuda_fp8.h>

#include <cfloat>

#include "../common/device_math.h"
#include "../params.h"

namespace hstu {

// 2^-60: products of two descales, and the reciprocals of these products, are normal numbers.
constexpr float kSmallestDescale = 0x1p-60f;
constexpr float kLargestCode = 448.0f;

HSTU_DEVICE bool is_finite(float x) { return x - x == 0.0f; }

// A descale is no power of two, so that the largest magnitude becomes 448 exactly, or 448 / 2^n by
// growth_of_descale(): the steps of e4m3 are 1/14 of a number next to 448, and 1/8 next to 256.
HSTU_DEVICE float descale_of(float largest) {
  return fmaxf(fminf(largest, FLT_MAX) / kLargestCode, kSmallestDescale);
}

// The least power of two that is not less than x, a positive normal number.
HSTU_DEVICE float round_up_to_power_of_two(float x) {
  return __uint_as_float(__float_as_uint(x) + 0x7fffff & 0xff800000);
}

// QuantizeParams::q_row_scale is at least this, so that descales times it are normal numbers.
constexpr float kSmallestRowScale = 0x1p-40f;

HSTU_DEVICE float2 from_e4m3(uint32_t pair) {
  const auto two = static_cast<__nv_fp8x2_storage_t>(pair);
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
}

// The sum of the squares of eight codes. NaN does not count.
HSTU_DEVICE float sum_of_squares(const uint2& codes) {
  float sum = 0.0f;
#pragma unroll
  for (const uint32_t pair : {codes.x & 0xffff, codes.x >> 16, codes.y & 0xffff, codes.y >> 16}) {
    const float2 x = from_e4m3(pair);
    sum += fmaxf(x.x * x.x, 0.0f);
    sum += fmaxf(x.y * x.y, 0.0f);
  }
  return sum;
}

// The norm rule of modes 1 and 2. It adds up the squares of a row's elements divided by twice the
// descale, so that they are at most 224, each square rounded up to an integer. For up to 256
// elements such sums are below 2^24, so that fp32 adds them without rounding, in any order.
//
// A code is at most 18 / 17 of what it was rounded from, and a subnormal one has a square below the
// integer that it counts as. So kRounding times the root of the sum bounds the norm of the codes.
constexpr float kRounding = 17.0f / 16.0f;
constexpr float kNormLimit = 225.0f;
static_assert(kNormLimit * kRounding <= Fp8Params::kHalfSumNorm);

// The sum begins with this: from 2^23 to 2^24, the numbers of fp32 are the integers.
constexpr float kSquaresBegin = 0x1p23f;
HSTU_DEVICE float add_rounded_square(float sum, float x) { return __fmaf_ru(x, x, sum); }

// Returns the power of two, from 2 to 32, that the descale of rows is multiplied by: the least with
// which the sum of squares of each row is at most kNormLimit^2. `squares` is the largest sum.
HSTU_DEVICE float growth_of_descale(float squares) {
  constexpr float kMost = 256 * 224.0f * 224.0f;
  float growth = 2.0f;
#pragma unroll
  for (float limit = kNormLimit * kNormLimit; limit < kMost; limit *= 4.0f) {
    if (squares > limit) growth *= 2.0f;
  }
  return growth;
}

}  // namespace hstu
