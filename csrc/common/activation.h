// silu and its derivative, from x and s = sigmoid(x), for scalars and vectors. Each backend has its
// own way to compute the sigmoid.
#pragma once

#include "macros.h"

namespace hstu {

// silu(x) = x * sigmoid(x)
template <typename T>
HSTU_HOST_DEVICE T silu(const T& x, const T& s) {
  return x * s;
}

// d silu(x) / dx = s * (1 + x * (1 - s))
template <typename T>
HSTU_HOST_DEVICE T silu_derivative(const T& x, const T& s) {
  return s + s * (x - x * s);
}

// silu(2h) and its derivative from h and t = tanh(h): sigmoid(2h) = (1 + t) / 2. One tanh.approx
// has a relative error of 2^-11, so that silu has an absolute error of 2^-12 |x|.
HSTU_HOST_DEVICE float silu_of_half(float h, float t) { return h + h * t; }
HSTU_HOST_DEVICE float silu_derivative_of_half(float h, float t) {
  const float s = 0.5f + 0.5f * t;
  return s + silu_of_half(h, t) * (0.5f - 0.5f * t);
}

}  // namespace hstu
