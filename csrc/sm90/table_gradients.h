// Sums of dS for the gradients of a relative bias's tables, by the warpgroup that computes the
// bias.
//
// Both sums are over blocks of 8 x 8 elements. A warp loads four of them at once, in the order of a
// right operand of mma.sync, and goes along four diagonals of blocks.
//
//   position  All blocks of a diagonal have the same distances: a product with the identity adds
//   them
//             up elementwise. The next tile has the same keys and the next 64 rows, and the warp
//             goes on along the same diagonals. One that leaves the keys is finished, and its sums
//             are added to a TableSum.
//   time      A product with ones in a row gives the sums of a block's columns, and so each lane
//   gets
//             the sum of all of one block. If the block has one bucket, that is the bucket's sum.
//             The few blocks with several buckets are read again, four at a time by the 32 lanes of
//             a warp. A warp adds integers in shared memory, one for each bucket, and at the end of
//             a tile adds these to a TableSum.
//
// fp32 sums are found in a fixed order, and no order changes the sums of integers, so all bits of
// the gradients are the same in every run.
#pragma once

#include "../common/fixed_point.h"
#include "../common/table_sum.h"
#include "../scheduler/relative_bias.h"
#include "relative_bias.h"
#include "tile_config.h"

namespace hstu::sm90 {

// A warp's sums of two diagonals of 8 x 8 blocks that are finished, to be added up along their own
// diagonals.
struct FinishedDiagonals {
  static constexpr int kMargin = 8;  // zeros before and after the 8 sums of a row
  static constexpr int kStride = kMargin + 8;
  static constexpr int kSize = 8 * kStride + kMargin + 8;

  alignas(16) float sums[2][kSize];

  HSTU_DEVICE float* at(int half, int row, int key) {
    return sums[half] + row * kStride + kMargin + key;
  }
};

// The lower halves of the times of the rows of a tile, and what the 8 rows of a block have in
// common: the range of their times, and a key from which on they see none.
template <int kRows>
struct RowWindow {
  TimeRange ranges[kRows / 8];
  int keys[kRows / 8];
  uint32_t times[kRows];
};

// Shared memory of the warpgroup.
template <int kRows>
struct TableGradientMemory {
  RowWindow<kRows> rows[2];
  FinishedDiagonals diagonals[4];  // of the warps
};

// Sums by time that a warp finds in a tile: of neighboring buckets, from its lowest one on.
constexpr int kTimeBins = 64;

// Where the sums of a work tile are added.
struct TableEntries {
  const TableSums& sums;
  const Sequence& sequence;
  int position_size;
  int first_position;  // the first entry of the head
  int first_time;
  int origin;  // the entry, from first_position on, of the first row and key of a work tile
};

template <int kRows, int kKeys, typename Element, bool kIsDescending>
class TableGradients {
  using Memory = TableGradientMemory<kRows>;
  static constexpr int kChunks = kKeys / 8;   // of a row
  static constexpr int kPairs = kChunks / 8;  // of diagonals, in a warp
  static constexpr int kRowBlocks = kRows / 8;
  static constexpr int kBins = kTimeBins;
  static constexpr uint32_t kAllLanes = 0xffffffff;
  static_assert(kRowBlocks == 8 && (kChunks == 8 || kChunks == 16));

 public:
  // Called by all threads of the warpgroup, with a barrier before the next call.
  HSTU_DEVICE TableGradients(int thread, const KeyTimes<kKeys>& keys, Memory& memory)
      : thread_(thread), keys_(keys), memory_(memory) {
    // NOTE: the diagonals of a warp are 4 blocks apart, so that each warp has some of the blocks
    // with many buckets, which are next to each other.
    group_ = lane() / 8 % (2 * kPairs) * 4 + thread / 32;
    float* const own = memory.diagonals[thread / 32].sums[0];
    for (int n = lane(); n < 2 * FinishedDiagonals::kSize; n += 32) own[n] = 0;
    __syncwarp();
  }

  // Begins a step. `thread` is as before, but a value that the compiler knows nothing about: it
  // would keep, and spill, what follows from it for all steps.
  HSTU_DEVICE void set_thread(int thread) { thread_ = thread; }

  // Stores the times of a tile's rows, of which the thread has row thread % kRows.
  HSTU_DEVICE void store_rows(const RowTimes& row, int parity) {
    if (thread_ >= kRows) return;
    RowWindow<kRows>& to = memory_.rows[parity];
    to.times[thread_] = static_cast<uint32_t>(row.time);
    if (thread_ % 8 == 0) {
      to.ranges[thread_ / 8] = row.range;
      to.keys[thread_ / 8] = row.keys;
    }
  }

  // The buckets of the lane's block of a tile, which are found before its dS is there.
  struct Block {
    static constexpr int kIsPast = 1;    // all keys are earlier than all rows
    static constexpr int kIsFuture = 2;  // or later

    uint64_t least = 0;  // difference
    int first = 0;       // bucket
    int count = 0;       // of buckets; 0: the thread has no block, or no row sees a key of it
    int flags = 0;
    bool is_wide = false;  // differences do not fit into 31 bits, counted from the least one
  };
  HSTU_DEVICE Block find_block(const RelativeBias& bias, int first_key, int parity) const {
    const RowWindow<kRows>& window = memory_.rows[parity];
    const int row_block = row_block_of(lane() % 8);
    const int chunk = chunk_of(lane() % 8);
    const TimeRange rows = window.ranges[row_block];
    const TimeRange keys = keys_.ranges[chunk];
    const DifferenceRange differences = find_difference_range(rows, keys);
    const BucketRange buckets = find_bucket_range(bias, differences);
    Block block;
    block.least = differences.least;
    block.first = buckets.first;
    const bool is_visible = has_block() && first_key + chunk * 8 < window.keys[row_block];
    block.count = is_visible ? buckets.last - buckets.first + 1 : 0;
    if (keys.latest <= rows.earliest) {
      block.flags = Block::kIsPast;
    } else if (rows.latest <= keys.earliest) {
      block.flags = Block::kIsFuture;
    }
    block.is_wide = differences.most - differences.least >= uint64_t{1} << 31;
    return block;
  }

  // Sums dS of tile m of rows, whose times have been stored with `parity`. `memory_of_bins` is
  // memory of the warp for kTimeBins sums. Calls release() when dS has been read.
  template <typename Release>
  HSTU_DEVICE void add_tile(const TableEntries& entries, const RelativeBias& bias, int m,
                            int parity, const Block& block, const Element* ds, int* memory_of_bins,
                            Release release) {
    const bool has_position = entries.sums.position.words;
    const BlockSums sums = has_position ? add_blocks<true, true>(ds) : add_blocks<false, true>(ds);
    add_times(entries, bias, m * kRows, parity, block, sums.total, sums.largest, ds, memory_of_bins,
              release);
    if (has_position) finish_tile(entries, m);
  }

  // The same without weights by time.
  template <typename Release>
  HSTU_DEVICE void add_positions(const TableEntries& entries, int m, const Element* ds,
                                 Release release) {
    add_blocks<true, false>(ds);
    release();
    finish_tile(entries, m);
  }

  // The same for an empty tile.
  HSTU_DEVICE void add_empty_tile(const TableEntries& entries, int m) {
    store_finished(0);
    store_finished(1);
    finish_tile(entries, m);
  }

  // After as many empty tiles, all diagonals are finished.
  static constexpr int kTilesOfDiagonal = kPairs;

 private:
  HSTU_DEVICE int lane() const { return thread_ % 32; }

  // Whether the lane has a block: with 8 chunks, half of the lanes have.
  HSTU_DEVICE bool has_block() const { return kPairs == 2 || lane() < 16; }

  // Block n of the lane's diagonal of blocks: it begins in the first 8 rows with chunk group_,
  // and goes on with chunk 0 after the last one. If kIsDescending, both rows and chunks are
  // counted from the end.
  static HSTU_DEVICE int row_block_of(int n) { return kIsDescending ? kRowBlocks - 1 - n : n; }
  HSTU_DEVICE int chunk_of(int n) const { return chunk_of(group_, n); }
  static HSTU_DEVICE int chunk_of(int group, int n) {
    return (kIsDescending ? kChunks - 1 - group - n : group + n) & (kChunks - 1);
  }

  // Row `first` + `r` of a chunk of 8 keys in a tile of dS, in the layout of rows_tensor();
  // `first` is a multiple of 8. `from` points to row r.
  static HSTU_DEVICE const uint4* chunk_at(const Element* from, int first, int r, int chunk) {
    return reinterpret_cast<const uint4*>(from + first * 64 + (chunk & 8) * (kRows * 8) +
                                          ((chunk ^ r) & 7) * 8);
  }

  static HSTU_DEVICE void unpack(const uint4& words, float (&x)[8]) {
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      x[2 * n] = low_half<Element>(pairs[n]);
      x[2 * n + 1] = high_half<Element>(pairs[n]);
    }
  }

  static HSTU_DEVICE void multiply(float (&sum)[4], const uint32_t (&left)[4], uint32_t first,
                                   uint32_t second) {
    using Mma = std::conditional_t<std::is_same_v<Element, cutlass::half_t>,
                                   cute::SM80_16x8x16_F32F16F16F32_TN,
                                   cute::SM80_16x8x16_F32BF16BF16F32_TN>;
    Mma::fma(sum[0], sum[1], sum[2], sum[3], left[0], left[1], left[2], left[3], first, second,
             sum[0], sum[1], sum[2], sum[3]);
  }

  // The sum of the lane's block, and the largest values of those that it has read, as two numbers
  // in a word.
  struct BlockSums {
    float total;
    uint32_t largest;
  };

  // Adds the blocks of a tile to the sums of diagonals, and finds the sum of each block.
  template <bool kHasPosition, bool kHasTime>
  HSTU_DEVICE BlockSums add_blocks(const Element* ds) {
    const uint32_t bits = Element(1.0f).raw();
    const uint32_t ones = bits | bits << 16;
    // The identity: lane 4 g + t has elements 2 t and 2 t + 1 of row g, and of row g + 8.
    const uint32_t one = lane() / 8 == lane() % 4 ? bits << lane() / 4 % 2 * 16 : 0;
    const uint32_t identity[4] = {one, 0, 0, one};
    // Rows n and n + 8 are the sums of the columns of block n of two diagonals.
    float columns[kPairs][4] = {};
    uint32_t largest = 0;
    // Lanes 8 q to 8 q + 7 pass the addresses of block q of four: one of each diagonal, or two.
    constexpr int kStep = 2 / kPairs;
    const int own_step = kPairs == 2 ? 0 : lane() / 16;
    const Element* const own_row = ds + lane() % 8 * 64;
    const int warp = thread_ / 32;
#pragma unroll
    for (int n = 0; n < kRowBlocks; n += kStep) {
      const int own = n + own_step;
      uint32_t words[4];
      cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const cute::uint128_t*>(chunk_at(
                                        own_row, row_block_of(own) * 8, lane() % 8, chunk_of(own))),
                                    words[0], words[1], words[2], words[3]);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int block = n + pair / kPairs;
        const int first = pair * 2;
        if constexpr (kHasPosition) {
          if (pair == 0 || kPairs == 1) {
            // Two diagonals of the last pair end within the tile, and others begin.
            if (block == 4 - warp) store_finished(1);
            if (block == 8 - warp) store_finished(0);
          }
          multiply(diagonals_[pair % kPairs], identity, words[first], words[first + 1]);
        }
        if constexpr (kHasTime) {
          const uint32_t ones_of_row = lane() / 4 == block ? ones : 0;
          const uint32_t left[4] = {ones_of_row, 0, 0, ones_of_row};
          multiply(columns[pair % kPairs], left, words[first], words[first + 1]);
          largest = larger_magnitudes<Element>(
              largest, larger_magnitudes<Element>(words[first], words[first + 1]));
        }
      }
    }
    if (kHasPosition && warp == 0) store_finished(0);
    if constexpr (kHasTime) {
      return {sum_of_block(columns), largest};
    } else {
      return {};
    }
  }

  // Of the sums of the columns of blocks, the sum of the lane's block.
  HSTU_DEVICE float sum_of_block(const float (&columns)[kPairs][4]) const {
    // Lane 4 n + t gets the sum of block n of diagonal t, and hands it to lane 8 t + n.
    float sums[2];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      sums[pair] =
          exchange(columns[pair][0] + columns[pair][1], columns[pair][2] + columns[pair][3], 1);
    }
    float sum;
    if constexpr (kPairs == 2) {
      sum = exchange(sums[0], sums[1], 2);
    } else {
      sum = sums[0] + __shfl_xor_sync(kAllLanes, sums[0], 2);
    }
    return __shfl_sync(kAllLanes, sum, lane() % 8 * 4 + lane() / 8);
  }

  // Stores the sums of the first or the second diagonal of the last pair, and begins another.
  HSTU_DEVICE void store_finished(int half) {
    float (&sums)[4] = diagonals_[kPairs - 1];
    *reinterpret_cast<float2*>(memory_.diagonals[thread_ / 32].at(
        half, lane() / 4, lane() % 4 * 2)) = {sums[half * 2], sums[half * 2 + 1]};
    sums[half * 2] = sums[half * 2 + 1] = 0;
  }

  // Adds the diagonals that tile m has finished, and goes on to the next tile of rows, whose
  // distances are those of this one less kRows, or more.
  HSTU_DEVICE void finish_tile(const TableEntries& entries, int m) {
    if constexpr (kPairs == 2) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float sum = diagonals_[0][n];
        diagonals_[0][n] = diagonals_[1][n];
        diagonals_[1][n] = sum;
      }
    }
    __syncwarp();
    const int half = lane() / 16;
    const int distance = lane() % 16 - 7;  // 8 is none, and reads zeros
    float sum = 0;
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      sum += *memory_.diagonals[thread_ / 32].at(half, row, distance + row);
    }
    __syncwarp();
    constexpr int kFirst = kIsDescending ? 1 - kRowBlocks : kChunks - kRowBlocks;
    const int block = thread_ / 32 + 4 * half;
    const int own_block = kFirst + (kIsDescending ? kRowBlocks - 1 - block : block);
    // Distances past the ends of the table share its first and its last entry, to which one lane
    // adds their sum.
    const int last = entries.position_size - 1;
    const int entry = min(max(entries.origin - m * kRows + own_block * 8 + distance, 0), last);
    const uint32_t before = __ballot_sync(kAllLanes, entry == 0);
    const uint32_t after = __ballot_sync(kAllLanes, entry == last);
    if (before | after) {
      const float sum_before = sum_of_warp(entry == 0 ? sum : 0);
      const float sum_after = sum_of_warp(entry == last ? sum : 0);
      if (entry == last) sum = lane() == __ffs(static_cast<int>(after)) - 1 ? sum_after : 0;
      if (entry == 0) sum = lane() == __ffs(static_cast<int>(before)) - 1 ? sum_before : 0;
    }
    entries.sums.position.add(entries.first_position + entry, sum);
  }

  // Each lane has a part of two sums. Returns that of its own one and its partner's part of it:
  // lanes whose number has the bit own the second.
  HSTU_DEVICE float exchange(float first, float second, int bit) const {
    const bool is_second = lane() & bit;
    const float given = is_second ? first : second;
    return (is_second ? second : first) + __shfl_xor_sync(kAllLanes, given, bit);
  }

  static HSTU_DEVICE float sum_of_warp(float sum) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
    return sum;
  }

  // --- time ---

  // The bins to which a warp adds the sums of a tile.
  struct Bins {
    FixedPoint fixed;
    int lowest;  // bucket
    int* bins;

    HSTU_DEVICE void add(int bucket, int addend) const {
      atomicAdd(bins + bucket - lowest, addend);
    }
  };

  // A row of a block with several buckets.
  struct Row {
    int row;
    int chunk;
    int first;  // bucket
    int count;  // of buckets; 0: no block
    uint64_t least;
    uint32_t from;  // a difference, less `least`, is |from - time of the key|, all in 32 bits
  };

  template <typename Release>
  HSTU_DEVICE void add_times(const TableEntries& entries, const RelativeBias& bias, int first_row,
                             int parity, const Block& block, float total, uint32_t largest,
                             const Element* ds, int* memory_of_bins, Release release) {
    // NOTE: the bits of a NaN are larger than those of every number.
    const uint32_t largest_bits =
        __reduce_max_sync(kAllLanes, max(__float_as_uint(fabsf(low_half<Element>(largest))),
                                         __float_as_uint(fabsf(high_half<Element>(largest)))));
    if (largest_bits == 0) {
      release();
      return;
    }
    Bins bins;
    bins.fixed = FixedPoint::of_largest(largest_bits);
    bins.lowest = static_cast<int>(
        __reduce_min_sync(kAllLanes, block.count > 0 ? static_cast<uint32_t>(block.first) : ~0u));
    bins.bins = memory_of_bins;
#pragma unroll
    for (int bin = 0; bin < kBins; bin += 32) bins.bins[bin + lane()] = 0;
    __syncwarp();
    const int last = block.first + block.count - 1;
    const int highest = static_cast<int>(
        __reduce_max_sync(kAllLanes, static_cast<uint32_t>(block.count > 0 ? last : 0)));
    const bool is_finite = largest_bits < 0x7f800000;
    const bool is_slow =
        !is_finite || last - bins.lowest >= kBins || (block.is_wide && block.count > 1);
    uint32_t slow = __ballot_sync(kAllLanes, block.count > 0 && is_slow);
    const bool is_few = block.count <= kFewBuckets;
    uint32_t few = __ballot_sync(kAllLanes, !is_slow && is_few && block.count > 1);
    uint32_t many = __ballot_sync(kAllLanes, !is_slow && !is_few);
    if (block.count > 0 && !is_slow && is_few) {
      const int addend = bins.fixed.to_integer(total);
      if (addend != 0) bins.add(block.first, addend);
    }
    while (few) {
      const Row row = take_row(few, block, parity);
      add_few(bias, row, ds, bins);
    }
    while (many) {
      const uint32_t before = many;
      const Row row = take_row(many, block, parity);
      if (!add_many(bias, row, ds, bins)) slow |= before & ~many;
    }
    if (__builtin_expect(slow != 0, 0)) {
      while (slow) {
        const Row row = take_row(slow, block, parity);
        add_slowly(entries, bias, row, first_row, ds, bins, is_finite);
      }
    }
    release();
    __syncwarp();
#pragma unroll 1
    for (int bin = lane(); bin <= min(highest - bins.lowest, kBins - 1); bin += 32) {
      const int addend = bins.bins[bin];
      if (addend == 0) continue;
      entries.sums.time.add(entries.first_time + bins.lowest + bin, bins.fixed.to_float(addend));
    }
    __syncwarp();
  }

  // Takes up to four blocks from a set of lanes. 8 lanes get a row each of one of them.
  HSTU_DEVICE Row take_row(uint32_t& blocks, const Block& block, int parity) const {
    int owner = -1;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int next = __ffs(static_cast<int>(blocks)) - 1;
      if (lane() / 8 == n) owner = next;
      blocks &= blocks - 1;
    }
    const int from = owner < 0 ? 0 : owner;
    Row row;
    row.first = __shfl_sync(kAllLanes, block.first, from);
    row.count = __shfl_sync(kAllLanes, block.count, from);
    row.least = __shfl_sync(kAllLanes, block.least, from);
    const int flags = __shfl_sync(kAllLanes, block.flags, from);
    row.row = row_block_of(from % 8) * 8 + lane() % 8;
    row.chunk = chunk_of(from / 8 * 4 + thread_ / 32, from % 8);
    const uint32_t time = memory_.rows[parity].times[row.row];
    const uint32_t least = static_cast<uint32_t>(row.least);
    row.from = flags == Block::kIsPast     ? time - least
               : flags == Block::kIsFuture ? time + least
                                           : time;
    if (owner < 0) row.count = 0;
    return row;
  }

  // The differences of a row and the 8 keys of its chunk, less row.least.
  HSTU_DEVICE void find_differences(const Row& row, uint32_t (&differences)[8]) const {
    const int4* const times = reinterpret_cast<const int4*>(keys_.times + row.chunk * 8);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int4 two = times[n];
      differences[2 * n] = abs(static_cast<int>(row.from - static_cast<uint32_t>(two.x)));
      differences[2 * n + 1] = abs(static_cast<int>(row.from - static_cast<uint32_t>(two.z)));
    }
  }

  static HSTU_DEVICE const uint4* chunk_of_row(const Row& row, const Element* ds) {
    return chunk_at(ds + row.row * 64, 0, row.row % 8, row.chunk);
  }
  static HSTU_DEVICE uint4 read_row(const Row& row, const Element* ds) {
    uint4 words = {};
    if (row.count > 0) words = *chunk_of_row(row, ds);
    return words;
  }

  static constexpr int kFewBuckets = 4;

  // Blocks with few buckets: their sum has been added to the lowest bucket. What belongs to
  // higher buckets is moved there.
  HSTU_DEVICE void add_few(const RelativeBias& bias, const Row& row, const Element* ds,
                           const Bins& bins) const {
    float x[8];
    unpack(read_row(row, ds), x);
    uint32_t differences[8];
    find_differences(row, differences);
#pragma unroll
    for (int n = 1; n < kFewBuckets; ++n) {
      const bool exists = n < row.count;
      if (!__any_sync(kAllLanes, exists)) break;
      // NOTE: no difference is as large as this.
      uint32_t threshold = 0xffffffff;
      if (exists) {
        threshold = static_cast<uint32_t>(__ldg(bias.thresholds + row.first + n - 1)) -
                    static_cast<uint32_t>(row.least);
      }
      float above[2] = {};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (differences[e] >= threshold) above[e % 2] += x[e];
      }
      float sum = above[0] + above[1];
#pragma unroll
      for (int distance = 4; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, distance);
      }
      const int addend = bins.fixed.to_integer(sum);
      const int side = lane() % 8;  // 0: where it belongs; 1: where it was
      if (side < 2 && addend != 0) {
        bins.add(row.first + n - side, side == 0 ? addend : -addend);
      }
    }
  }

  // Blocks with more buckets: each score is added by itself. Returns false, and adds nothing, if
  // that needs an exact search.
  HSTU_DEVICE bool add_many(const RelativeBias& bias, const Row& row, const Element* ds,
                            const Bins& bins) const {
    uint32_t differences[8];
    find_differences(row, differences);
    int buckets[8];
    int most = 0;  // thresholds in a cell
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const uint64_t difference = row.count > 0 ? row.least + differences[n] : 0;
      const BucketCell cell = load_cell(bias.prepared.cells + difference_cell(difference));
      buckets[n] = cell.first + (difference >= cell.threshold ? 1 : 0);
      most = max(most, cell.count);
    }
    if (__any_sync(kAllLanes, row.count > 0 && most > 1)) return false;
    float x[8];
    unpack(read_row(row, ds), x);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int addend = bins.fixed.small_to_integer(x[n]);
      if (addend != 0) bins.add(buckets[n], addend);
    }
    return true;
  }

  // Any blocks. Buckets past the last bin, and numbers that are not finite, are added to the
  // TableSum.
  HSTU_DEVICE void add_slowly(const TableEntries& entries, const RelativeBias& bias, const Row& row,
                              int first_row, const Element* ds, const Bins& bins,
                              bool is_finite) const {
    if (row.count == 0) return;
    const int64_t row_time =
        time_of_row(bias, entries.sequence, min(first_row + row.row, entries.sequence.q_len - 1));
    const Element* const chunk = reinterpret_cast<const Element*>(chunk_of_row(row, ds));
#pragma unroll 1
    for (int n = 0; n < 8; ++n) {
      const float x = static_cast<float>(chunk[n]);
      const int64_t key_time = keys_.times[row.chunk * 8 + n];
      const int bucket = bucket_of(bias, time_difference(row_time, key_time));
      if (is_finite && bucket - bins.lowest < kBins) {
        bins.add(bucket, bins.fixed.small_to_integer(x));
      } else {
        entries.sums.time.add(entries.first_time + bucket, x);
      }
    }
  }

  int thread_;
  const KeyTimes<kKeys>& keys_;
  Memory& memory_;
  int group_;  // of the lane's diagonal
  // The sums of pairs of diagonals of blocks, of which the last pair ends within the next tile.
  // Those of the first diagonal are in the first two numbers.
  float diagonals_[kPairs][4] = {};
};

}  // namespace hstu::sm90
