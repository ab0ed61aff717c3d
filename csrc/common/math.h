// Integer arithmetic for host and device code.
#pragma once

#include <type_traits>

#include "macros.h"

namespace hstu {

// n / by, rounded up; neither is negative.
template <typename N, typename By>
HSTU_HOST_DEVICE constexpr std::common_type_t<N, By> ceil_div(N n, By by) {
  return (n + by - 1) / by;
}

// n, rounded up to a multiple of `multiple`.
template <typename N, typename By>
HSTU_HOST_DEVICE constexpr std::common_type_t<N, By> round_up(N n, By multiple) {
  return ceil_div(n, multiple) * multiple;
}

// NOTE: std::min() is no device code, and CUDA's min() no host code.
HSTU_HOST_DEVICE constexpr int smaller(int x, int y) { return x < y ? x : y; }
HSTU_HOST_DEVICE constexpr int larger(int x, int y) { return x > y ? x : y; }

}  // namespace hstu
