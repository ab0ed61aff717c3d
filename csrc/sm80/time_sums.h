// The sums of dS of a tile over the scores of each bucket, for the gradient of the time table.
//
// dS of a block of 8 rows and 8 keys, rounded to 16 bits, is the right operand of an mma.sync whose
// left operand has ones in the row of the block's bucket. So row r of the accumulator has the sums
// over keys for one of up to 8 buckets, and each of its 8 columns belongs to a row of dS. The
// columns are added up at the end.
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
    const Buckets buckets = {own.bucket(), own.late_bucket()};
    bool is_finite = false;  // true: `words` has zeros where dS is not finite
#pragma unroll 1
    for (int first = next_bucket(buckets, 0); first != INT_MAX;) {
      const float own_sum = sum_of_own_bucket(multiply_blocks(tile, own, buckets, words, first));
      if (!is_finite && __any_sync(kAllLanes, !(fabsf(own_sum) <= FLT_MAX))) {
        // A product of zero and NaN is NaN, which would reach all buckets: adds NaN to the buckets
        // that have it, and goes on without.
        is_finite = true;
        add_not_finite(tile, own, ds, sums);
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
          for (int m = 0; m < kRowBlocks; ++m) words.at[m][n] = finite_halves(words.at[m][n]);
        }
        continue;
      }
      add_own_bucket(tile, own_sum, first, sums);
      first = next_bucket(buckets, first + kBuckets);
    }
    const uint32_t others = Bias::blocks_where(own.bucket() == TimeBlock::kSeveral);
    if (others) add_other_blocks(tile, others, ds, sums);
  }

 private:
  static constexpr int kRowBlocks = Bias::kRowBlocks;
  static constexpr int kKeyBlocks = Bias::kKeyBlocks;
  static constexpr int kBuckets = 8;  // summed by one mma
  static constexpr uint32_t kOnes =
      std::is_same_v<Element, cutlass::half_t> ? 0x3c003c00 : 0x3f803f80;
  static constexpr uint32_t kExponent = std::is_same_v<Element, cutlass::half_t> ? 0x7c00 : 0x7f80;

  using Buckets = typename Bias::TwoBuckets;
  struct Words {
    uint32_t at[kRowBlocks][kKeyBlocks];
  };

  static HSTU_DEVICE int lane() { return Bias::lane(); }
  static HSTU_DEVICE uint32_t ones_if(bool condition) { return condition ? kOnes : 0; }
  // The halves of `word` whose conditions are true, and zeros.
  static HSTU_DEVICE uint32_t halves(uint32_t word, bool low, bool high) {
    return (low ? word & 0xffffu : 0u) | (high ? word & 0xffff0000u : 0u);
  }
  static HSTU_DEVICE bool is_finite_low(uint32_t word) { return (word & kExponent) != kExponent; }
  static HSTU_DEVICE uint32_t finite_halves(uint32_t word) {
    return halves(word, is_finite_low(word), is_finite_low(word >> 16));
  }

  // The lowest bucket of all lanes from `first` on; INT_MAX: there is none.
  static HSTU_DEVICE int next_bucket(const Buckets& buckets, int first) {
    return __reduce_min_sync(kAllLanes, min(buckets.first >= first ? buckets.first : INT_MAX,
                                            buckets.second >= first ? buckets.second : INT_MAX));
  }

  // The sums of buckets [first, first + kBuckets), one in each row of an accumulator.
  struct Sums {
    // NOTE: there are two accumulators, because an mma waits for the previous one to the same
    // accumulator.
    float parts[2][4];  // the last two elements are 0
  };
  static HSTU_DEVICE Sums multiply_blocks(const Bias& tile, const TimeBlock& own,
                                          const Buckets& buckets, const Words& words, int first) {
    const int own_bucket = first + lane() / 4;
    // The blocks whose first bucket is the lane's own.
    uint32_t own_blocks = 0;
#pragma unroll
    for (int n = 0; n < kBuckets; ++n) {
      const uint32_t blocks = Bias::blocks_where(buckets.first == first + n);
      own_blocks = lane() / 4 == n ? blocks : own_blocks;
    }
    const auto is_own = [&](int m, int n) { return (own_blocks >> (4 * n + m) & 1) != 0; };
    const uint32_t split = Bias::blocks_where(own.has_two());
    typename Bias::RowTimes rows = {};
    uint32_t origin = 0;
    if (split) {
      rows = tile.load_row_times();
      origin = tile.origin_of(own);
    }
    Sums sums = {};
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
      if (split >> 4 * n & 0xf) {
        const typename Bias::KeyTimes keys = tile.load_key_times(n);
#pragma unroll
        for (int m = 0; m < kRowBlocks; ++m) {
          const uint32_t row = rows.words[m] + Bias::of_block(origin, m, n);
          const bool is_low = static_cast<int>(row - keys.words[0]) >= 0;
          const bool is_high = static_cast<int>(row - keys.words[1]) >= 0;
          const uint32_t word = words.at[m][n];
          const uint32_t right[2] = {halves(word, is_low, is_high),
                                     halves(word, !is_low, !is_high)};
          multiply(is_own(m, n), Bias::of_block(buckets.second, m, n) == own_bucket, right,
                   sums.parts[m % 2]);
        }
      } else {
#pragma unroll
        for (int m = 0; m < kRowBlocks; m += 2) {
          const uint32_t right[2] = {words.at[m][n], words.at[m + 1][n]};
          multiply(is_own(m, n), is_own(m + 1, n), right,
                   sums.parts[kRowBlocks == 4 ? m / 2 : n % 2]);
        }
      }
    }
    return sums;
  }

  // Adds the first 8 x 8 elements of `right`, and the others, to row lane() / 4 of `sum` if its
  // bucket is theirs.
  static HSTU_DEVICE void multiply(bool is_first, bool is_second, const uint32_t (&right)[2],
                                   float (&sum)[4]) {
    const uint32_t left[4] = {ones_if(is_first), 0, ones_if(is_second), 0};
    Mma::multiply(sum, left, right);
  }

  // The sum of row lane() / 4.
  static HSTU_DEVICE float sum_of_own_bucket(const Sums& sums) {
    return sum_of_row((sums.parts[0][0] + sums.parts[1][0]) +
                      (sums.parts[0][1] + sums.parts[1][1]));
  }
  // The sum of the values of the 4 lanes that have a row of an accumulator.
  static HSTU_DEVICE float sum_of_row(float own) {
    own += __shfl_xor_sync(kAllLanes, own, 1);
    return own + __shfl_xor_sync(kAllLanes, own, 2);
  }
  // Adds the sum of bucket first + lane() / 4.
  // NOTE: the bucket may not exist, but then its sum is 0 and is not added.
  static HSTU_DEVICE void add_own_bucket(const Bias& tile, float own, int first,
                                         const TableSum& sums) {
    if (lane() % 4 == 0) sums.add(tile.time_entry() + first + lane() / 4, own);
  }

  // The thread's two elements of dS, and their buckets.
  struct Elements {
    uint32_t word;
    Buckets buckets;
  };
  static HSTU_DEVICE Elements load_elements(const Bias& tile, const Element* ds, int row, int key) {
    using DsTile = RowsTile<Tile::kTileRows, Tile::kTileKeys, Element>;
    return {*reinterpret_cast<const uint32_t*>(ds + DsTile::offset(row, key)),
            tile.buckets_of(tile.differences_of(row, key))};
  }

  static HSTU_DEVICE void add_not_finite(const Bias& tile, const Elements& elements,
                                         const TableSum& sums) {
    if (!is_finite_low(elements.word)) sums.add(tile.time_entry() + elements.buckets.first, NAN);
    if (!is_finite_low(elements.word >> 16))
      sums.add(tile.time_entry() + elements.buckets.second, NAN);
  }
  // The same for all blocks with one or two buckets.
  static HSTU_DEVICE void add_not_finite(const Bias& tile, const TimeBlock& own, const Element* ds,
                                         const TableSum& sums) {
    const uint32_t set = Bias::blocks_where(own.bucket() >= 0);
    tile.for_each_block(set, [&](int, int row, int key) {
      add_not_finite(tile, load_elements(tile, ds, row, key), sums);
    });
  }

  // Adds the blocks that have several buckets: the bucket of each score is searched for.
  static HSTU_DEVICE void add_other_blocks(const Bias& tile, uint32_t set, const Element* ds,
                                           const TableSum& sums) {
    tile.for_each_block(set, [&](int, int row, int key) {
      const Elements elements = load_elements(tile, ds, row, key);
      add_not_finite(tile, elements, sums);
      const uint32_t word = finite_halves(elements.word);
      // Zeros count as having no bucket, so that buckets of hidden scores are not searched for.
      const bool has_first = word & 0x7fff;
      const bool has_second = word >> 16 & 0x7fff;
      const Buckets buckets = {has_first ? elements.buckets.first : -1,
                               has_second ? elements.buckets.second : -1};
#pragma unroll 1
      for (int first = next_bucket(buckets, 0); first != INT_MAX;
           first = next_bucket(buckets, first + kBuckets)) {
        // Row r of accumulator n is the sum of bucket first + 2n + r % 2.
        float found[kBuckets / 2];
#pragma unroll
        for (int n = 0; n < kBuckets / 2; ++n) {
          const int bucket = first + 2 * n;
          const uint32_t right[2] = {
              halves(word, buckets.first == bucket, buckets.second == bucket),
              halves(word, buckets.first == bucket + 1, buckets.second == bucket + 1)};
          float sum[4] = {};
          multiply(lane() / 4 % 2 == 0, lane() / 4 % 2 == 1, right, sum);
          found[n] = sum[0] + sum[1];
        }
        float own = found[0];
#pragma unroll
        for (int n = 1; n < kBuckets / 2; ++n) own = lane() / 8 == n ? found[n] : own;
        add_own_bucket(tile, sum_of_row(own), first, sums);
      }
    });
  }
};

}  // namespace hstu::sm80
