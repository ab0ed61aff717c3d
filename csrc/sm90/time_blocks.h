// The weights by time of a relative bias in the backward, and the sums of dS for the gradient of
// their table.
//
// A lane has one block of 8 x 8 scores of each tile: the same 8 keys in all tiles of a work tile,
// and the same 8 rows of each tile of 64. Elapsed time changes slowly from one tile to the next, so
// the lane keeps the bucket of its block, and the differences between which all have this bucket. A
// tile whose blocks all have the bucket that they had before costs a warp a comparison and an
// addition.
#pragma once

#include "../common/fixed_point.h"
#include "../common/mask.h"
#include "../common/table_sum.h"
#include "../scheduler/relative_bias.h"
#include "key_times.h"
#include "tile_config.h"

namespace hstu::sm90 {

// The blocks of 8 x 8 elements of a tile of dS that a warp has: four diagonals of 8 blocks, or two.
// Block n of a diagonal begins in the first 8 rows with chunk `group` of 8 keys, and goes on with
// chunk 0 after the last one. If kIsDescending, both rows and chunks are counted from the end.
template <int kRows, int kKeys, bool kIsDescending>
struct BlocksOfWarp {
  static constexpr int kChunks = kKeys / 8;   // of a row
  static constexpr int kPairs = kChunks / 8;  // of diagonals
  static constexpr int kRowBlocks = kRows / 8;
  static_assert(kRowBlocks == 8 && (kChunks == 8 || kChunks == 16));

  // Lane 8 d + n has block n of diagonal d. With 8 chunks, half of the lanes have a block.
  static HSTU_DEVICE bool has_block(int lane) { return kPairs == 2 || lane < 16; }
  // NOTE: the diagonals of a warp are 4 blocks apart, so that each warp has some of the blocks with
  // many buckets, which are next to each other.
  static HSTU_DEVICE int group_of(int thread) {
    return thread % 32 / 8 % (2 * kPairs) * 4 + thread / 32;
  }
  static HSTU_DEVICE int row_block_of(int n) { return kIsDescending ? kRowBlocks - 1 - n : n; }
  static HSTU_DEVICE int chunk_of(int group, int n) {
    return (kIsDescending ? kChunks - 1 - group - n : group + n) & (kChunks - 1);
  }

  // Row `first` + `r` of a chunk of 8 keys in a tile of dS, in the layout of rows_tensor();
  // `first` is a multiple of 8. `from` points to row r.
  template <typename Element>
  static HSTU_DEVICE const uint4* chunk_at(const Element* from, int first, int r, int chunk) {
    return reinterpret_cast<const uint4*>(from + first * 64 + (chunk & 8) * (kRows * 8) +
                                          ((chunk ^ r) & 7) * 8);
  }
};

// Sums by time of neighboring buckets, in shared memory.
constexpr int kTimeBins = 64;

// Shared memory of a warp.
template <int kRows, int kKeys>
struct TimeBlockMemory {
  // A block with several buckets.
  struct alignas(16) Block {
    static constexpr int kIsPast = 1;    // all keys are earlier than all rows
    static constexpr int kIsFuture = 2;  // or later
    static constexpr int kIsWide = 4;    // differences less `least` do not fit into 31 bits
    static constexpr int kFlags = 8;

    uint64_t least;  // difference
    int first;       // bucket
    int bits;        // flags, and kFlags times the number of buckets

    HSTU_DEVICE int count() const { return bits / kFlags; }
    HSTU_DEVICE bool is_wide() const { return bits & kIsWide; }
  };
  static constexpr int kBlocks = kRows * kKeys / 64 / 4;  // of a warp
  alignas(16) TimeRange ranges[kRows / 8];  // of the rows of the tile to be found next
  Block blocks[2][kBlocks];                 // of a tile of even and of odd number
  // Low words of the times of the rows of the tile whose weights are computed.
  union {
    alignas(16) uint32_t rows[kRows];
    int bins[kTimeBins];  // sums by time
  };
};

// The weights by time of the blocks of a tile, in fp16, by chunk of 8 keys and by 8 rows.
template <int kKeys>
struct TimeBlockWeights {
  // A weight that is no weight: the block has one for each score.
  static constexpr uint16_t kPatch = 0xffff;

  alignas(16) uint16_t blocks[kKeys / 8][8];
};

// Where the sums of a work tile are added.
struct TableEntries {
  const TableSums& sums;
  const Sequence& sequence;
  int position_size;
  int first_position;  // the first entry of the head
  int first_time;
  int origin;  // the entry, from first_position on, of the first row and key of a work tile
};

// The tables and times of a work tile.
struct TimesOfTile {
  const RelativeBias& bias;
  const MaskParams& mask;
  // NOTE: these are in shared memory, so that they take no registers between the few uses.
  const SequenceTile& tile;
  const int& head;
  const int& heads;
  int first_key;

  HSTU_DEVICE int table_head() const { return head / (heads / bias.time.heads); }
  HSTU_DEVICE const float* weights() const {
    return bias.prepared.time + table_head() * bias.time.size;
  }
  HSTU_DEVICE const WeightCell* cells() const {
    return bias.prepared.weight_cells + table_head() * kDifferenceCells;
  }
  // A row that does not exist has the time of the last one.
  HSTU_DEVICE int64_t time_of(int row) const {
    return time_of_row(bias, tile.sequence, min(row, tile.sequence.q_len - 1));
  }
};

template <int kRows, int kKeys, typename Element, bool kIsDescending>
class TimeBlocks {
  using Blocks = BlocksOfWarp<kRows, kKeys, kIsDescending>;
  using Memory = TimeBlockMemory<kRows, kKeys>;
  using Block = typename Memory::Block;
  using Weights = TimeBlockWeights<kKeys>;
  static constexpr uint32_t kAllLanes = 0xffffffff;

 public:
  HSTU_DEVICE TimeBlocks(int thread, const KeyTimes<kKeys>& keys, Memory& memory)
      : thread_(thread), keys_(keys), memory_(memory) {}

  // As in TableGradients.
  HSTU_DEVICE void set_thread(int thread) { thread_ = thread; }

  // Begins a work tile.
  HSTU_DEVICE void enter() {
    low_ = 1;
    high_ = 0;
    bucket_ = kNone;
  }

  // Starts loading what find() needs of tile m of rows.
  HSTU_DEVICE void start_load(const TimesOfTile& times, int m) {
    if (lane() >= Blocks::kRowBlocks) return;
    const Sequence& sequence = times.tile.sequence;
    const int row = min(m * kRows + Blocks::row_block_of(lane()) * 8, sequence.q_len - 1);
    const TimeRange* const ranges =
        times.bias.prepared.row_ranges + first_tile(sequence.q_begin, times.tile.sequence_index, 8);
    ptx::cp_async_cached_16(ranges + row / 8, memory_.ranges + lane());
  }

  // Finds the weights of tile m, and those of the scores of blocks with several buckets: 64 words
  // of `patches` for each such block, in the order of the consumers' accumulator.
  HSTU_DEVICE void find(const TimesOfTile& times, int m, int parity, Weights& weights,
                        uint32_t* patches) {
    const int row_block = Blocks::row_block_of(lane() % 8);
    const int chunk = Blocks::chunk_of(Blocks::group_of(thread_), lane() % 8);
    const TimeRange keys = ptx::ld_shared_volatile(&keys_.ranges[chunk]);
    ptx::cp_async_wait_all();
    __syncwarp();
    const TimeRange rows = ptx::ld_shared_volatile(&memory_.ranges[lane() % 8]);
    const DifferenceRange differences = find_difference_range(rows, keys);
    const bool is_same =
        (low_ <= differences.least && differences.most < high_) || !Blocks::has_block(lane());
    previous_ = bucket_;
    if (!__all_sync(kAllLanes, is_same)) {
      if (!is_same) find_bucket(times, m, parity, row_block, chunk, rows, keys, differences);
      if (__any_sync(kAllLanes, bucket_ == kMixed)) find_patches(times, m, parity, patches);
    }
    if (Blocks::has_block(lane())) weights.blocks[chunk][row_block] = weight_;
  }

  // There is no further tile to find: the last one is to be summed.
  HSTU_DEVICE void skip() { previous_ = bucket_; }

  // Adds dS of tile m, which was found before the one found last. `total` is the sum of the lane's
  // block; some lane has one that is not finite if dS is not. Calls release() when dS has been
  // read.
  template <typename Release>
  HSTU_DEVICE void add(const TableEntries& entries, const TimesOfTile& times, int m, int parity,
                       float total, const Element* ds, Release release) {
    const bool is_finite = __float_as_uint(fabsf(total)) < 0x7f800000;
    const bool is_same = previous_ == base_;
    if (__all_sync(kAllLanes, is_finite && (is_same || previous_ == kNone))) {
      release();
    } else {
      if (!__all_sync(kAllLanes, is_finite)) {
        add_exactly(entries, times, __ballot_sync(kAllLanes, previous_ != kNone), m, ds);
        release();
        return;
      }
      add_blocks(entries, times, m, parity, total, ds);
      release();
    }
    if (previous_ == base_) sums_[0] += total;
  }

  // Adds what has been summed up, at the end of a work tile.
  HSTU_DEVICE void finish(const TableEntries& entries) {
    flush(entries, 0);
    flush(entries, 1);
  }

 private:
  // In place of the bucket of a block:
  static constexpr int kNone = -1;   // no row sees a key of it, or the lane has no block
  static constexpr int kMixed = -2;  // it has several

  static constexpr int kFewBuckets = 4;

  HSTU_DEVICE int lane() const { return thread_ % 32; }

  // --- weights ---

  // Finds the bucket of the lane's block. If there are several, writes the block to memory_.
  HSTU_DEVICE void find_bucket(const TimesOfTile& times, int m, int parity, int row_block,
                               int chunk, const TimeRange& rows, const TimeRange& keys,
                               const DifferenceRange& differences) {
    const RelativeBias& bias = times.bias;
    // NOTE: both loads are issued before the first is waited for.
    const BucketCell* const cells = bias.prepared.cells;
    const auto low = ptx::ld_global_nc_volatile(cells + difference_cell(differences.least));
    const auto high = ptx::ld_global_nc_volatile(cells + difference_cell(differences.most));
    const int first = bucket_in_any(bias, low, differences.least);
    const int last = bucket_in_any(bias, high, differences.most);
    if (first == last) {
      const int thresholds = min(bias.num_thresholds, bias.time.size - 1);
      const auto* const list = reinterpret_cast<const uint64_t*>(bias.thresholds);
      low_ = first > 0 ? __ldg(list + first - 1) : 0;
      high_ = first < thresholds ? __ldg(list + first) : UINT64_MAX;
      weight_ = static_cast<uint16_t>(half_pair(__ldg(times.weights() + first), 0));
      bucket_ = first;
      return;
    }
    low_ = 1;
    high_ = 0;
    const int row = m * kRows + row_block * 8;
    const Mask mask(times.mask, times.tile.sequence, times.head);
    const bool is_visible = times.first_key + chunk * 8 < mask.estimate(row, row + 8).end;
    weight_ = is_visible ? Weights::kPatch : 0;
    bucket_ = is_visible ? kMixed : kNone;
    if (!is_visible) return;
    const int flags = keys.latest <= rows.earliest   ? Block::kIsPast
                      : rows.latest <= keys.earliest ? Block::kIsFuture
                                                     : 0;
    const bool is_wide = differences.most - differences.least >= uint64_t{1} << 31;
    memory_.blocks[parity][lane() % Memory::kBlocks] = {
        differences.least, first,
        (last - first + 1) * Block::kFlags + flags + (is_wide ? Block::kIsWide : 0)};
  }

  static HSTU_DEVICE int bucket_in_any(const RelativeBias& bias, const BucketCell& cell,
                                       uint64_t difference) {
    if (cell.count <= 1) return bucket_in(cell, difference);
    return count_reached(bias.thresholds, cell.first, cell.first + cell.count, difference);
  }

  // One of four blocks, of which 8 lanes have a row or a key each.
  struct Mixed {
    Block block;
    int row;  // the first one
    int chunk;
    bool exists;

    // The low word of the time of a key, moved so that the absolute value of its difference from
    // that of a row is the difference less block.least.
    HSTU_DEVICE uint32_t moved(uint32_t key_time) const {
      const auto least = static_cast<uint32_t>(block.least);
      if (block.bits & Block::kIsPast) return key_time + least;
      return block.bits & Block::kIsFuture ? key_time - least : key_time;
    }
  };

  // Takes up to four blocks from a set of lanes. 8 lanes get one of them.
  HSTU_DEVICE Mixed take(uint32_t& lanes, int parity) const {
    int owner = __ffs(static_cast<int>(lanes)) - 1;
    Mixed mixed;
    mixed.exists = lane() < 8;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int next = __ffs(static_cast<int>(lanes)) - 1;
      if (lane() / 8 == n && next >= 0) {
        owner = next;
        mixed.exists = true;
      }
      lanes &= lanes - 1;
    }
    mixed.block = memory_.blocks[parity][owner];
    mixed.row = Blocks::row_block_of(owner % 8) * 8;
    mixed.chunk = Blocks::chunk_of(Blocks::group_of(thread_ / 32 * 32 + owner), owner % 8);
    return mixed;
  }

  // Writes the weights of the scores of blocks with several buckets, and the times of the rows of
  // the tile to memory_.
  HSTU_DEVICE void find_patches(const TimesOfTile& times, int m, int parity, uint32_t* patches) {
    uint32_t* const rows = memory_.rows;
#pragma unroll
    for (int row = 0; row < kRows; row += 32) {
      rows[row + lane()] = static_cast<uint32_t>(times.time_of(m * kRows + row + lane()));
    }
    const bool is_mixed = bucket_ == kMixed;
    const Block& own = memory_.blocks[parity][lane() % Memory::kBlocks];
    const bool is_wide = is_mixed && own.is_wide();
    const bool is_few = is_mixed && own.count() <= kFewBuckets;
    __syncwarp();
    uint32_t few = __ballot_sync(kAllLanes, is_few && !is_wide);
    uint32_t many = __ballot_sync(kAllLanes, is_mixed && !is_few && !is_wide);
    uint32_t wide = __ballot_sync(kAllLanes, is_wide);
    while (few) patch_few(times, take(few, parity), patches);
    while (many) patch_many(times, take(many, parity), patches);
    if (__builtin_expect(wide != 0, 0)) {
      while (wide) patch_exactly(times, take(wide, parity), m, patches);
    }
  }

  // The differences of the lane's key and 8 rows, less block.least.
  HSTU_DEVICE void find_differences_of_key(const Mixed& mixed, uint32_t (&differences)[8]) const {
    const auto* const rows = reinterpret_cast<const int4*>(memory_.rows + mixed.row);
    const int4 low = rows[0];
    const int4 high = rows[1];
    const auto key = static_cast<int>(
        mixed.moved(static_cast<uint32_t>(keys_.times[mixed.chunk * 8 + lane() % 8])));
    differences[0] = abs(low.x - key), differences[1] = abs(low.y - key);
    differences[2] = abs(low.z - key), differences[3] = abs(low.w - key);
    differences[4] = abs(high.x - key), differences[5] = abs(high.y - key);
    differences[6] = abs(high.z - key), differences[7] = abs(high.w - key);
  }

  // Stores the weights of 8 rows and the lane's key.
  HSTU_DEVICE void store_patch(const Mixed& mixed, const float (&x)[8], uint32_t* patches) const {
    uint32_t* const words = patches + (mixed.chunk * 8 + mixed.row / 8) * 32 + lane() % 8 * 4;
    *reinterpret_cast<uint4*>(words) = {half_pair(x[0], x[1]), half_pair(x[2], x[3]),
                                        half_pair(x[4], x[5]), half_pair(x[6], x[7])};
  }

  // The threshold between bucket n - 1 and n of a block, less block.least. 0xffffffff: no
  // difference is as large.
  static HSTU_DEVICE uint32_t threshold_of(const RelativeBias& bias, const Block& block, int n) {
    if (n >= block.count()) return 0xffffffff;
    return static_cast<uint32_t>(__ldg(bias.thresholds + block.first + n - 1)) -
           static_cast<uint32_t>(block.least);
  }

  HSTU_DEVICE void patch_few(const TimesOfTile& times, const Mixed& mixed,
                             uint32_t* patches) const {
    const float* const weights = times.weights() + mixed.block.first;
    const float lowest = __ldg(weights);
    uint32_t differences[8];
    find_differences_of_key(mixed, differences);
    float x[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = lowest;
#pragma unroll 1
    for (int n = 1; __any_sync(kAllLanes, n < mixed.block.count()); ++n) {
      const uint32_t threshold = threshold_of(times.bias, mixed.block, n);
      const float weight = n < mixed.block.count() ? __ldg(weights + n) : 0;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (differences[e] >= threshold) x[e] = weight;
      }
    }
    store_patch(mixed, x, patches);
  }

  HSTU_DEVICE void patch_many(const TimesOfTile& times, const Mixed& mixed,
                              uint32_t* patches) const {
    uint32_t differences[8];
    find_differences_of_key(mixed, differences);
    float x[8];
    bool has_search = false;
    const WeightCell* const cells = times.cells();
    // Loads of four cells are in flight at once.
#pragma unroll
    for (int half = 0; half < 8; half += 4) {
      WeightCell found[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        found[n] = ptx::ld_global_nc_volatile(
            cells + difference_cell(mixed.block.least + differences[half + n]));
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        has_search |= found[n].threshold == WeightCell::kSeveral;
        const uint64_t difference = mixed.block.least + differences[half + n];
        x[half + n] = difference >= found[n].threshold ? found[n].high : found[n].low;
      }
    }
    if (has_search) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        x[n] = __ldg(times.weights() + bucket_of(times.bias, mixed.block.least + differences[n]));
      }
    }
    store_patch(mixed, x, patches);
  }

  // Any differences of times, by searches.
  HSTU_DEVICE void patch_exactly(const TimesOfTile& times, const Mixed& mixed, int m,
                                 uint32_t* patches) const {
    const int64_t key_time = keys_.times[mixed.chunk * 8 + lane() % 8];
    uint32_t* const words = patches + (mixed.chunk * 8 + mixed.row / 8) * 32 + lane() % 8 * 4;
#pragma unroll 1
    for (int n = 0; n < 8; n += 2) {
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int64_t row_time = times.time_of(m * kRows + mixed.row + n + e);
        const int bucket = bucket_of(times.bias, time_difference(row_time, key_time));
        x[e] = __ldg(times.weights() + bucket);
      }
      words[n / 2] = half_pair(x[0], x[1]);
    }
  }

  // --- sums ---

  HSTU_DEVICE void flush(const TableEntries& entries, int n) {
    if (sums_[n] != 0) entries.sums.time.add(entries.first_time + base_ + n, sums_[n]);
    sums_[n] = 0;
  }

  // Makes sums_ those of buckets `first` and `first` + 1.
  HSTU_DEVICE void move_to(const TableEntries& entries, int first) {
    if (first == base_) return;
    if (first == base_ + 1) {
      flush(entries, 0);
      sums_[0] = sums_[1];
      sums_[1] = 0;
    } else if (first == base_ - 1) {
      flush(entries, 1);
      sums_[1] = sums_[0];
      sums_[0] = 0;
    } else {
      flush(entries, 0);
      flush(entries, 1);
    }
    base_ = first;
  }

  // Adds all blocks, except for `total` of those with one bucket, to which sums_ is moved.
  HSTU_DEVICE void add_blocks(const TableEntries& entries, const TimesOfTile& times, int m,
                              int parity, float total, const Element* ds) {
    const bool is_mixed = previous_ == kMixed;
    const Block& own = memory_.blocks[parity][lane() % Memory::kBlocks];
    const int first = is_mixed ? own.first : previous_;
    const bool is_wide = is_mixed && own.is_wide();
    const bool is_two = is_mixed && own.count() == 2 && !is_wide;
    if (previous_ >= 0 || is_two) move_to(entries, first);
    if (is_two) sums_[0] += total;
    uint32_t two = __ballot_sync(kAllLanes, is_two);
    while (two) {
      const uint32_t taken = two;
      const float above = sum_above(times, take(two, parity), m, ds);
      const int place = __popc(taken & ((1u << lane()) - 1));
      const float own_above = __shfl_sync(kAllLanes, above, place % 4 * 8);
      if ((taken >> lane() & 1) && place < 4) {
        sums_[0] -= own_above;
        sums_[1] += own_above;
      }
    }
    const uint32_t many = __ballot_sync(kAllLanes, is_mixed && !is_two && !is_wide);
    if (many) add_many(entries, times, many, first, own.count(), m, parity, ds);
    const uint32_t wide = __ballot_sync(kAllLanes, is_wide);
    if (__builtin_expect(wide != 0, 0)) add_exactly(entries, times, wide, m, ds);
  }

  // A lane's row of 8 elements, zeros where there is no block.
  HSTU_DEVICE uint4 read_row(const Mixed& mixed, const Element* ds) const {
    const int r = lane() % 8;
    uint4 words = {};
    if (mixed.exists) words = *Blocks::chunk_at(ds + r * 64, mixed.row, r, mixed.chunk);
    return words;
  }
  static HSTU_DEVICE void unpack(const uint4& words, float (&x)[8]) {
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      x[2 * n] = low_half<Element>(pairs[n]);
      x[2 * n + 1] = high_half<Element>(pairs[n]);
    }
  }

  // The differences of the lane's row and 8 keys, less block.least.
  HSTU_DEVICE void find_differences_of_row(const TimesOfTile& times, const Mixed& mixed, int m,
                                           uint32_t (&differences)[8]) const {
    const int64_t row_time = times.time_of(m * kRows + mixed.row + lane() % 8);
    const auto row = static_cast<int>(static_cast<uint32_t>(row_time) - mixed.moved(0));
    const int4* const keys = reinterpret_cast<const int4*>(keys_.times + mixed.chunk * 8);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int4 two = keys[n];
      differences[2 * n] = abs(row - two.x);
      differences[2 * n + 1] = abs(row - two.z);
    }
  }

  // The sum of a block's elements in the second of two buckets, which the 8 lanes of a block get.
  HSTU_DEVICE float sum_above(const TimesOfTile& times, const Mixed& mixed, int m,
                              const Element* ds) const {
    float x[8];
    unpack(read_row(mixed, ds), x);
    uint32_t differences[8];
    find_differences_of_row(times, mixed, m, differences);
    const uint32_t threshold = threshold_of(times.bias, mixed.block, 1);
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
    return sum;
  }

  // Adds the blocks of the lanes `many`, score by score: integers in shared memory, which no order
  // of additions changes, and then these to the TableSum. `first` and `count` are the buckets of
  // the lane's block.
  HSTU_DEVICE void add_many(const TableEntries& entries, const TimesOfTile& times, uint32_t many,
                            int first, int count, int m, int parity, const Element* ds) {
    const bool is_own = many >> lane() & 1;
    const auto lowest =
        static_cast<int>(__reduce_min_sync(kAllLanes, is_own ? static_cast<uint32_t>(first) : ~0u));
    const bool is_past_bins = is_own && first + count - lowest > kTimeBins;
    uint32_t slow = __ballot_sync(kAllLanes, is_past_bins);
    many &= ~slow;
    uint32_t largest = 0;
    for (uint32_t left = many; left;) {
      const uint4 words = read_row(take(left, parity), ds);
      largest = larger_magnitudes<Element>(
          larger_magnitudes<Element>(larger_magnitudes<Element>(words.x, words.y),
                                     larger_magnitudes<Element>(words.z, words.w)),
          largest);
    }
    const uint32_t largest_bits =
        __reduce_max_sync(kAllLanes, max(__float_as_uint(fabsf(low_half<Element>(largest))),
                                         __float_as_uint(fabsf(high_half<Element>(largest)))));
    const FixedPoint fixed = FixedPoint::of_largest(largest_bits);
    int* const bins = memory_.bins;
#pragma unroll
    for (int bin = 0; bin < kTimeBins; bin += 32) bins[bin + lane()] = 0;
    __syncwarp();
    while (many) {
      const uint32_t before = many;
      const Mixed mixed = take(many, parity);
      if (!add_to_bins(times, mixed, m, ds, fixed, bins - lowest)) slow |= before & ~many;
    }
    __syncwarp();
#pragma unroll
    for (int bin = lane(); bin < kTimeBins; bin += 32) {
      const int addend = bins[bin];
      if (addend == 0) continue;
      entries.sums.time.add(entries.first_time + lowest + bin, fixed.to_float(addend));
    }
    __syncwarp();
    if (__builtin_expect(slow != 0, 0)) add_exactly(entries, times, slow, m, ds);
  }

  // Returns false, and adds nothing, if that needs an exact search.
  HSTU_DEVICE bool add_to_bins(const TimesOfTile& times, const Mixed& mixed, int m,
                               const Element* ds, const FixedPoint& fixed, int* bins) const {
    uint32_t differences[8];
    find_differences_of_row(times, mixed, m, differences);
    int buckets[8];
    int most = 0;  // thresholds in a cell
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const uint64_t difference = mixed.block.least + differences[n];
      const BucketCell cell = load_cell(times.bias.prepared.cells + difference_cell(difference));
      buckets[n] = cell.first + (difference >= cell.threshold ? 1 : 0);
      most = max(most, cell.count);
    }
    if (__any_sync(kAllLanes, mixed.exists && most > 1)) return false;
    float x[8];
    unpack(read_row(mixed, ds), x);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int addend = fixed.small_to_integer(x[n]);
      if (addend != 0) atomicAdd(bins + buckets[n], addend);
    }
    return true;
  }

  // Adds the blocks of some lanes to the TableSum, score by score: any times and any numbers.
  HSTU_DEVICE void add_exactly(const TableEntries& entries, const TimesOfTile& times,
                               uint32_t lanes, int m, const Element* ds) const {
#pragma unroll 1
    while (lanes) {
      const Mixed mixed = take(lanes, 0);
      if (!mixed.exists) continue;
      const int r = lane() % 8;
      const auto* const x = reinterpret_cast<const Element*>(
          Blocks::chunk_at(ds + r * 64, mixed.row, r, mixed.chunk));
      const int64_t row_time = times.time_of(m * kRows + mixed.row + r);
#pragma unroll 1
      for (int n = 0; n < 8; ++n) {
        const int64_t key_time = keys_.times[mixed.chunk * 8 + n];
        const int bucket = bucket_of(times.bias, time_difference(row_time, key_time));
        entries.sums.time.add(entries.first_time + bucket, static_cast<float>(x[n]));
      }
    }
  }

  int thread_;
  const KeyTimes<kKeys>& keys_;
  Memory& memory_;
  // All differences in [low_, high_) have the bucket of the tile found last.
  uint64_t low_ = 1;
  uint64_t high_ = 0;
  uint16_t weight_ = 0;
  int bucket_ = kNone;
  int previous_ = kNone;  // the bucket of the tile before
  int base_ = 0;
  float sums_[2] = {};  // of dS in buckets base_ and base_ + 1
};

}  // namespace hstu::sm90
