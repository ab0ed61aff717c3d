// Loads tiles of the dense bias from shared memory, or from device memory.
#pragma once

#include "tensors.h"

namespace hstu::sm90 {

// Loads the bias of a warp's 16 rows and keys [16 part, 16 part + 16), two weights in each word in
// the order of the accumulator. `from` points to a warpgroup's 64 rows in panels of 64 keys, as
// start_copy_bias() writes them.
template <typename Element>
HSTU_DEVICE void load_bias_part(const Element* from, int part, uint32_t (&words)[4],
                                int thread = static_cast<int>(threadIdx.x)) {
  const int lane = thread % 32;
  const int row = thread / 32 % 4 * 16 + lane % 16;
  const int chunk = part % 4 * 2 + lane / 16;  // a swizzled chunk of 16 bytes
  const Element* block = from + (part / 4 * kWarpgroupRows + row) * 64 + (chunk ^ row % 8) * 8;
  SM75_U32x4_LDSM_N::copy(*reinterpret_cast<const uint128_t*>(block), words[0], words[1], words[2],
                          words[3]);
}

// scores = bias.
template <int kKeys, typename Element, typename Scores>
HSTU_DEVICE void load_bias(const Element* from, Scores& scores) {
#pragma unroll
  for (int part = 0; part < kKeys / 16; ++part) {
    uint32_t words[4];
    load_bias_part(from, part, words);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      scores(part * 8 + n * 2) = low_half<Element>(words[n]);
      scores(part * 8 + n * 2 + 1) = high_half<Element>(words[n]);
    }
  }
}

// Loads the bias from device memory, with zeros outside it. The thread has rows `row` and `row` +
// 8, and the tile begins with key `key`. `from` is the bias of a sequence and head, [length,
// length].
template <int kKeys, typename Element, typename Scores>
HSTU_DEVICE void load_bias(const Element* from, int64_t row_stride, int length, int row, int key,
                           Scores& scores) {
  const int first = key + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const int i = row + 8 * m;
    const int columns = i >= 0 && i < length ? length - first : 0;
    const Element* const line = from + i * row_stride + first;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = n * 8 + c;
        scores(n * 4 + m * 2 + c) = column < columns ? static_cast<float>(line[column]) : 0.0f;
      }
    }
  }
}

}  // namespace hstu::sm90
