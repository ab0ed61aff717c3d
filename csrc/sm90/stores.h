// Stores outputs from registers to device memory.
#pragma once

#include "../common/opaque.h"
#include "tensors.h"

namespace hstu::sm90 {

// Transposes a 4 x 4 matrix of words among four lanes: lane t gets word t of lane s as its word s.
HSTU_DEVICE void transpose_among_four_lanes(uint32_t (&words)[4]) {
  const int lane = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool is_upper = lane & bit;
#pragma unroll
    for (int low = 0; low < 4; ++low) {
      if (low & bit) continue;
      const uint32_t mine = is_upper ? words[low] : words[low | bit];
      const uint32_t other = __shfl_xor_sync(0xffffffff, mine, bit);
      (is_upper ? words[low] : words[low | bit]) = other;
    }
  }
}

// Rounds a warpgroup's accumulator of 64 rows and kColumns columns, and stores it to the rows of a
// head from `begin` on, `count` of which exist, and to the columns from `first_column` on. The four
// lanes that have a row exchange words, so that each stores 16 bytes.
template <typename Element, int kColumns, typename Sum>
HSTU_DEVICE void store_sum(const Sum& sum, const PackedTensor& tensor, int head, int64_t begin,
                           int count, int first_column) {
  const Tensor result = rounded<Element>(sum);
  const Tensor words = recast<const uint32_t>(result);
  const int thread = reload_thread_idx() % kWarpgroup;
  const int lane = thread % 32;
  const int column = first_column + lane % 4 * 8;
  static_assert(kColumns % 32 == 0);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const int row = thread / 32 * 16 + lane / 4 + 8 * m;
    Element* to = static_cast<Element*>(tensor.data) + (begin + row) * tensor.row_stride +
                  head * tensor.head_stride + column;
    const int columns = row < count ? tensor.head_dim - column : 0;
#pragma unroll
    for (int n = 0; n < kColumns / 32; ++n) {  // each of 4 lanes stores 8 of 32 columns
      uint32_t piece[4];
#pragma unroll
      for (int block = 0; block < 4; ++block) piece[block] = words((n * 4 + block) * 2 + m);
      transpose_among_four_lanes(piece);
      if (n * 32 < columns) {
        *reinterpret_cast<uint4*>(to + n * 32) = {piece[0], piece[1], piece[2], piece[3]};
      }
    }
  }
}

}  // namespace hstu::sm90
