// Applies the mask to a warpgroup's scores or weights in registers. What is visible is given as
// bits, which Mask::row_bits() computes.
#pragma once

#include "stores.h"

namespace hstu::sm90 {

// The bits of the 64 keys from `first` on, for row m of the two rows of a lane; bit 0 is the lane's
// first key. Lane n of each warp passes in `visible` the bits of the warp's row n % 16, for the
// first (n < 16) or the second 64 keys of the tile. Four lanes share a row.
HSTU_DEVICE uint64_t visible_to_lane(uint64_t visible, int lane, int first, int m) {
  const int owner = first / 4 + m * 8 + lane / 4;
  return __shfl_sync(0xffffffff, visible, owner) >> lane % 4 * 2;
}

// Zeroes the elements of P that the mask hides: 64 rows by kKeys keys of 16-bit weights. `visible`
// is as in visible_to_lane().
template <int kKeys, typename Weights>
HSTU_DEVICE void apply_mask(uint64_t visible, Weights& weights) {
  const int lane = reload_thread_idx() % 32;
  Tensor words = recast<uint32_t>(weights);  // for each 8 keys one of row m = 0, one of m = 1
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int first = 0; first < kKeys; first += 64) {
      const uint64_t bits = visible_to_lane(visible, lane, first, m);
#pragma unroll
      for (int key = 0; key < 64 && first + key < kKeys; key += 8) {
        const uint32_t low = bits >> key & 1 ? 0x0000ffff : 0;
        const uint32_t high = bits >> (key + 1) & 1 ? 0xffff0000 : 0;
        words((first + key) / 4 + m) &= low | high;
      }
    }
  }
}

// apply_mask() for weights in e4m3, in the order of E4m3Weights::round().
template <int kKeys, typename Words>
HSTU_DEVICE void apply_mask_to_e4m3(uint64_t visible, Words& words) {
  const int lane = reload_thread_idx() % 32;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int first = 0; first < kKeys; first += 64) {
      const uint64_t bits = visible_to_lane(visible, lane, first, m);
#pragma unroll
      for (int key = 0; key < 64; key += 16) {
        uint32_t bytes = 0;
        if (bits >> key & 1) bytes |= 0x000000ff;
        if (bits >> (key + 1) & 1) bytes |= 0x0000ff00;
        if (bits >> (key + 8) & 1) bytes |= 0x00ff0000;
        if (bits >> (key + 9) & 1) bytes |= 0xff000000;
        words((first + key) / 8 + m) &= bytes;
      }
    }
  }
}

// apply_mask() for fp32 scores.
template <int kKeys, typename Scores>
HSTU_DEVICE void apply_mask_to_scores(uint64_t visible, Scores& scores) {
  const int lane = reload_thread_idx() % 32;
  auto matrix = as_matrix(scores);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int first = 0; first < kKeys; first += 64) {
      const uint64_t bits = visible_to_lane(visible, lane, first, m);
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        const bool is_seen = bits >> (n / 2 * 8 + n % 2) & 1;
        if (!is_seen) matrix(m, first / 4 + n) = 0;
      }
    }
  }
}

// apply_mask() for transposed 16-bit weights, 64 keys by kRows rows: bit n of visible[row] is set
// if the row sees key n.
template <int kRows, typename Weights>
HSTU_DEVICE void apply_mask_transposed(const uint64_t* visible, Weights& weights) {
  const int thread = reload_thread_idx() % kWarpgroup;
  const int lane = thread % 32;
  const int key = thread / 32 * 16 + lane / 4;
  Tensor words = recast<uint32_t>(weights);  // for each 8 rows one of key m = 0, one of m = 1
#pragma unroll
  for (int row = 0; row < kRows; row += 8) {
    const auto bits = *reinterpret_cast<const ulonglong2*>(visible + row + lane % 4 * 2);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const uint32_t low = bits.x >> (key + 8 * m) & 1 ? 0x0000ffff : 0;
      const uint32_t high = bits.y >> (key + 8 * m) & 1 ? 0xffff0000 : 0;
      words(row / 4 + m) &= low | high;
    }
  }
}

}  // namespace hstu::sm90
