// silu and its derivative, from x and s = sigmoid(x). Works on scalars and on vectors alike; how
// the sigmoid is found is each backend's own choice.
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

}  // namespace hstu
