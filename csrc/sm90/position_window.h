// The weights by position that a tile of scores reads: a window of the table, which TMA copies to
// shared memory.
#pragma once

#include "../common/relative_bias.h"
#include "pipeline.h"

namespace hstu::sm90 {

// The weights of kRows rows and kKeys keys, in one or two copies. Entry n is for a distance
// key - row of n - (kRows - 1), with keys and rows counted from the first of the window.
template <int kRows, int kKeys, int kCopies>
struct PositionWindow {
  // Entries that the prepared table has before its first and after its last distance, so that
  // windows past its ends can be copied, too.
  static constexpr int kMargin = kRows + kKeys + 8;
  static constexpr int kEntries = kRows + kKeys;
  static constexpr int kBytes = kCopies * kEntries * sizeof(float);
  // NOTE: the copies begin 16 banks apart, so that lanes with odd and with even keys do not
  // conflict.
  static constexpr int kStride = kEntries + 16;
  static_assert(kStride % 32 == 16);

  // Copy c begins with entry c, so that two neighboring entries are aligned to 8 bytes in one of
  // two copies.
  alignas(16) float copies[kCopies][kStride];

  // Starts copying the window of rows from `row` and keys from `key` on. The copy completes on
  // `full`, which already expects kBytes. `position` is the prepared table of a head. Called by one
  // thread.
  HSTU_DEVICE void start_copy(const PreparedBias& prepared, const float* position,
                              const Sequence& sequence, int row, int key,
                              cutlass::arch::ClusterTransactionBarrier& full) {
    const int size = 2 * prepared.reach - 1;
    const int distance = key - row - sequence.offset - (kRows - 1);
    const int wanted = distance + prepared.reach - 1 + kMargin;
    const int first = min(max(wanted, 0), size + kMargin);
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy) {
      // Each copy of the prepared table begins one entry later, so that one of them is aligned.
      const int shift = (first + copy) % 4;
      cute::SM90_BULK_COPY_G2S::copy(
          position + shift * prepared.position_copy_stride + (first + copy - shift),
          reinterpret_cast<uint64_t*>(&full), copies[copy], kEntries * sizeof(float));
    }
  }

  // Writes zeros.
  HSTU_DEVICE void clear(int thread, int threads) {
    for (int n = thread; n < kCopies * kStride; n += threads) copies[n / kStride][n % kStride] = 0;
  }

  // With two copies, the weights of a row from the first key on: a pair that begins with an even
  // key is aligned.
  HSTU_DEVICE const float* of_row(int row) const {
    const int first = kRows - 1 - row;
    return copies[first % kCopies] + first / kCopies * kCopies;
  }

  // Loads the weights of the lane's scores in a transposed accumulator: the lane has keys `key` and
  // `key` + 8, and pairs of rows that begin at `row`, `row` + 8 and so on. weights[n + 1] belongs
  // to pair n of the first key, weights[n] to pair n of the second.
  template <int kPairs>
  HSTU_DEVICE void load(int row, int key, float2 (&weights)[kPairs + 1]) const {
    const int first = key - row - 1 + kRows - 1;
    const float* const from = copies[first % kCopies] + (first - first % kCopies);
#pragma unroll
    for (int n = 0; n <= kPairs; ++n) {
      const float* const pair = from + (1 - n) * 8;
      weights[n] = kCopies == 2 ? *reinterpret_cast<const float2*>(pair) : float2{pair[0], pair[1]};
    }
  }
};

}  // namespace hstu::sm90
