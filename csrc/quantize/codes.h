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

// The largest magnitude becomes 448 exactly, or 448 / 2^n by growth_of_descale(), and no power of
// two is chosen: next to 448 the steps of e4m3 are 1/14 of a number, and next to 256 they are 1/8.
HSTU_DEVICE float descale_of(float largest) {
  return fmaxf(fminf(largest, FLT_MAX) / kLargestCode, kSmallestDescale);
}

HSTU_DEVICE float2 from_e4m3(uint32_t pair) {
  const auto two = static_cast<__nv_fp8x2_storage_t>(pair);
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
}

// Calls sum = add(sum, x) for the four codes x of each word. NaN does not count.
template <typename Add>
HSTU_DEVICE float add_codes(const uint2& codes, float begin, Add add) {
  float sum = begin;
#pragma unroll
  for (const uint32_t pair : {codes.x & 0xffff, codes.x >> 16, codes.y & 0xffff, codes.y >> 16}) {
    const float2 x = from_e4m3(pair);
    sum = add(add(sum, x.x), x.y);
  }
  if (is_finite(sum)) return sum;
  sum = begin;
#pragma unroll
  for (const uint32_t pair : {codes.x & 0xffff, codes.x >> 16, codes.y & 0xffff, codes.y >> 16}) {
    const float2 x = from_e4m3(pair);
    sum = add(add(sum, is_finite(x.x) ? x.x : 0.0f), is_finite(x.y) ? x.y : 0.0f);
  }
  return sum;
}
HSTU_DEVICE float sum_of_squares(const uint2& codes) {
  return add_codes(codes, 0.0f, [](float sum, float x) { return sum + x * x; });
}

// The sum of squares, each rounded up to an integer, of codes of at most 224. For up to 256 codes
// such sums are below 2^24, so that fp32 adds them without rounding, in any order.
HSTU_DEVICE float sum_of_rounded_squares(const uint2& codes) {
  // NOTE: from 2^23 to 2^24, the numbers of fp32 are the integers.
  return add_codes(codes, 0x1p23f, [](float sum, float x) { return __fmaf_ru(x, x, sum); }) -
         0x1p23f;
}

// Returns the least power of two, from 2 to 32, that a descale must be multiplied by so that norms
// of rows of codes are at most kHalfSumNorm. `squares` is the largest sum_of_rounded_squares() of
// the rows, of the codes with twice the descale. A larger power of two divides these exactly,
// except for codes that become subnormal: their squares are at most 2^-12 and count as 2^-8 or
// more.
HSTU_DEVICE float growth_of_descale(float squares) {
  constexpr float kMost = 256 * 224.0f * 224.0f;
  float growth = 2.0f;
#pragma unroll
  for (float limit = Fp8Params::kHalfSumNorm * Fp8Params::kHalfSumNorm; limit < kMost;
       limit *= 4.0f) {
    if (squares > limit) growth *= 2.0f;
  }
  return growth;
}

}  // namespace hstu
