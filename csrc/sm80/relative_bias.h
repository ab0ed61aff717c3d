// Tiles of the relative bias in the registers of the scores.
//
// A warp's part of a tile consists of blocks of 8 rows and 8 keys. Lane 4g + t has keys 2t and 2t +
// 1 of row g of each block (m, n): they are columns 2n and 2n + 1 of row m of the fragment. Lane 4n
// + m finds the buckets of block (m, n) from the ranges of the rows' and the keys' times, and
// passes them to the other lanes by shuffles.
//
// The accumulators of S are initialized with the weights by position, plus the weights by time of
// blocks that have several buckets. After the product, blocks that have one bucket get its weight.
#pragma once

#include "../bias/relative_bias.h"
#include "../common/opaque.h"
#include "../common/relative_bias.h"
#include "scores.h"

namespace hstu::sm80 {

constexpr uint32_t kAllLanes = 0xffffffff;

// Returns to all lanes the sum of x over the warp, added in a fixed order.
HSTU_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kAllLanes, x, lanes);
  return x;
}

// The relative bias of one sequence and head.
// NOTE: kernels keep it in shared memory, to leave the registers to the accumulators.
struct RelativeMatrix {
  const float4* position = nullptr;
  int positions = 0;               // entries of the table
  const float* weights = nullptr;  // by time; null: none
  const NarrowCell* cells = nullptr;
  const int64_t* key_times = nullptr;
  const int64_t* row_times = nullptr;
  int last_row_time = 0;  // last index of row_times, used for later rows, too
  const KeyBlockTimes* key_blocks = nullptr;
  const KeyBlockTimes* row_blocks = nullptr;
  int64_t position_entry = 0;  // the head's first entry in the tables
  int64_t time_entry = 0;

  HSTU_DEVICE RelativeMatrix(const RelativeBias& bias, const Sequence& sequence, int b, int head,
                             int heads) {
    const PreparedBias& prepared = bias.prepared;
    // NOTE: without weights by position, the prepared table has a zero.
    const int position_head = bias.position.data ? head / (heads / bias.position.heads) : 0;
    position = reinterpret_cast<const float4*>(prepared.position +
                                               position_head * prepared.position_head_stride);
    positions = bias.position.data ? bias.position.size : 1;
    position_entry = int64_t{position_head} * positions;
    if (bias.time.data) {
      const int table_head = head / (heads / bias.time.heads);
      time_entry = int64_t{table_head} * bias.time.size;
      weights = prepared.time + time_entry;
      cells = prepared.narrow_cells + table_head * kNarrowCells;
      key_times = bias.timestamps + sequence.k_begin;
      // A row's time is the time of the next event.
      row_times = bias.row_timestamps ? bias.row_timestamps + sequence.q_begin
                                      : key_times + sequence.offset + 1;
      last_row_time = bias.row_timestamps ? sequence.q_len - 1 : sequence.q_len - 2;
      key_blocks = prepared.time_blocks + first_tile(sequence.k_begin, b, 8);
      row_blocks = prepared.row_blocks + first_tile(sequence.q_begin, b, 8);
    }
  }
};

// The buckets of a lane's block.
struct TimeBlock {
  static constexpr int kHidden = -1;   // the mask hides the block
  static constexpr int kSeveral = -2;  // more than two, or not known
  static constexpr int kWide = -3;     // several, and differences of times need more than 31 bits

  // Twice bucket(), plus 1 if the block has two buckets.
  // NOTE: this is one word, because registers are few.
  int word = 2 * kHidden;
  float weight = 0;  // of a block with one bucket; 0 for others

  // The lower bucket, or kHidden, kSeveral or kWide.
  HSTU_DEVICE int bucket() const { return word >> 1; }
  HSTU_DEVICE bool has_two() const { return (word & 1) != 0; }
  HSTU_DEVICE int last_bucket() const { return bucket() + (word & 1); }
  HSTU_DEVICE bool has_several() const { return bucket() <= kSeveral; }
};

// A thread's fragment of the tile that begins with row r0 and key k0.
template <typename Tile>
class RelativeTile {
 public:
  HSTU_DEVICE RelativeTile(const RelativeBias& bias, const RelativeMatrix& matrix,
                           const Sequence& sequence, int r0, int k0)
      : bias_(bias), matrix_(matrix), sequence_(sequence), r0_(r0), k0_(k0) {}

  // Returns the kind of the tile that begins with row r0 and key k0. Rows and keys past the end of
  // the sequence have weights, too, so that the mask has to hide them.
  static HSTU_DEVICE TileKind kind_with_bias(TileKind kind, const Sequence& sequence, int r0,
                                             int k0) {
    const bool is_at_end =
        sequence.q_len - r0 < Tile::kTileRows || sequence.k_len - k0 < Tile::kTileKeys;
    return kind == TileKind::kFull && is_at_end ? TileKind::kPartial : kind;
  }

  // Sets the scores to the weights by position, and adds the weights by time of blocks with several
  // buckets. Returns the buckets of the lane's block. `is_partial`: the mask hides scores of the
  // tile.
  template <typename Sum>
  HSTU_DEVICE TimeBlock start(const MaskParams& mask, int head, bool is_partial,
                              Sum& scores) const {
    TimeBlock block;
    if (!matrix_.weights) {
      copy_position_to(scores);
      return block;
    }
    const TimeRange rows = load_cell(&row_block(own_row())->range);
    const TimeRange keys = load_cell(&key_block(own_key())->range);
    copy_position_to(scores);
    block = find_block(rows, keys);
    if (is_partial) hide_block(mask, head, block);
    if (blocks_where(block.has_two() || block.has_several()) != 0) add_mixed_blocks(block, scores);
    return block;
  }

  // scores = half_alpha * (scores + weights by time of blocks with one bucket)
  // NOTE: there are no branches, so that the compiler mixes this with the product before it.
  template <typename Sum>
  HSTU_DEVICE void scale(float half_alpha, const TimeBlock& own, Sum& scores) const {
    const float weight = half_alpha * own.weight;
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        const float addend = of_block(weight, m, n);
        scores.at(m, 2 * n) = fmaf(half_alpha, scores.at(m, 2 * n), addend);
        scores.at(m, 2 * n + 1) = fmaf(half_alpha, scores.at(m, 2 * n + 1), addend);
      }
    }
  }

  // Prefetches the table entries and times of the tile that begins with row r0 and key k0 into the
  // L1 cache. Called by all threads of the block.
  HSTU_DEVICE void prefetch(int r0, int k0) const {
    const int thread = bounded_thread_idx();
    constexpr int kLines = ceil_div(Tile::kTileRows + Tile::kTileKeys, 8) + 1;  // of 8 entries
    static_assert(kLines <= 64 && Tile::kTileRows <= 128 && Tile::kTileKeys <= 128);
    if (thread < kLines) {
      const int of_tile = matrix_.positions / 2 + k0 - (r0 + sequence_.offset);
      const int entry = of_tile - Tile::kTileRows + thread * 8;
      ptx::prefetch_l1(matrix_.position + min(max(entry, -1), matrix_.positions + 7) +
                       bias_.prepared.position_margin);
    } else if (thread >= 64 && thread < 96 && matrix_.weights) {
      const int block = thread % 16 * 8;
      const bool is_row = thread % 32 >= 16;
      if (block < (is_row ? Tile::kTileRows : Tile::kTileKeys)) {
        ptx::prefetch_l1(is_row ? row_block(r0 + block) : key_block(k0 + block));
      }
    }
  }

  // Calls visit(index, row, key) for each block of `set`, where `index` is its bit; `row` is the
  // thread's row of the tile, and `key` the first of its two keys.
  template <typename Visit>
  HSTU_DEVICE void for_each_block(uint32_t set, Visit visit) const {
    const Tile tile;
#pragma unroll 1
    for (; set != 0; set &= set - 1) {
      const int index = __ffs(set) - 1;
      __builtin_assume(index >= 0 && index < 32);
      visit(index, tile.first_row + Tile::row_offset(index % 4),
            tile.first_key + Tile::key_offset(index / 4 * 2));
    }
  }

  // The low word of the time of a row of the tile, and the low words of the times of two keys. Past
  // the end of the sequence, these are times of other rows or keys.
  HSTU_DEVICE uint32_t load_row_time(int row) const {
    return __ldg(&row_block(r0_ + row)->times[row % 8]);
  }
  HSTU_DEVICE uint2 load_key_times(int key) const {
    return __ldg(reinterpret_cast<const uint2*>(&key_block(k0_ + key)->times[key % 8]));
  }
  // The difference of two times, if it needs no more than 31 bits.
  static HSTU_DEVICE uint32_t difference_of(uint32_t row_time, uint32_t key_time) {
    return static_cast<uint32_t>(abs(static_cast<int>(row_time - key_time)));
  }

  // Differences of times from here on are in the second bucket of the lane's block, if it has two.
  HSTU_DEVICE uint32_t load_threshold(const TimeBlock& own) const {
    return own.has_two() ? static_cast<uint32_t>(__ldg(bias_.thresholds + own.bucket())) : 0;
  }

  struct TwoBuckets {
    int first;
    int second;
  };
  // The buckets of the thread's two scores in a block.
  HSTU_DEVICE TwoBuckets buckets_of(int row, int key, bool is_wide) const {
    if (is_wide) return wide_buckets_of(row, key);
    const TwoCells found = load_cells(row, key);
    return {bucket_in(found.cells[0], found.differences[0]),
            bucket_in(found.cells[1], found.differences[1])};
  }

  HSTU_DEVICE int64_t time_entry() const { return matrix_.time_entry; }

  static constexpr int kRowBlocks = Tile::kThreadRows;
  static constexpr int kKeyBlocks = Tile::kThreadColumns / 2;
  static_assert(kRowBlocks <= 4 && kKeyBlocks <= 8, "each lane finds a block's buckets");

  static HSTU_DEVICE int lane() { return bounded_thread_idx() % 32; }

  static HSTU_DEVICE bool has_own_block() {
    return lane() / 4 < kKeyBlocks && lane() % 4 < kRowBlocks;
  }
  // The blocks whose lanes' condition is true: bit 4n + m is block (m, n).
  static HSTU_DEVICE uint32_t blocks_where(bool condition) {
    return __ballot_sync(kAllLanes, has_own_block() && condition);
  }
  // A value of the lane that has found block (m, n), or the block with this index.
  template <typename T>
  static HSTU_DEVICE T of_block(T value, int m, int n) {
    return of_block(value, 4 * n + m);
  }
  template <typename T>
  static HSTU_DEVICE T of_block(T value, int index) {
    return __shfl_sync(kAllLanes, value, index);
  }

 private:
  // scores = weights by position
  template <typename Sum>
  HSTU_DEVICE void copy_position_to(Sum& scores) const {
    const Tile tile;
    const int size = matrix_.positions;
    // The entries of the table for the tile's and for the thread's first row and key.
    const int of_tile = size / 2 + k0_ - (r0_ + sequence_.offset);
    const int of_thread = of_tile + tile.first_key - tile.first_row;
    const float4* const from = matrix_.position + bias_.prepared.position_margin;
    if (of_tile >= Tile::kTileRows && of_tile + Tile::kTileKeys <= size) {
      for_each_position(scores, [&](int distance) { return __ldg(from + of_thread + distance); });
    } else {
      for_each_position(scores, [&](int distance) {
        return __ldg(from + min(max(of_thread + distance, -1), size + 7));
      });
    }
  }

  // Finds the buckets of the lane's block.
  HSTU_DEVICE TimeBlock find_block(const TimeRange& rows, const TimeRange& keys) const {
    TimeBlock block;
    const NarrowDifferences differences(rows, keys);
    const NarrowCell first = load_cell(matrix_.cells + difference_cell(differences.least));
    const NarrowCell last = load_cell(matrix_.cells + difference_cell(differences.most));
    const bool is_second = differences.least >= first.threshold;
    const uint32_t lowest = first.bucket + is_second;
    const uint32_t highest = last.bucket + (differences.most >= last.threshold);
    const bool is_known = ((first.bucket | last.bucket) & NarrowCell::kSeveral) == 0;
    block.word = is_known && highest - lowest <= 1 ? static_cast<int>(lowest + highest)
                                                   : 2 * TimeBlock::kSeveral;
    block.weight = is_second ? first.high : first.low;
    if (differences.is_wide) {
      const BucketRange range = find_bucket_range(bias_, rows, keys);
      block.word = 2 * (range.first == range.last ? range.first : TimeBlock::kWide);
      block.weight = __ldg(matrix_.weights + range.first);
    }
    if (block.has_two() || block.has_several()) block.weight = 0;
    return block;
  }

  // Marks a block that the mask hides as kHidden, with weight 0.
  HSTU_DEVICE void hide_block(const MaskParams& params, int head, TimeBlock& block) const {
    const Mask mask(params, sequence_, head);
    if (mask.arbitrary()) return;
    const int row = own_row();
    const int key = own_key();
    const KeyIntervals visible = mask.kv_intervals(row, min(row + 8, sequence_.q_len));
    bool is_visible = false;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      is_visible |= visible.interval[n].begin < key + 8 && key < visible.interval[n].end;
    }
    if (!is_visible) block = {};
  }

  // The first row and the first key of the lane's block.
  // NOTE: lanes without a block of their own repeat another lane's.
  HSTU_DEVICE int own_row() const {
    const int first = Tile().first_row - lane() / 4;
    return min(r0_ + first + Tile::row_offset(lane() % 4 % kRowBlocks), sequence_.q_len - 1);
  }
  HSTU_DEVICE int own_key() const {
    const int first = Tile().first_key - lane() % 4 * 2;
    return min(k0_ + first + Tile::key_offset(lane() / 4 % kKeyBlocks * 2), sequence_.k_len - 1);
  }

  // The block of 8 rows or keys that contains this one, or the last block of the sequence.
  HSTU_DEVICE const KeyBlockTimes* row_block(int row) const {
    return matrix_.row_blocks + min(row, sequence_.q_len - 1) / 8;
  }
  HSTU_DEVICE const KeyBlockTimes* key_block(int key) const {
    return matrix_.key_blocks + min(key, sequence_.k_len - 1) / 8;
  }

  // Calls entries_at(distance) for each block of 16 rows by 8 keys. `distance` is the distance of
  // the thread's first row and key in the block, less that of its first row and key in the tile.
  template <typename Sum, typename EntriesAt>
  static HSTU_DEVICE void for_each_position(Sum& scores, EntriesAt entries_at) {
#pragma unroll
    for (int n = 0; n < Sum::kColumnBlocks; ++n) {
#pragma unroll
      for (int m = 0; m < Sum::kRowBlocks; ++m) {
        const float4 entries = entries_at(Tile::key_offset(2 * n) - Tile::row_offset(2 * m));
        float* const block = scores.block(m, n);
        block[0] = entries.x;
        block[1] = entries.y;
        block[2] = entries.z;
        block[3] = entries.w;
      }
    }
  }

  // The differences of times of the thread's two scores in a block, and their cells.
  struct TwoCells {
    uint32_t differences[2];
    NarrowCell cells[2];
  };
  HSTU_DEVICE TwoCells load_cells(int row, int key) const {
    const uint32_t row_time = load_row_time(row);
    const uint2 key_times = load_key_times(key);
    TwoCells result = {{difference_of(row_time, key_times.x), difference_of(row_time, key_times.y)},
                       {}};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      result.cells[n] = load_cell(matrix_.cells + difference_cell(result.differences[n]));
    }
    return result;
  }
  HSTU_DEVICE int bucket_in(const NarrowCell& cell, uint32_t difference) const {
    if (cell.bucket == NarrowCell::kSeveral) return bucket_of(bias_, difference);
    return static_cast<int>(cell.bucket + (difference >= cell.threshold));
  }
  HSTU_DEVICE float weight_in(const NarrowCell& cell, uint32_t difference) const {
    if (cell.bucket == NarrowCell::kSeveral) {
      return __ldg(matrix_.weights + bucket_of(bias_, difference));
    }
    return difference >= cell.threshold ? cell.high : cell.low;
  }
  HSTU_DEVICE TwoBuckets wide_buckets_of(int row, int key) const {
    const int64_t row_time = __ldg(matrix_.row_times + min(r0_ + row, matrix_.last_row_time));
    const int last = sequence_.k_len - 1;
    const int64_t first = __ldg(matrix_.key_times + min(k0_ + key, last));
    const int64_t second = __ldg(matrix_.key_times + min(k0_ + key + 1, last));
    return {bucket_of(bias_, time_difference(row_time, first)),
            bucket_of(bias_, time_difference(row_time, second))};
  }

  // Adds the weights of blocks with two or more buckets.
  template <typename Sum>
  HSTU_DEVICE void add_mixed_blocks(const TimeBlock& own, Sum& scores) const {
    const uint32_t split = blocks_where(own.has_two());
    if (split) add_split_blocks(split, own, scores);
    const uint32_t several = blocks_where(own.has_several());
    const uint32_t wide = blocks_where(own.bucket() == TimeBlock::kWide);
    for_each_block(several, [&](int index, int row, int key) {
      float first, second;
      if (wide >> index & 1) {
        const TwoBuckets buckets = wide_buckets_of(row, key);
        first = __ldg(matrix_.weights + buckets.first);
        second = __ldg(matrix_.weights + buckets.second);
      } else {
        const TwoCells found = load_cells(row, key);
        first = weight_in(found.cells[0], found.differences[0]);
        second = weight_in(found.cells[1], found.differences[1]);
      }
      add_to_block<0, kRowBlocks * kKeyBlocks>(index / 4 * kRowBlocks + index % 4, first, second,
                                               scores);
    });
  }

  // Adds the weights of the blocks with two buckets.
  template <typename Sum>
  HSTU_DEVICE void add_split_blocks(uint32_t split, const TimeBlock& own, Sum& scores) const {
    const Tile tile;
    const uint32_t threshold = load_threshold(own);
    const float low = own.has_two() ? __ldg(matrix_.weights + own.bucket()) : 0;
    const float high = own.has_two() ? __ldg(matrix_.weights + own.last_bucket()) : 0;
    uint32_t row_times[kRowBlocks];
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
      row_times[m] = load_row_time(tile.first_row + Tile::row_offset(m));
    }
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
      if ((split >> 4 * n & 0xf) == 0) continue;
      const uint2 key_times = load_key_times(tile.first_key + Tile::key_offset(2 * n));
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        if ((split >> (4 * n + m) & 1) == 0) continue;
        const uint32_t limit = of_block(threshold, m, n);
        const float below = of_block(low, m, n);
        const float above = of_block(high, m, n);
        scores.at(m, 2 * n) += difference_of(row_times[m], key_times.x) >= limit ? above : below;
        scores.at(m, 2 * n + 1) +=
            difference_of(row_times[m], key_times.y) >= limit ? above : below;
      }
    }
  }

  // Adds to the scores of block `block` of [kFirst, kFirst + kCount), where block (m, n) is
  // n kRowBlocks + m.
  // NOTE: it is a tree of branches, because registers have no addresses.
  template <int kFirst, int kCount, typename Sum>
  static HSTU_DEVICE void add_to_block(int block, float first, float second, Sum& scores) {
    if constexpr (kCount == 1) {
      scores.at(kFirst % kRowBlocks, kFirst / kRowBlocks * 2) += first;
      scores.at(kFirst % kRowBlocks, kFirst / kRowBlocks * 2 + 1) += second;
    } else if (block < kFirst + kCount / 2) {
      add_to_block<kFirst, kCount / 2>(block, first, second, scores);
    } else {
      add_to_block<kFirst + kCount / 2, kCount / 2>(block, first, second, scores);
    }
  }

  const RelativeBias& bias_;
  const RelativeMatrix& matrix_;
  const Sequence& sequence_;
  const int r0_;
  const int k0_;
};

}  // namespace hstu::sm80
