// The sums of dS of a tile over the scores of each bucket, for the gradient of the time table.
//
// dS of a block of 8 rows and 8 keys, rounded to 16 bits, is the right operand of an mma.sync whose
// left operand has ones in the row of the block's bucket. So the accumulator's rows are the sums of
// up to 16 buckets, over keys; those of a row's 8 columns, over rows, are added up at last.
#pragma once

#include <cfloat>
#include <climits>

#include "relative_bias.h"

namespace hstu::sm80 {

template <typename Tile, typename Mma>
class TimeSums {
 public:
  using Element = typename Mma::Element;
  using Bias = RelativeTile<Tile>;

  // Adds the warp's part of dS. It is also in `ds`, a RowsTile, for loops over blocks.
  template <typename Sum>
  static HSTU_DEVICE void add(const Bias& tile, const TimeBlock& own, const Sum& gradients,
                              const Element* ds, const TableSum& sums) {
    Words words;
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        words.at[m][n] = rounded_pair<Element>(gradients.at(m, 2 * n), gradients.at(m, 2 * n + 1));
      }
    }
    const Buckets buckets = {own.bucket(), own.other_bucket()};
    const int lowest = __reduce_min_sync(
        kAllLanes, buckets.first >= 0 ? min(buckets.first, buckets.second) : INT_MAX);
    const int highest = __reduce_max_sync(kAllLanes, max(buckets.first, buckets.second));
    bool is_finite = false;  // what is not has been taken out of `words`
#pragma unroll 1
    for (int first = lowest; first <= highest;) {
      float sum[4] = {};
      multiply_blocks(tile, own, buckets, words, first, sum);
      const float own_sum = sum_of_own_bucket(sum);
      if (!is_finite && __any_sync(kAllLanes, !(fabsf(own_sum) <= FLT_MAX))) {
        // A product of zero and NaN is NaN, in all buckets.
        is_finite = true;
        add_not_finite(tile, own, ds, sums);
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
          for (int m = 0; m < kRowBlocks; ++m) words.at[m][n] = finite_halves(words.at[m][n]);
        }
        continue;
      }
      add_own_bucket(tile, own_sum, first, highest, sums);
      first += kBuckets;
    }
    const uint32_t others = Bias::blocks_where(own.bucket() == TimeBlock::kSeveral);
    if (others) add_other_blocks(tile, others, ds, sums);
  }

 private:
  static constexpr int kRowBlocks = Bias::kRowBlocks;
  static constexpr int kKeyBlocks = Bias::kKeyBlocks;
  static constexpr int kBuckets = 16;  // summed up at a time
  static constexpr uint32_t kOnes =
      std::is_same_v<Element, cutlass::half_t> ? 0x3c003c00 : 0x3f803f80;
  static constexpr uint32_t kExponent = std::is_same_v<Element, cutlass::half_t> ? 0x7c00 : 0x7f80;

  struct Buckets {
    int first;
    int second;
  };
  struct Words {
    uint32_t at[kRowBlocks][kKeyBlocks];
  };

  static HSTU_DEVICE int lane() { return Bias::lane(); }
  static HSTU_DEVICE uint32_t ones_if(bool condition) { return condition ? kOnes : 0; }
  // The halves of `word` whose conditions are true, and zeros.
  static HSTU_DEVICE uint32_t halves(uint32_t word, bool low, bool high) {
    return word & ((low ? 0xffffu : 0u) | (high ? 0xffff0000u : 0u));
  }
  static HSTU_DEVICE bool is_finite_low(uint32_t word) { return (word & kExponent) != kExponent; }
  static HSTU_DEVICE uint32_t finite_halves(uint32_t word) {
    return halves(word, is_finite_low(word), is_finite_low(word >> 16));
  }

  // Adds the sums of buckets [first, first + kBuckets), one in each row of `sum`.
  static HSTU_DEVICE void multiply_blocks(const Bias& tile, const TimeBlock& own,
                                          const Buckets& buckets, const Words& words, int first,
                                          float (&sum)[4]) {
    const int own_bucket = first + lane() / 4;
    const uint32_t split = Bias::blocks_where(own.has_two());
    typename Bias::RowTimes rows = {};
    if (split) rows = tile.load_row_times();
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
      if (split >> 4 * n & 0xf) {
        const typename Bias::KeyTimes keys = tile.load_key_times(n);
#pragma unroll
        for (int m = 0; m < kRowBlocks; ++m) {
          const uint32_t row = rows.words[m] + Bias::of_block(own.origin, m, n);
          const bool is_low = static_cast<int>(row - keys.words[0]) >= 0;
          const bool is_high = static_cast<int>(row - keys.words[1]) >= 0;
          const uint32_t word = words.at[m][n];
          const uint32_t right[2] = {halves(word, is_low, is_high),
                                     halves(word, !is_low, !is_high)};
          multiply(own_bucket, Bias::of_block(buckets.first, m, n),
                   Bias::of_block(buckets.second, m, n), right, sum);
        }
      } else {
#pragma unroll
        for (int m = 0; m < kRowBlocks; m += 2) {
          const uint32_t right[2] = {words.at[m][n], words.at[m + 1][n]};
          multiply(own_bucket, Bias::of_block(buckets.first, m, n),
                   Bias::of_block(buckets.first, m + 1, n), right, sum);
        }
      }
    }
  }

  // Adds the first 8 x 8 elements of `right` to the row of `bucket`, and the others to that of
  // `next`, where bucket `own` has row lane() / 4.
  static HSTU_DEVICE void multiply(int own, int bucket, int next, const uint32_t (&right)[2],
                                   float (&sum)[4]) {
    const uint32_t left[4] = {ones_if(bucket == own), ones_if(bucket == own + 8),
                              ones_if(next == own), ones_if(next == own + 8)};
    Mma::multiply(sum, left, right);
  }

  // The sum of row lane() / 4 in lanes with even t, of row 8 + lane() / 4 in the others.
  static HSTU_DEVICE float sum_of_own_bucket(const float (&sum)[4]) {
    const bool is_odd = lane() % 2 == 1;
    const float first = sum[0] + sum[1];
    const float second = sum[2] + sum[3];
    const float own =
        (is_odd ? second : first) + __shfl_xor_sync(kAllLanes, is_odd ? first : second, 1);
    return own + __shfl_xor_sync(kAllLanes, own, 2);
  }
  static HSTU_DEVICE void add_own_bucket(const Bias& tile, float own, int first, int last,
                                         const TableSum& sums) {
    const int bucket = first + lane() / 4 + lane() % 2 * 8;
    if (lane() % 4 < 2 && bucket <= last) sums.add(tile.time_entry() + bucket, own);
  }

  // The thread's two elements of dS, and their buckets.
  struct Elements {
    uint32_t word;
    int first;
    int second;
  };
  static HSTU_DEVICE Elements load_elements(const Bias& tile, const Element* ds, int row, int key) {
    using DsTile = RowsTile<Tile::kTileRows, Tile::kTileKeys, Element>;
    const auto differences = tile.differences_of(row, key);
    return {*reinterpret_cast<const uint32_t*>(ds + DsTile::offset(row, key)),
            bucket_of(tile.bias(), differences.first), bucket_of(tile.bias(), differences.second)};
  }

  static HSTU_DEVICE void add_not_finite(const Bias& tile, const Elements& elements,
                                         const TableSum& sums) {
    if (!is_finite_low(elements.word)) sums.add(tile.time_entry() + elements.first, NAN);
    if (!is_finite_low(elements.word >> 16)) sums.add(tile.time_entry() + elements.second, NAN);
  }
  // The same for all blocks with one or two buckets.
  static HSTU_DEVICE void add_not_finite(const Bias& tile, const TimeBlock& own, const Element* ds,
                                         const TableSum& sums) {
    const uint32_t set = Bias::blocks_where(own.bucket() >= 0);
    tile.for_each_block(set, [&](int, int row, int key) {
      add_not_finite(tile, load_elements(tile, ds, row, key), sums);
    });
  }

  // Adds the sums of blocks in which each score's bucket is searched for.
  static HSTU_DEVICE void add_other_blocks(const Bias& tile, uint32_t set, const Element* ds,
                                           const TableSum& sums) {
    tile.for_each_block(set, [&](int, int row, int key) {
      Elements elements = load_elements(tile, ds, row, key);
      add_not_finite(tile, elements, sums);
      const uint32_t word = finite_halves(elements.word);
      // Zeros are in no bucket, so that the buckets of hidden scores are not looked for.
      const bool has_first = word & 0x7fff;
      const bool has_second = word >> 16 & 0x7fff;
      if (!has_first) elements.first = has_second ? elements.second : -1;
      if (!has_second) elements.second = elements.first;
      const bool has_any = has_first || has_second;
      const int lowest =
          __reduce_min_sync(kAllLanes, has_any ? min(elements.first, elements.second) : INT_MAX);
      const int highest = __reduce_max_sync(kAllLanes, max(elements.first, elements.second));
#pragma unroll 1
      for (int first = lowest; first <= highest; first += 8) {
        float sum[4] = {};
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
          if (first + n > highest) break;
          const uint32_t right[2] = {
              halves(word, elements.first == first + n, elements.second == first + n),
              halves(word, elements.first == first + n + 1, elements.second == first + n + 1)};
          const uint32_t left[4] = {ones_if(lane() / 4 == n), 0, ones_if(lane() / 4 == n + 1), 0};
          Mma::multiply(sum, left, right);
        }
        add_own_bucket(tile, sum_of_own_bucket(sum), first, highest, sums);
      }
    });
  }
};

}  // namespace hstu::sm80
