// The sums of dS of a tile over the scores of each bucket, for the gradient of the time table.
//
// dS of blocks of 8 rows and 8 keys, rounded to 16 bits, is the left operand of mma.sync, whose
// right operand has ones in one column for each block of keys: these products add up the rows of
// the blocks. A lane gets the sum of the block whose buckets it has found. It keeps the sums of its
// bucket and of the next bucket from one tile of rows to the next, until its bucket changes.
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

  // Sums of dS for a bucket and the next bucket that are not in device memory yet.
  struct Kept {
    int bucket = 0;
    float sums[2] = {0, 0};
  };

  // Adds the warp's part of dS. It is also in `ds`, a RowsTile, for loops over blocks.
  template <typename Sum>
  static HSTU_DEVICE void add(const Bias& tile, const TimeBlock& own, const Sum& gradients,
                              const Element* ds, const TableSum& sums, Kept& kept) {
    Words words;
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        words.at[m][n] = rounded_pair<Element>(gradients.at(m, 2 * n), gradients.at(m, 2 * n + 1));
      }
    }
    float whole = sum_blocks(words);
    if (__any_sync(kAllLanes, !(fabsf(whole) <= FLT_MAX))) {
      // A product of zero and NaN is NaN, which would reach other blocks. So NaN is added to the
      // buckets that have it here, and removed from dS.
      add_not_finite(tile, own, ds, sums);
#pragma unroll
      for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
        for (int m = 0; m < kRowBlocks; ++m) words.at[m][n] = finite_halves(words.at[m][n]);
      }
      whole = sum_blocks(words);
    }
    float second = 0;
    const uint32_t split = Bias::blocks_where(own.has_two());
    if (split) second = sum_second_buckets(tile, own, split, words);
    const bool is_kept = Bias::has_own_block() && own.bucket() >= 0;
    add_kept(tile.time_entry(), sums, is_kept && own.bucket() != kept.bucket, kept);
    if (is_kept) {
      kept.bucket = own.bucket();
      kept.sums[0] += own.has_two() ? whole - second : whole;
      kept.sums[1] += second;
    }
    const uint32_t others = Bias::blocks_where(own.has_several());
    if (others) add_other_blocks(tile, own, others, ds, sums);
  }

  // Adds the kept sums of the lanes whose condition is true to the table, and clears them.
  static HSTU_DEVICE void add_kept(int64_t time_entry, const TableSum& sums, bool condition,
                                   Kept& kept) {
    uint32_t lanes = __ballot_sync(kAllLanes, condition);
    // Lanes with the same bucket add their sums up first.
#pragma unroll 1
    while (lanes != 0) {
      const int leader = __ffs(lanes) - 1;
      const int bucket = __shfl_sync(kAllLanes, kept.bucket, leader);
      const bool is_added = condition && kept.bucket == bucket;
      const float first = warp_sum(is_added ? kept.sums[0] : 0);
      const float second = warp_sum(is_added ? kept.sums[1] : 0);
      if (lane() < 2 && (lane() == 0 ? first : second) != 0) {
        sums.add(time_entry + bucket + lane(), lane() == 0 ? first : second);
      }
      if (is_added) kept.sums[0] = kept.sums[1] = 0;
      lanes &= ~__ballot_sync(kAllLanes, is_added);
    }
  }

 private:
  static constexpr int kRowBlocks = Bias::kRowBlocks;
  static constexpr int kKeyBlocks = Bias::kKeyBlocks;
  static constexpr int kBuckets = 8;  // buckets summed at once, in blocks with several buckets
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

  // Row sums of blocks: element 2 (m % 2) + i of part m / 2 is the sum of row lane() / 4 of block
  // (m, 2 (lane() % 4) + i).
  struct RowSums {
    float parts[kRowBlocks / 2][4] = {};

    // Adds the rows of blocks (m, n), (m + 1, n), (m, n + 1) and (m + 1, n + 1); m and n are even.
    HSTU_DEVICE void add(int m, int n, const uint32_t (&left)[4]) {
      const uint32_t right[2] = {ones_if(lane() / 4 == n), ones_if(lane() / 4 == n + 1)};
      Mma::multiply(parts[m / 2], left, right);
    }

    // The sum of the lane's own block.
    HSTU_DEVICE float own() const {
      constexpr int kCount = 2 * kRowBlocks;
      float sums[kCount];
#pragma unroll
      for (int n = 0; n < kCount; ++n) sums[n] = parts[n / 4][n % 4];
      // In each step, a lane keeps half of the sums and adds its partner's parts to them.
      int partner = 4;
#pragma unroll
      for (int half = kCount / 2; half > 0; half /= 2) {
        const bool is_upper = (lane() & partner) != 0;
#pragma unroll
        for (int n = 0; n < half; ++n) {
          const float given = is_upper ? sums[n] : sums[n + half];
          sums[n] =
              (is_upper ? sums[n + half] : sums[n]) + __shfl_xor_sync(kAllLanes, given, partner);
        }
        partner *= 2;
      }
      if (kCount == 4) sums[0] += __shfl_xor_sync(kAllLanes, sums[0], 16);
      // Sum 2m + i of key block 2t + i is in lane t of the rows whose bits are those of 2m + i in
      // the reverse order.
      const int index = lane() % 4 * 2 + lane() / 4 % 2;
      const int row = kCount == 4 ? index >> 1 & 1 | (index & 1) << 1
                                  : index >> 2 | index & 2 | (index & 1) << 2;
      return __shfl_sync(kAllLanes, sums[0], row % 8 * 4 + lane() / 8);
    }
  };

  // The sum of the lane's own block.
  static HSTU_DEVICE float sum_blocks(const Words& words) {
    RowSums sums;
#pragma unroll
    for (int n = 0; n < kKeyBlocks; n += 2) {
#pragma unroll
      for (int m = 0; m < kRowBlocks; m += 2) {
        sums.add(m, n,
                 {words.at[m][n], words.at[m + 1][n], words.at[m][n + 1], words.at[m + 1][n + 1]});
      }
    }
    return sums.own();
  }

  // sum_blocks() over the scores in the second bucket of the blocks in `split`, which have two.
  static HSTU_DEVICE float sum_second_buckets(const Bias& tile, const TimeBlock& own,
                                              uint32_t split, const Words& words) {
    const Tile thread;
    const uint32_t threshold = tile.load_threshold(own);
    uint32_t row_times[kRowBlocks];
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
      row_times[m] = tile.load_row_time(thread.first_row + Tile::row_offset(m));
    }
    RowSums sums;
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
      if ((split >> 4 * n & 0xf) == 0) continue;
      const uint2 key_times = tile.load_key_times(thread.first_key + Tile::key_offset(2 * n));
      uint32_t second[kRowBlocks];
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        second[m] = 0;
        if ((split >> (4 * n + m) & 1) == 0) continue;
        const uint32_t limit = Bias::of_block(threshold, m, n);
        second[m] = halves(words.at[m][n], Bias::difference_of(row_times[m], key_times.x) >= limit,
                           Bias::difference_of(row_times[m], key_times.y) >= limit);
      }
#pragma unroll
      for (int m = 0; m < kRowBlocks; m += 2) {
        if (n % 2 == 0) {
          sums.add(m, n, {second[m], second[m + 1], 0, 0});
        } else {
          sums.add(m, n - 1, {0, 0, second[m], second[m + 1]});
        }
      }
    }
    return sums.own();
  }

  // Adds the column sums of the first 8 x 8 elements of `right` to row lane() / 4 of `sum` if
  // `is_first`, and of the second 8 x 8 elements if `is_second`.
  static HSTU_DEVICE void multiply(bool is_first, bool is_second, const uint32_t (&right)[2],
                                   float (&sum)[4]) {
    const uint32_t left[4] = {ones_if(is_first), 0, ones_if(is_second), 0};
    Mma::multiply(sum, left, right);
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
  static HSTU_DEVICE Elements load_elements(const Bias& tile, const Element* ds, int row, int key,
                                            bool is_wide) {
    using DsTile = RowsTile<Tile::kTileRows, Tile::kTileKeys, Element>;
    return {*reinterpret_cast<const uint32_t*>(ds + DsTile::offset(row, key)),
            tile.buckets_of(row, key, is_wide)};
  }

  static HSTU_DEVICE void add_not_finite(const Bias& tile, const Elements& elements,
                                         const TableSum& sums) {
    if (!is_finite_low(elements.word)) sums.add(tile.time_entry() + elements.buckets.first, NAN);
    if (!is_finite_low(elements.word >> 16))
      sums.add(tile.time_entry() + elements.buckets.second, NAN);
  }
  // add_not_finite() for all blocks with one or two buckets.
  static HSTU_DEVICE void add_not_finite(const Bias& tile, const TimeBlock& own, const Element* ds,
                                         const TableSum& sums) {
    const uint32_t set = Bias::blocks_where(own.bucket() >= 0);
    tile.for_each_block(set, [&](int, int row, int key) {
      // NOTE: blocks with one bucket may be wide.
      add_not_finite(tile, load_elements(tile, ds, row, key, /*is_wide=*/true), sums);
    });
  }

  // Adds the blocks that have several buckets: the bucket of each score is searched for.
  static HSTU_DEVICE void add_other_blocks(const Bias& tile, const TimeBlock& own, uint32_t set,
                                           const Element* ds, const TableSum& sums) {
    const uint32_t wide = Bias::blocks_where(own.bucket() == TimeBlock::kWide);
    tile.for_each_block(set, [&](int index, int row, int key) {
      const bool is_wide = (wide >> index & 1) != 0;
      const Elements elements = load_elements(tile, ds, row, key, is_wide);
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
