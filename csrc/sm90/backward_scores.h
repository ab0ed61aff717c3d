// Elementwise operations of the backward on a warpgroup's transposed S and dP: 64 keys by rows.
#pragma once

#include <cute/arch/copy_sm90.hpp>

#include "../common/activation.h"
#include "../common/ptx.h"
#include "masking.h"

namespace hstu::sm90 {

// P = silu(alpha * S), rounded, and derivatives = silu'(alpha * S). `derivatives` may be `scores`
// itself, or a tensor of another type, to which the values are rounded.
template <typename Scores, typename Weights, typename Derivatives>
HSTU_DEVICE void silu_and_derivative(float alpha, const Scores& scores, Weights& weights,
                                     Derivatives& derivatives) {
  using Element = typename Weights::value_type;
  using Derivative = typename Derivatives::value_type;
  const float half_alpha = 0.5f * alpha;
  const cutlass::NumericArrayConverter<Element, float, 2> convert;
  const cutlass::NumericArrayConverter<Derivative, float, 2> convert_derivatives;
  Tensor pairs = recast<cutlass::Array<Element, 2>>(weights);
  Tensor derivative_pairs = recast<cutlass::Array<Derivative, 2>>(derivatives);
#pragma unroll
  for (int n = 0; n < size(scores); n += 2) {
    cutlass::Array<float, 2> p, d;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float x = half_alpha * scores(n + i);
      const float t = ptx::tanh_approx(x);
      p[i] = silu_of_half(x, t);
      d[i] = silu_derivative_of_half(x, t);
    }
    pairs(n / 2) = convert(p);
    derivative_pairs(n / 2) = convert_derivatives(d);
  }
}

// result = factor * x * y, rounded
template <typename Derivatives, typename Scores, typename Weights>
HSTU_DEVICE void multiply(const Derivatives& x, const Scores& y, float factor, Weights& result) {
  using Element = typename Weights::value_type;
  using Derivative = typename Derivatives::value_type;
  const cutlass::NumericArrayConverter<Element, float, 2> convert;
  const cutlass::NumericArrayConverter<float, Derivative, 2> widen_pair;
  const Tensor x_pairs = recast<const cutlass::Array<Derivative, 2>>(x);
  Tensor pairs = recast<cutlass::Array<Element, 2>>(result);
#pragma unroll
  for (int n = 0; n < size(y); n += 2) {
    const cutlass::Array<float, 2> d = widen_pair(x_pairs(n / 2));
    pairs(n / 2) =
        convert(cutlass::Array<float, 2>{factor * d[0] * y(n), factor * d[1] * y(n + 1)});
  }
}

// The address that a thread passes to stmatrix and ldmatrix, for 16 rows by 64 keys of a matrix
// whose transpose is in the warpgroup's registers. The layout is that of rows_tensor().
template <typename Element>
HSTU_DEVICE Element* transposed_rows(Element* tile) {
  const int thread = reload_thread_idx() % kWarpgroup;
  const int lane = thread % 32;
  const int row = lane / 16 * 8 + lane % 8;
  const int chunk = thread / 32 * 2 + lane / 8 % 2;  // a swizzled chunk of 16 bytes
  return tile + row * kWarpgroupRows + (chunk ^ row % 8) * 8;
}

// Stores the transpose of `weights` in shared memory: kRows rows by 64 keys.
template <int kRows, typename Weights, typename Element>
HSTU_DEVICE void store_transposed(const Weights& weights, Element* to) {
  Element* const first = transposed_rows(to);
  const Tensor words = recast<const uint32_t>(weights);
#pragma unroll
  for (int r = 0; r < kRows; r += 16) {
    const int n = r / 4;
    SM90_U16x8_STSM_T::copy(words(n), words(n + 1), words(n + 2), words(n + 3),
                            *reinterpret_cast<uint128_t*>(first + r * kWarpgroupRows));
  }
}

// Loads what store_transposed() stored.
template <int kRows, typename Element, typename Weights>
HSTU_DEVICE void load_transposed(Element* from, Weights& weights) {
  const Element* const first = transposed_rows(from);
  Tensor words = recast<uint32_t>(weights);
#pragma unroll
  for (int r = 0; r < kRows; r += 16) {
    const int n = r / 4;
    SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const uint128_t*>(first + r * kWarpgroupRows),
                            words(n), words(n + 1), words(n + 2), words(n + 3));
  }
}

// scores += weights
template <typename Weights, typename Scores>
HSTU_DEVICE void add(const Weights& weights, Scores& scores) {
  using Element = typename Weights::value_type;
  const Tensor words = recast<const uint32_t>(weights);
#pragma unroll
  for (int n = 0; n < size(words); ++n) {
    scores(2 * n) += low_half<Element>(words(n));
    scores(2 * n + 1) += high_half<Element>(words(n));
  }
}

// scores = weights
template <typename Weights, typename Scores>
HSTU_DEVICE void widen(const Weights& weights, Scores& scores) {
  using Element = typename Weights::value_type;
  const Tensor words = recast<const uint32_t>(weights);
#pragma unroll
  for (int n = 0; n < size(words); ++n) {
    scores(2 * n) = low_half<Element>(words(n));
    scores(2 * n + 1) = high_half<Element>(words(n));
  }
}

}  // namespace hstu::sm90
