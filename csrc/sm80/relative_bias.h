// Tiles of the relative bias in the registers of the scores.
//
// A warp's part of a tile consists of blocks of 8 rows and 8 keys. Lane 4g + t has keys 2t and 2t +
// 1 of row g of each block (m, n): they are columns 2n and 2n + 1 of row m of the fragment. Lane 4n
// + m finds the buckets of block (m, n) from the ranges of the rows' and the keys' times, and
// passes them to the other lanes by shuffles.
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
  const float* position = nullptr;  // null: no weights by position
  const float* weights = nullptr;   // by time; null: none
  const BucketCell* cells = nullptr;
  const WeightCell* weight_cells = nullptr;
  const int64_t* key_times = nullptr;
  const int64_t* row_times = nullptr;
  int last_row_time = 0;  // last index of row_times, used for later rows, too
  const TimeRange* key_ranges = nullptr;
  const TimeRange* row_ranges = nullptr;
  int64_t position_entry = 0;  // the head's first entry in the tables
  int64_t time_entry = 0;

  HSTU_DEVICE RelativeMatrix(const RelativeBias& bias, const Sequence& sequence, int b, int head,
                             int heads) {
    const PreparedBias& prepared = bias.prepared;
    if (bias.position.data) {
      const int table_head = head / (heads / bias.position.heads);
      position = prepared.position + table_head * prepared.position_head_stride;
      position_entry = int64_t{table_head} * bias.position.size;
    }
    if (bias.time.data) {
      time_entry = int64_t{head / (heads / bias.time.heads)} * bias.time.size;
      weights = prepared.time + time_entry;
      cells = prepared.cells;
      weight_cells = prepared.weight_cells + time_entry / bias.time.size * kDifferenceCells;
      key_times = bias.timestamps + sequence.k_begin;
      // A row's time is that of the next event.
      row_times = bias.row_timestamps ? bias.row_timestamps + sequence.q_begin
                                      : key_times + sequence.offset + 1;
      last_row_time = bias.row_timestamps ? sequence.q_len - 1 : sequence.q_len - 2;
      key_ranges = prepared.ranges + first_tile(sequence.k_begin, b, 8);
      row_ranges = prepared.row_ranges + first_tile(sequence.q_begin, b, 8);
    }
  }
};

// The buckets and times of a lane's block.
struct TimeBlock {
  static constexpr int kHidden = -1;  // the mask hides the block
  static constexpr int kSeveral = -2;

  // The bucket of the earlier keys, and that of the later ones, which differ by 1 or less; or
  // kHidden, or kSeveral buckets.
  // NOTE: they are in one word, because registers are few.
  int buckets = 1;
  float weight = 0;  // weight of the earlier keys; 0 if the bucket is not known

  HSTU_DEVICE void set_buckets(int early, int late) { buckets = early * 4 + late - early + 1; }
  HSTU_DEVICE int bucket() const { return buckets >> 2; }
  HSTU_DEVICE int late_bucket() const { return bucket() + (buckets & 3) - 1; }
  HSTU_DEVICE bool has_two() const { return (buckets & 3) != 1; }
};

// A thread's fragment of the tile that begins with row r0 and key k0.
template <typename Tile>
class RelativeTile {
 public:
  HSTU_DEVICE RelativeTile(const RelativeBias& bias, const RelativeMatrix& matrix,
                           const Sequence& sequence, int r0, int k0)
      : bias_(bias), matrix_(matrix), sequence_(sequence), r0_(r0), k0_(k0) {}

  // Finds the buckets of the lane's block if `condition` is true.
  // NOTE: there are no branches, so that the instructions of what the kernel does next are issued
  // while loads are in flight.
  HSTU_DEVICE TimeBlock find_block(bool condition) const {
    condition &= matrix_.weights != nullptr;
    const TimeRange rows = load_range(condition, matrix_.row_ranges + own_row() / 8);
    const TimeRange keys = load_range(condition, matrix_.key_ranges + own_key() / 8);
    const uint64_t a = time_difference(rows.latest, keys.earliest);
    const uint64_t b = time_difference(rows.earliest, keys.latest);
    const bool is_past = keys.latest <= rows.earliest;
    const bool is_apart = is_past | (rows.latest <= keys.earliest);
    const uint64_t least = is_apart ? min(a, b) : 0;
    const uint64_t most = max(a, b);
    const BucketCell low = load_cell(condition, least);
    const BucketCell high = load_cell(condition, most);
    const int first = bucket_in(low, least);
    const int last = bucket_in(high, most);
    const bool is_known = (low.count <= 1) & (high.count <= 1);
    const bool has_two = (first + 1 == last) & is_apart & (most - least <= INT32_MAX);
    TimeBlock block;
    block.set_buckets(is_past ? last : first, is_past ? first : last);
    TimeBlock several;
    several.set_buckets(TimeBlock::kSeveral, TimeBlock::kSeveral);
    block.buckets = is_known & ((first == last) | has_two) ? block.buckets : several.buckets;
    uint32_t weight = 0;
    ptx::ld_if(condition && block.bucket() >= 0,
               reinterpret_cast<const uint32_t*>(matrix_.weights + block.bucket()), weight);
    block.weight = __uint_as_float(weight);
    return block;
  }

  // Marks a block that the mask hides as kHidden, with weight 0.
  HSTU_DEVICE void hide_block(const MaskParams& params, int head, TimeBlock& block) const {
    if (!matrix_.weights) return;
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
    if (is_visible) return;
    block.set_buckets(TimeBlock::kHidden, TimeBlock::kHidden);
    block.weight = 0;
  }

  // scores = bias, with zeros past the end of the sequence
  template <typename Sum>
  HSTU_DEVICE void copy_to(const TimeBlock& own, Sum& scores) const {
    const PositionPairs position = load_position();
    if (matrix_.weights) {
      copy_sums_to(own, position, scores);
    } else {
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n) {
          const float2 pair = position.of_block(m, n);
          scores.at(m, 2 * n) = pair.x;
          scores.at(m, 2 * n + 1) = pair.y;
        }
      }
    }
    const int rows = sequence_.q_len - r0_;
    const int keys = sequence_.k_len - k0_;
    if (rows >= Tile::kTileRows && keys >= Tile::kTileKeys) return;
    const Tile tile;
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
      const int keys_of_row = tile.first_row + Tile::row_offset(m) < rows ? keys : 0;
#pragma unroll
      for (int n = 0; n < Tile::kThreadColumns; ++n) {
        if (tile.first_key + Tile::key_offset(n) >= keys_of_row) scores.at(m, n) = 0;
      }
    }
  }

  // Prefetches what this reads for the tile that begins with row r0 and key k0 into the L1 cache.
  // Called by all threads of the block.
  HSTU_DEVICE void prefetch(int r0, int k0) const {
    const int warp = bounded_thread_idx() / 32;
    if (warp == 0 && matrix_.position) {
      // Lane 2n + c prefetches cache line n of copy c of the table.
      static_assert(kTileSpan <= 15 * 32, "a warp prefetches the entries of a tile");
      const int size = bias_.position.size;
      const int of_tile = size / 2 + k0 - (r0 + sequence_.offset);
      const int entry = of_tile - Tile::kTileRows + lane() / 2 * 32;
      const float* const copy = matrix_.position + lane() % 2 * bias_.prepared.position_copy_stride;
      if (lane() / 2 <= kTileSpan / 32) ptx::prefetch_l1(copy + min(max(entry, -8), size) + 8);
    } else if (warp == 1 && matrix_.weights) {
      prefetch_times(matrix_.key_times, k0, Tile::kTileKeys, sequence_.k_len - 1);
      prefetch_ranges(matrix_.key_ranges, k0, Tile::kTileKeys, sequence_.k_len - 1);
    } else if (warp == 2 && matrix_.weights) {
      prefetch_times(matrix_.row_times, r0, Tile::kTileRows, matrix_.last_row_time);
      prefetch_ranges(matrix_.row_ranges, r0, Tile::kTileRows, sequence_.q_len - 1);
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

  // The time differences of the thread's row of the tile and of its keys `key` and `key` + 1.
  struct TwoDifferences {
    uint64_t first;
    uint64_t second;
  };
  HSTU_DEVICE TwoDifferences differences_of(int row, int key) const {
    const int64_t row_time = __ldg(matrix_.row_times + min(r0_ + row, matrix_.last_row_time));
    const int last = sequence_.k_len - 1;
    return {time_difference(row_time, __ldg(matrix_.key_times + min(k0_ + key, last))),
            time_difference(row_time, __ldg(matrix_.key_times + min(k0_ + key + 1, last)))};
  }

  struct TwoBuckets {
    int first;
    int second;
  };
  HSTU_DEVICE TwoBuckets buckets_of(const TwoDifferences& differences) const {
    // NOTE: both cells are loaded before the first branch.
    const BucketCell low = load_cell(true, differences.first);
    const BucketCell high = load_cell(true, differences.second);
    TwoBuckets result = {bucket_in(low, differences.first), bucket_in(high, differences.second)};
    if (low.count > 1) result.first = bucket_of(bias_, differences.first);
    if (high.count > 1) result.second = bucket_of(bias_, differences.second);
    return result;
  }

  // The keys of the lane's block with two buckets are early if the low word of row time + origin -
  // key time is not negative: differences of times in the block span less than 2^31.
  HSTU_DEVICE uint32_t origin_of(const TimeBlock& own) const {
    if (!own.has_two()) return 0;
    const int first = min(own.bucket(), own.late_bucket());
    const uint32_t threshold = static_cast<uint32_t>(__ldg(bias_.thresholds + first));
    return own.late_bucket() == first ? -threshold : threshold - 1;
  }

  // The low words of the times of the thread's rows.
  struct RowTimes {
    uint32_t words[Tile::kThreadRows];
  };
  HSTU_DEVICE RowTimes load_row_times() const {
    const Tile tile;
    RowTimes times;
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) {
      const int row = r0_ + tile.first_row + Tile::row_offset(m);
      times.words[m] =
          static_cast<uint32_t>(__ldg(matrix_.row_times + min(row, matrix_.last_row_time)));
    }
    return times;
  }

  // The low words of the times of the thread's keys in column n of blocks.
  struct KeyTimes {
    uint32_t words[2];
  };
  HSTU_DEVICE KeyTimes load_key_times(int n) const {
    const Tile tile;
    const int64_t* const times = matrix_.key_times;
    const int key = k0_ + tile.first_key + Tile::key_offset(2 * n);
    const int last = sequence_.k_len - 1;
    return {static_cast<uint32_t>(__ldg(times + min(key, last))),
            static_cast<uint32_t>(__ldg(times + min(key + 1, last)))};
  }

  HSTU_DEVICE int64_t time_entry() const { return matrix_.time_entry; }

  static constexpr int kRowBlocks = Tile::kThreadRows;
  static constexpr int kKeyBlocks = Tile::kThreadColumns / 2;
  static_assert(kRowBlocks <= 4 && kKeyBlocks <= 8, "each lane finds a block's buckets");

  static HSTU_DEVICE int lane() { return bounded_thread_idx() % 32; }

  // The blocks whose lanes' condition is true: bit 4n + m is block (m, n).
  static HSTU_DEVICE uint32_t blocks_where(bool condition) {
    const bool has_own = lane() / 4 < kKeyBlocks && lane() % 4 < kRowBlocks;
    return __ballot_sync(kAllLanes, has_own && condition);
  }
  // A value of the lane that has found block (m, n).
  template <typename T>
  static HSTU_DEVICE T of_block(T value, int m, int n) {
    return __shfl_sync(kAllLanes, value, 4 * n + m);
  }

 private:
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

  static HSTU_DEVICE TimeRange load_range(bool condition, const TimeRange* range) {
    uint32_t words[4] = {};
    ptx::ld_if(condition, reinterpret_cast<const uint32_t*>(range), words[0], words[1], words[2],
               words[3]);
    return {static_cast<int64_t>(join(words[0], words[1])),
            static_cast<int64_t>(join(words[2], words[3]))};
  }
  static HSTU_DEVICE uint64_t join(uint32_t low, uint32_t high) {
    return low | static_cast<uint64_t>(high) << 32;
  }

  // Prefetches times [first, first + count). Each lane prefetches a cache line of 16 times.
  static HSTU_DEVICE void prefetch_times(const int64_t* times, int first, int count, int last) {
    if (lane() <= count / 16) ptx::prefetch_l1(times + min(first + lane() * 16, last));
  }
  // Prefetches the ranges of these times. Each lane prefetches a cache line of 8 ranges.
  static HSTU_DEVICE void prefetch_ranges(const TimeRange* ranges, int first, int count, int last) {
    if (lane() <= count / 64) ptx::prefetch_l1(ranges + min(first / 8 + lane() * 8, last / 8));
  }

  // The weights by position of the thread's scores. The distances of blocks are multiples of 8, and
  // many blocks have the same one.
  static constexpr int kTileSpan = Tile::kTileRows + Tile::kTileKeys;
  static HSTU_DEVICE int block_distance(int m, int n) {
    return Tile::key_offset(2 * n) - Tile::row_offset(m);
  }
  struct PositionPairs {
    float2 pairs[kTileSpan / 8];  // from block (kRowBlocks - 1, 0) on; some belong to no block

    HSTU_DEVICE float2 of_block(int m, int n) const {
      return pairs[(block_distance(m, n) - block_distance(kRowBlocks - 1, 0)) / 8];
    }
  };
  HSTU_DEVICE PositionPairs load_position() const {
    PositionPairs result;
    auto& pairs = result.pairs;
    if (!matrix_.position) {
#pragma unroll
      for (float2& pair : pairs) pair = {0, 0};
      return result;
    }
    const Tile tile;
    const int size = bias_.position.size;
    // The entries of the table for the tile's and for the thread's first row and key, and for the
    // first pair.
    const int of_tile = size / 2 + k0_ - (r0_ + sequence_.offset);
    const int of_thread = of_tile + tile.first_key - tile.first_row;
    const int first = of_thread + block_distance(kRowBlocks - 1, 0);
    if (of_tile >= Tile::kTileRows && of_tile + Tile::kTileKeys <= size) {
      // All pairs are in the same copy of the table.
      const float2* const from = position_entries(first);
#pragma unroll
      for (int n = 0; n < kTileSpan / 8; ++n) pairs[n] = __ldg(from + 4 * n);
    } else {
#pragma unroll
      for (int n = 0; n < kTileSpan / 8; ++n) {
        pairs[n] = __ldg(position_entries(min(max(first + 8 * n, -8), size)));
      }
    }
    return result;
  }

  // Returns the position table from an entry on. The prepared table has 8 more entries before its
  // first and after its last one.
  // NOTE: copy n of the table begins with its entry n, so that any two entries are aligned to 8
  // bytes in one copy.
  HSTU_DEVICE const float2* position_entries(int entry) const {
    const int place = entry + 8;
    const int copy = place & 1;
    return reinterpret_cast<const float2*>(
        matrix_.position + copy * bias_.prepared.position_copy_stride + (place - copy));
  }

  HSTU_DEVICE BucketCell load_cell(bool condition, uint64_t difference) const {
    uint32_t words[4] = {};
    ptx::ld_if(condition,
               reinterpret_cast<const uint32_t*>(matrix_.cells + difference_cell(difference)),
               words[0], words[1], words[2], words[3]);
    return {join(words[0], words[1]), static_cast<int>(words[2]), static_cast<int>(words[3])};
  }
  // The bucket, if the cell has at most one threshold.
  static HSTU_DEVICE int bucket_in(const BucketCell& cell, uint64_t difference) {
    return cell.first + (cell.count > 0 && difference >= cell.threshold);
  }

  template <typename Sum>
  HSTU_DEVICE void copy_sums_to(const TimeBlock& own, const PositionPairs& position,
                                Sum& scores) const {
    const uint32_t split = blocks_where(own.has_two());
    RowTimes rows = {};
    uint32_t origin = 0;
    float late_weight = 0;
    if (split) {
      rows = load_row_times();
      origin = origin_of(own);
      late_weight = own.has_two() ? __ldg(matrix_.weights + own.late_bucket()) : own.weight;
    }
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) {
      if (split >> 4 * n & 0xf) {
        const KeyTimes keys = load_key_times(n);
#pragma unroll
        for (int m = 0; m < kRowBlocks; ++m) {
          const uint32_t row = rows.words[m] + of_block(origin, m, n);
          const float early = of_block(own.weight, m, n);
          const float late = of_block(late_weight, m, n);
          const float2 pair = position.of_block(m, n);
          float first = pair.x + (static_cast<int>(row - keys.words[0]) >= 0 ? early : late);
          float second = pair.y + (static_cast<int>(row - keys.words[1]) >= 0 ? early : late);
          // NOTE: otherwise, the compiler moves the additions behind the branch and the weights of
          // blocks with one bucket to two registers.
          make_opaque(first, second);
          scores.at(m, 2 * n) = first;
          scores.at(m, 2 * n + 1) = second;
        }
      } else {
#pragma unroll
        for (int m = 0; m < kRowBlocks; ++m) {
          const float weight = of_block(own.weight, m, n);
          const float2 pair = position.of_block(m, n);
          scores.at(m, 2 * n) = pair.x + weight;
          scores.at(m, 2 * n + 1) = pair.y + weight;
        }
      }
    }
    const uint32_t several = blocks_where(own.bucket() == TimeBlock::kSeveral);
    for_each_block(several, [&](int index, int row, int key) {
      const TwoDifferences differences = differences_of(row, key);
      // NOTE: both cells are loaded before the first branch.
      const WeightCell low = load_weight_cell(differences.first);
      const WeightCell high = load_weight_cell(differences.second);
      float first = differences.first >= low.threshold ? low.high : low.low;
      float second = differences.second >= high.threshold ? high.high : high.low;
      if (low.threshold == WeightCell::kSeveral) first = weight_of(differences.first);
      if (high.threshold == WeightCell::kSeveral) second = weight_of(differences.second);
      add_to_block<0, kRowBlocks * kKeyBlocks>(index / 4 * kRowBlocks + index % 4, first, second,
                                               scores);
    });
  }

  HSTU_DEVICE WeightCell load_weight_cell(uint64_t difference) const {
    const int4 words =
        __ldg(reinterpret_cast<const int4*>(matrix_.weight_cells + difference_cell(difference)));
    return {join(words.x, words.y), __int_as_float(words.z), __int_as_float(words.w)};
  }
  HSTU_DEVICE float weight_of(uint64_t difference) const {
    return __ldg(matrix_.weights + bucket_of(bias_, difference));
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
