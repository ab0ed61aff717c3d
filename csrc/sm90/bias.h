// Loads tiles of the dense bias from shared memory.
#pragma once

#include "tensors.h"

namespace hstu::sm90 {

// scores = bias. `from` points to a warpgroup's 64 rows in panels of 64 keys, as start_copy_bias()
// writes them.
template <int kKeys, typename Element, typename Scores>
HSTU_DEVICE void load_bias(const Element* from, Scores& scores) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane % 16;
#pragma unroll
  for (int column = 0; column < kKeys; column += 16) {
    const int chunk = column % 64 / 8 + lane / 16;  // a swizzled chunk of 16 bytes
    const Element* block = from + (column / 64 * kWarpgroupRows + row) * 64 + (chunk ^ row % 8) * 8;
    uint32_t words[4];
    SM75_U32x4_LDSM_N::copy(*reinterpret_cast<const uint128_t*>(block), words[0], words[1],
                            words[2], words[3]);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      scores(column / 2 + n * 2) = low_half<Element>(words[n]);
      scores(column / 2 + n * 2 + 1) = high_half<Element>(words[n]);
    }
  }
}

}  // namespace hstu::sm90
