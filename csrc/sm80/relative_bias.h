// Tiles of the relative bias in the registers of the scores, and the sums of dS that become the
// gradients of its tables.
//
// A warp's part of a tile consists of blocks of 8 rows and Order::kRun neighboring keys: lane 4g +
// t has row g of block (n, t), for each n below kBlocks. Lane 4n + t finds the buckets of block (n,
// t) from the ranges of the rows' and the keys' times. Most blocks have one bucket. In the others,
// each score's is searched for among the block's.
#pragma once

#include "../common/relative_bias.h"
#include "../scheduler/relative_bias.h"
#include "scores.h"

namespace hstu::sm80 {

constexpr uint32_t kAllLanes = 0xffffffff;

// The same value in all lanes: the sum of theirs, in a fixed order.
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
      key_ranges = prepared.ranges + first_tile(sequence.k_begin, b, 8);
      row_ranges = prepared.row_ranges + first_tile(sequence.q_begin, b, 8);
    }
  }
};

// A thread's fragment of the tile that begins with row r0 and key k0.
template <typename Tile>
class RelativeTile {
 public:
  HSTU_DEVICE RelativeTile(const RelativeBias& bias, const RelativeMatrix& matrix,
                           const Sequence& sequence, int r0, int k0)
      : bias_(bias), matrix_(matrix), sequence_(sequence), r0_(r0), k0_(k0) {}

  // scores = bias, with zeros past the end of the sequence
  template <typename Sum>
  HSTU_DEVICE void copy_to(Sum& scores) {
    if (matrix_.position) copy_position_to(scores);
    if (matrix_.weights) add_time_to(scores);
    const int rows = sequence_.q_len - r0_;
    const int keys = sequence_.k_len - k0_;
    if (rows >= Tile::kTileRows && keys >= Tile::kTileKeys) return;
    const Tile tile;
#pragma unroll
    for (int m = 0; m < Tile::kThreadRows; ++m) {
      const int keys_of_row = tile.first_row + Tile::row_offset(m) < rows ? keys : 0;
#pragma unroll
      for (int n = 0; n < Tile::kThreadColumns; ++n) {
        if (tile.first_key + Tile::key_offset(n) >= keys_of_row) scores.at(m, n) = 0;
      }
    }
  }

  // Prefetches what copy_to() reads for the tile that begins with row r0 and key k0 into the L1
  // cache. Called by all threads of the block.
  HSTU_DEVICE void prefetch(int r0, int k0) const {
    const int rows = min(Tile::kTileRows, sequence_.q_len - r0);
    const int keys = min(Tile::kTileKeys, sequence_.k_len - k0);
    const int warp = bounded_thread_idx() / 32;
    if (warp == 0 && matrix_.position) {
      const int size = bias_.position.size;
      const int of_tile = size / 2 + k0 - (r0 + sequence_.offset);
      const int begin = min(max(of_tile - Tile::kTileRows, -8), size) + 8;
      const int end = min(max(of_tile + Tile::kTileKeys, -8), size) + 8;
      const float* const copy = matrix_.position + lane() % 4 * bias_.prepared.position_copy_stride;
      for (int n = begin + lane() / 4 * 32; n < end + 32; n += 8 * 32) {
        ptx::prefetch_l1(copy + min(n, end));
      }
    } else if (warp == 1 && matrix_.weights) {
      prefetch_times(bias_.timestamps + sequence_.k_begin + k0, keys, lane());
      prefetch_times(&matrix_.key_ranges[k0 / 8].earliest, ceil_div(keys, 8) * 2, lane() - 16);
    } else if (warp == 2 && matrix_.weights) {
      const int64_t* const times = bias_.row_timestamps
                                       ? bias_.row_timestamps + sequence_.q_begin
                                       : bias_.timestamps + sequence_.k_begin + sequence_.offset;
      prefetch_times(times + r0, rows, lane());
      prefetch_times(&matrix_.row_ranges[r0 / 8].earliest, ceil_div(rows, 8) * 2, lane() - 16);
    }
  }

  // Adds dS to the sums of the time table's entries. It finds the buckets again, because the scores
  // in between leave no registers to keep them.
  template <typename Sum>
  HSTU_DEVICE void add_to_time_sums(const Sum& gradients, const TableSum& sums) {
    find_block();
    add_blocks_of_one_bucket(gradients, sums);
    for_each_mixed_block(
        [&](int index, const Block& block, bool is_mixed, const int (&buckets)[kRun]) {
          float x[kRun] = {};
#pragma unroll
          for (int n = 0; n < kBlocks; ++n) {
            if (n == index && is_mixed) {
#pragma unroll
              for (int c = 0; c < kRun; ++c) x[c] = at(gradients, n * kRun + c);
            }
          }
          const int others = block.range.last - block.range.first;
          if (__any_sync(kAllLanes, is_mixed && others > kFewOthers)) {
            add_block_of_any_buckets(x, buckets, sums);
          } else {
            add_block_of_few_buckets(x, is_mixed ? others : -1, block.range.first, buckets, sums);
          }
        });
  }

 private:
  static constexpr int kRun = Tile::kRun;
  static constexpr int kRuns = Tile::kThreadColumns / kRun;  // of a row of the fragment
  static constexpr int kBlocks = Tile::kThreadRows * kRuns;  // for each t
  static constexpr int kFewOthers = 5;  // buckets of a block that are looked for one by one
  static_assert(kBlocks == 2 || kBlocks == 4 || kBlocks == 8, "each lane finds a block's buckets");

  // Element n of the fragment, whose runs are in the order of blocks.
  template <typename Sum>
  static HSTU_DEVICE float& at(Sum& sum, int n) {
    return sum.at(n / kRun / kRuns, n / kRun % kRuns * kRun + n % kRun);
  }
  template <typename Sum>
  static HSTU_DEVICE float at(const Sum& sum, int n) {
    return sum.at(n / kRun / kRuns, n / kRun % kRuns * kRun + n % kRun);
  }
  // The offsets of block n from the thread's first row and key.
  static HSTU_DEVICE int block_row(int n) { return Tile::row_offset(n / kRuns); }
  static HSTU_DEVICE int block_key(int n) { return Tile::key_offset(n % kRuns * kRun); }

  static HSTU_DEVICE int lane() { return bounded_thread_idx() % 32; }

  template <typename Sum>
  HSTU_DEVICE void copy_position_to(Sum& scores) const {
    const Tile tile;
    const int size = bias_.position.size;
    // The entries of the table for the tile's and for the thread's first row and key.
    const int of_tile = size / 2 + k0_ - (r0_ + sequence_.offset);
    const int first = of_tile + tile.first_key - tile.first_row;
    if (of_tile >= Tile::kTileRows && of_tile + Tile::kTileKeys <= size) {
      // Blocks are multiples of 8 entries apart, so that all are in the same copy of the table.
      const float4* const from = position_entries(first);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        copy_run(from + (block_key(block) - block_row(block)) / 4, block, scores);
      }
    } else {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int entry = first + block_key(block) - block_row(block);
        copy_run(position_entries(min(max(entry, -8), size)), block, scores);
      }
    }
  }

  // The position table from an entry on, of which 8 come before the first and after the last.
  // NOTE: copy n of the table begins with its entry n, so that any entry is aligned to 16 bytes in
  // one copy.
  HSTU_DEVICE const float4* position_entries(int entry) const {
    const int place = entry + 8;
    const int copy = place & 3;
    return reinterpret_cast<const float4*>(
        matrix_.position + copy * bias_.prepared.position_copy_stride + (place - copy));
  }

  template <typename Sum>
  static HSTU_DEVICE void copy_run(const float4* from, int block, Sum& scores) {
#pragma unroll
    for (int n = 0; n < kRun; n += 4) {
      const float4 weights = __ldg(from + n / 4);
      at(scores, block * kRun + n) = weights.x;
      at(scores, block * kRun + n + 1) = weights.y;
      at(scores, block * kRun + n + 2) = weights.z;
      at(scores, block * kRun + n + 3) = weights.w;
    }
  }

  static HSTU_DEVICE TimeRange load_range(const TimeRange* range) {
    const longlong2 words = __ldg(reinterpret_cast<const longlong2*>(range));
    return {words.x, words.y};
  }

  // Prefetches `count` times, a line of 16 by each lane from 0 on.
  static HSTU_DEVICE void prefetch_times(const int64_t* times, int count, int lane) {
    if (lane >= 0 && lane * 16 < count + 15) ptx::prefetch_l1(times + min(lane * 16, count - 1));
  }

  // The buckets of a block. The differences of its times, less the least of them, mostly fit into
  // 31 bits: then they are the absolute values of row time + origin - key time, of which the low
  // words are enough.
  struct Block {
    BucketRange range;
    uint32_t origin;
    bool is_past;    // all keys are earlier than all rows, so that `origin` is -least; else, least
    bool is_narrow;  // the differences fit, and there are few buckets
  };

  // Finds the buckets of the lane's block.
  HSTU_DEVICE void find_block() {
    constexpr int kFewBuckets = 16;  // compared one after another
    const Tile tile;
    const int own = lane() / 4 % kBlocks;
    const int row = r0_ + tile.first_row - lane() / 4 + block_row(own);
    const int key = k0_ + tile.first_key + block_key(own);
    const TimeRange rows = load_range(matrix_.row_ranges + min(row, sequence_.q_len - 1) / 8);
    const TimeRange keys = load_range(matrix_.key_ranges + min(key, sequence_.k_len - 1) / 8);
    const DifferenceRange differences = find_difference_range(rows, keys);
    block_.range = find_bucket_range(bias_, differences);
    block_.is_past = keys.latest <= rows.earliest;
    block_.origin = static_cast<uint32_t>(block_.is_past ? -differences.least : differences.least);
    block_.is_narrow = differences.most - differences.least <= INT32_MAX &&
                       block_.range.last - block_.range.first <= kFewBuckets;
  }

  template <typename Sum>
  HSTU_DEVICE void add_time_to(Sum& scores) {
    find_block();
    const float weight = block_.range.first == block_.range.last
                             ? __ldg(matrix_.weights + block_.range.first)
                             : 0.0f;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float x = __shfl_sync(kAllLanes, weight, 4 * block + lane() % 4);
#pragma unroll
      for (int n = 0; n < kRun; ++n) at(scores, block * kRun + n) += x;
    }
    for_each_mixed_block([&](int index, const Block&, bool is_mixed, const int (&buckets)[kRun]) {
      float x[kRun];
#pragma unroll
      for (int n = 0; n < kRun; ++n) {
        x[n] = is_mixed ? __ldg(matrix_.weights + buckets[n]) : 0.0f;
      }
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        if (block == index) {
#pragma unroll
          for (int n = 0; n < kRun; ++n) at(scores, block * kRun + n) += x[n];
        }
      }
    });
  }

  // Calls visit(n, block, is_mixed, buckets) if one of the blocks (n, 0) to (n, 3) has several
  // buckets. `block` is the thread's, and `is_mixed` says if it has; else `buckets` are 0.
  template <typename Visit>
  HSTU_DEVICE void for_each_mixed_block(Visit visit) const {
    constexpr uint32_t kOwners = kAllLanes >> (32 - 4 * kBlocks);
    const uint32_t mixed =
        __ballot_sync(kAllLanes, block_.range.first != block_.range.last) & kOwners;
    const uint32_t past = __ballot_sync(kAllLanes, block_.is_past);
    const uint32_t narrow = __ballot_sync(kAllLanes, block_.is_narrow);
#pragma unroll 1
    for (uint32_t left = mixed; left != 0;) {
      const int index = (__ffs(left) - 1) / 4;
      left &= ~(0xfu << 4 * index);
      const int owner = 4 * index + lane() % 4;
      const bool is_mixed = mixed >> owner & 1;
      Block block;
      block.range.first = __shfl_sync(kAllLanes, block_.range.first, owner);
      block.range.last = __shfl_sync(kAllLanes, block_.range.last, owner);
      block.origin = __shfl_sync(kAllLanes, block_.origin, owner);
      block.is_past = past >> owner & 1;
      block.is_narrow = narrow >> owner & 1;
      int buckets[kRun] = {};
      if (is_mixed) find_buckets(block, index, buckets);
      visit(index, block, is_mixed, buckets);
    }
  }

  // Finds the buckets of the thread's row of block `index`.
  HSTU_DEVICE void find_buckets(const Block& block, int index, int (&buckets)[kRun]) const {
    const Tile tile;
    const int row = min(r0_ + tile.first_row + block_row(index), sequence_.q_len - 1);
    const int key = k0_ + tile.first_key + block_key(index);
    const int64_t row_time = time_of_row(bias_, sequence_, row);
    const int64_t* const times = bias_.timestamps + sequence_.k_begin;
    const int last = sequence_.k_len - 1 - key;
    const auto time_of_key = [&](int n) { return times[key + min(n, last)]; };
    if (!block.is_narrow) {
#pragma unroll
      for (int n = 0; n < kRun; ++n) {
        buckets[n] = bucket_of(bias_, time_difference(row_time, time_of_key(n)));
      }
      return;
    }
    const uint32_t origin = static_cast<uint32_t>(row_time) + block.origin;
    int differences[kRun];
#pragma unroll
    for (int n = 0; n < kRun; ++n) {
      differences[n] = abs(static_cast<int>(origin - static_cast<uint32_t>(time_of_key(n))));
      buckets[n] = block.range.first;
    }
    const uint32_t least = block.is_past ? -block.origin : block.origin;
#pragma unroll 1
    for (int next = block.range.first; next < block.range.last; ++next) {
      const int threshold = static_cast<int>(static_cast<uint32_t>(bias_.thresholds[next]) - least);
#pragma unroll
      for (int n = 0; n < kRun; ++n) buckets[n] += differences[n] >= threshold;
    }
  }

  // Adds the sums of the blocks that have one bucket.
  template <typename Sum>
  HSTU_DEVICE void add_blocks_of_one_bucket(const Sum& gradients, const TableSum& sums) const {
    float blocks[kBlocks];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      blocks[block] = 0;
#pragma unroll
      for (int n = 0; n < kRun; ++n) blocks[block] += at(gradients, block * kRun + n);
    }
    const float own = sum_of_own_block(blocks);
    const bool is_added = block_.range.first == block_.range.last && lane() < 4 * kBlocks;
#pragma unroll 1
    for (uint32_t left = __ballot_sync(kAllLanes, is_added && own != 0); left != 0;) {
      const int leader = __ffs(left) - 1;
      const int bucket = __shfl_sync(kAllLanes, block_.range.first, leader);
      const bool is_equal = is_added && block_.range.first == bucket;
      left &= ~__ballot_sync(kAllLanes, is_equal);
      const float sum = warp_sum(is_equal ? own : 0.0f);
      if (lane() == leader) sums.add(matrix_.time_entry + bucket, sum);
    }
  }

  // blocks[n] is the sum of the thread's row of block (n, t). Returns the sum of all rows of the
  // block whose buckets the lane has found. In each step a lane keeps half of its blocks and gets
  // its partner's sums of these, until it has one.
  static HSTU_DEVICE float sum_of_own_block(float (&blocks)[kBlocks]) {
#pragma unroll
    for (int step = 4; step > 0; step /= 2) {
      if constexpr (kBlocks < 8) {
        if (step >= kBlocks) {
#pragma unroll
          for (int n = 0; n < kBlocks; ++n) {
            blocks[n] += __shfl_xor_sync(kAllLanes, blocks[n], 4 * step);
          }
          continue;
        }
      }
      const bool is_upper = lane() & 4 * step;
#pragma unroll
      for (int n = 0; n < step; ++n) {
        const float given = is_upper ? blocks[n] : blocks[n + step];
        const float kept = is_upper ? blocks[n + step] : blocks[n];
        blocks[n] = kept + __shfl_xor_sync(kAllLanes, given, 4 * step);
      }
    }
    return blocks[0];
  }

  // The 8 rows of a block, which the lanes with equal t have, added up.
  static HSTU_DEVICE float sum_of_rows(float x) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      x += __shfl_xor_sync(kAllLanes, x, distance);
    }
    return x;
  }

  // Adds blocks with buckets [first, first + others], two buckets at a time.
  HSTU_DEVICE void add_block_of_few_buckets(const float (&x)[kRun], int others, int first,
                                            const int (&buckets)[kRun],
                                            const TableSum& sums) const {
#pragma unroll 1
    for (int next = 0; __any_sync(kAllLanes, next <= others); next += 2) {
      float two[2] = {};
#pragma unroll
      for (int n = 0; n < kRun; ++n) {
        if (buckets[n] == first + next) two[0] += x[n];
        if (buckets[n] == first + next + 1) two[1] += x[n];
      }
      two[0] = sum_of_rows(two[0]);
      two[1] = sum_of_rows(two[1]);
      const int second = lane() / 4;
      if (second < 2 && next + second <= others) {
        sums.add(matrix_.time_entry + first + next + second, second ? two[1] : two[0]);
      }
    }
  }

  // Adds blocks whose buckets are far apart, one bucket of each block at a time.
  HSTU_DEVICE void add_block_of_any_buckets(const float (&x)[kRun], const int (&buckets)[kRun],
                                            const TableSum& sums) const {
    const uint32_t rows = 0x11111111u << lane() % 4;
    uint32_t pending = 0;
#pragma unroll
    for (int n = 0; n < kRun; ++n) {
      if (x[n] != 0) pending |= 1u << n;
    }
#pragma unroll 1
    for (;;) {
      const uint32_t lanes = __ballot_sync(kAllLanes, pending != 0);
      if (!lanes) return;
      int bucket = 0;
#pragma unroll
      for (int n = kRun - 1; n >= 0; --n) {
        if (pending >> n & 1) bucket = buckets[n];
      }
      const int leader = lanes & rows ? __ffs(lanes & rows) - 1 : lane();
      bucket = __shfl_sync(kAllLanes, bucket, leader);
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kRun; ++n) {
        if (pending >> n & 1 && buckets[n] == bucket) {
          sum += x[n];
          pending &= ~(1u << n);
        }
      }
      sum = sum_of_rows(sum);
      if (lane() == leader) sums.add(matrix_.time_entry + bucket, sum);
    }
  }

  const RelativeBias& bias_;
  const RelativeMatrix& matrix_;
  const Sequence& sequence_;
  const int r0_;
  const int k0_;
  Block block_ = {};  // the lane's
};

}  // namespace hstu::sm80
