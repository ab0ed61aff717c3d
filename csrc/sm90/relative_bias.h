// The relative bias of tiles of scores: weights by position and by time, from windows of the tables
// and of the keys' times in shared memory.
#pragma once

#include "../common/ptx.h"
#include "../common/relative_bias.h"
#include "../scheduler/work_list.h"

namespace hstu::sm90 {

// The times of kKeys keys, and the range of each 8 of them.
template <int kKeys>
struct KeyTimes {
  alignas(16) int64_t times[kKeys];
  TimeRange ranges[kKeys / 8];
};

// The weights by position of kRows rows and kKeys keys, in kCopies copies: entry n of copy c is the
// weight of distance n + c - (kRows - 1) of a key and a row, counted from the first of each. With
// four copies, any 8 neighboring weights are aligned to 16 bytes in one of them.
// NOTE: copies begin in different banks, so that the rows of a warp read without conflicts.
template <int kRows, int kKeys, int kCopies_ = 4>
struct PositionWeights {
  static constexpr int kCopies = kCopies_;
  static_assert(kCopies == 1 || kCopies == 4);
  alignas(16) float copies[kCopies][kRows + kKeys + 8];

  // The weights of a row from the first key on.
  HSTU_DEVICE const float* of_row(int row) const {
    const int first = kRows - 1 - row;
    return copies[first % kCopies] + first / kCopies * kCopies;
  }
  // Reads 8 of what of_row() returned.
  static HSTU_DEVICE void load(const float* from, float (&x)[8]) {
    if constexpr (kCopies == 4) {
      const float4 low = *reinterpret_cast<const float4*>(from);
      const float4 high = *reinterpret_cast<const float4*>(from + 4);
      x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
      x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n) x[n] = from[n];
    }
  }
};

// The cells of time differences below 2^31.
struct NarrowCells {
  static constexpr int kCount = 1 + 31 * kCellsOfPower;
  WeightCell cells[kCount];
};

// The same where shared memory has no room.
struct CellsInDeviceMemory {};

// A warp's list of blocks of 8 x 8 scores that have several buckets: 16 times the number of the
// block's rows, plus that of its chunk.
struct MixedBlocks {
  uint8_t blocks[64];
};

// The time of a row, and the range of the times of the 8 rows that it is one of.
struct RowTimes {
  int64_t time = 0;
  TimeRange range = {};
};

// The bias of one sequence and head.
class HeadBias {
 public:
  HSTU_DEVICE HeadBias(const RelativeBias& bias, const Sequence& sequence, int sequence_index,
                       int heads, int head)
      : bias_(bias), sequence_(sequence), sequence_index_(sequence_index) {
    const PreparedBias& prepared = bias.prepared;
    if (bias.position.data) {
      position_ =
          prepared.position + head / (heads / bias.position.heads) * prepared.position_head_stride;
    }
    if (bias.time.data) {
      const int table_head = head / (heads / bias.time.heads);
      weights_ = prepared.time + table_head * bias.time.size;
      weight_cells_ = prepared.weight_cells + table_head * kDifferenceCells;
    }
  }

  // Starts copying the times of keys [first, first + kKeys), the last one in place of those past
  // the end of the sequence. Called by kThreads threads, which call ptx::cp_async_wait_all() and a
  // barrier before they read what is copied.
  template <int kThreads, int kKeys>
  HSTU_DEVICE void start_copy_keys(int thread, int first, KeyTimes<kKeys>& keys) const {
    if (!weights_) return;
    const int last = sequence_.k_len - 1;
    const int64_t* const times = bias_.timestamps + sequence_.k_begin;
    for (int n = thread; n < kKeys; n += kThreads) {
      ptx::cp_async_8(times + min(first + n, last), keys.times + n);
    }
    const TimeRange* const ranges =
        bias_.prepared.ranges + first_tile(sequence_.k_begin, sequence_index_, 8);
    const int chunk = kThreads - 1 - thread;  // other threads than those of the last times
    if (chunk >= kKeys / 8) return;
    const int own = min(first / 8 + chunk, last / 8);
    if (first % 8 == 0) {
      ptx::cp_async_cached_16(ranges + own, keys.ranges + chunk);
    } else {  // a range of 16 keys contains that of the 8
      const TimeRange next = ranges[min(own + 1, last / 8)];
      keys.ranges[chunk] = {min(ranges[own].earliest, next.earliest),
                            max(ranges[own].latest, next.latest)};
    }
  }

  // The same for weights by position, for rows from `row` and keys from `key` on. Without a table,
  // they are zeros.
  template <int kThreads, int kRows, int kKeys, int kCopies>
  HSTU_DEVICE void start_copy_position(unsigned thread, int row, int key,
                                       PositionWeights<kRows, kKeys, kCopies>& to) const {
    const int size = 2 * bias_.prepared.reach - 1;
    // The prepared table has 8 more entries before its first and after its last one.
    const int place = 8 + key - row - sequence_.offset - (kRows - 1) + bias_.prepared.reach - 1;
    if constexpr (kCopies == 1) {
#pragma unroll
      for (unsigned n = thread; n < kRows + kKeys; n += kThreads) {
        float* const copied = to.copies[0] + n;
        if (position_) {
          ptx::cp_async_4(position_ + min(max(place + static_cast<int>(n), 7), size + 8), copied);
        } else {
          *copied = 0;
        }
      }
    } else {
      // Threads copy 4 entries. All that a thread copies are in one copy of the prepared table, in
      // which places past both ends are replaced by those next to them.
      static_assert(kThreads % 4 == 0);
      const int own = place + static_cast<int>(thread);
      const int copy = own & 3;
      const int last = size + 12 - copy & ~3;
      const float* const from = position_ + copy * bias_.prepared.position_copy_stride;
      float* const copied = to.copies[thread % 4] + thread / 4 * 4;
#pragma unroll
      for (unsigned n = 0; n < kRows + kKeys; n += kThreads) {
        if (n + kThreads > kRows + kKeys && thread + n >= kRows + kKeys) break;
        if (position_) {
          const int first = own - copy + static_cast<int>(n);
          ptx::cp_async_16(from + min(max(first, 0), last), copied + n);
        } else {
          *reinterpret_cast<float4*>(copied + n) = {};
        }
      }
    }
  }

  // Starts copying the cells of differences below 2^31.
  template <int kThreads>
  HSTU_DEVICE void start_copy_cells(unsigned, CellsInDeviceMemory&) const {}
  template <int kThreads>
  HSTU_DEVICE void start_copy_cells(unsigned thread, NarrowCells& cells) const {
    if (!weights_) return;
#pragma unroll
    for (unsigned n = thread; n < NarrowCells::kCount; n += kThreads) {
      ptx::cp_async_cached_16(weight_cells_ + n, cells.cells + n);
    }
  }

  // A row that does not exist has the times of the last one.
  HSTU_DEVICE RowTimes times_of_row(int row) const {
    if (!weights_) return {};
    const int own = min(row, sequence_.q_len - 1);
    return {time_of_row(bias_, sequence_, own),
            bias_.prepared.row_ranges[first_tile(sequence_.q_begin, sequence_index_, 8) + own / 8]};
  }

  // Computes the bias of 32 rows and kChunks chunks of 8 keys. Calls store(row, chunk, x) for each
  // row and chunk, some of them twice: x is then replaced. Then calls clear(row, key) for each key
  // past the end of the sequence. `first` is the first key; `keys`, `ranges` and `position` are
  // what was copied for it and the lane's row, and `mixed` is memory of the warp. Called by all
  // lanes of a warp, which have neighboring rows, the first of them a multiple of 8.
  template <int kChunks, typename Position, typename Cells, typename Store, typename Clear>
  HSTU_DEVICE void find(const RowTimes& row, int first, const int64_t* keys,
                        const TimeRange* ranges, const float* position, const Cells& cells,
                        MixedBlocks& mixed, Store store, Clear clear) const {
    static_assert(kChunks == 4 || kChunks == 8 || kChunks == 16);
    constexpr int kLaneBlocks = kChunks == 16 ? 2 : 1;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    // Lane 8 g + n has the blocks of rows [8 g, 8 g + 8) and chunks n and n + 8.
    float weights[2] = {};  // of their lowest buckets
    int num_mixed = 0;
    bool is_wide = false;
    if (weights_) {
#pragma unroll
      for (int n = 0; n < kLaneBlocks; ++n) {
        const int chunk = lane % 8 % kChunks + n * 8;
        const Block block = find_block(row.range, ranges[chunk]);
        weights[n] = block.weight;
        const bool is_mixed = block.is_mixed && lane % 8 < kChunks;
        is_wide |= is_mixed && block.is_wide;
        const uint32_t lanes = __ballot_sync(0xffffffff, is_mixed);
        const int before = num_mixed + __popc(lanes & ((1u << lane) - 1));
        if (is_mixed) mixed.blocks[before] = static_cast<uint8_t>(lane / 8 * 16 + chunk);
        num_mixed += __popc(lanes);
      }
    }
    // All blocks, as if each had one bucket. There is no branch on times.
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float x[8];
      Position::load(position + chunk * 8, x);
      const float weight = __shfl_sync(0xffffffff, chunk < 8 ? weights[0] : weights[1], chunk, 8);
#pragma unroll
      for (int n = 0; n < 8; ++n) x[n] += weight;
      store(lane, chunk, x);
    }
    // Then those with several, four at a time.
    if (num_mixed > 0) {
      __syncwarp();
      if (__any_sync(0xffffffff, is_wide)) {
        replace_mixed<true, Position>(row, keys, position, cells, mixed, num_mixed, store);
      } else {
        replace_mixed<false, Position>(row, keys, position, cells, mixed, num_mixed, store);
      }
    }
    const int keys_left = sequence_.k_len - first;
    if (keys_left < kChunks * 8) {
      __syncwarp();
      for (int key = max(keys_left, 0); key < kChunks * 8; ++key) clear(lane, key);
    }
  }

 private:
  // A block of 8 x 8 scores.
  struct Block {
    float weight;   // of its lowest bucket
    bool is_mixed;  // it may have more buckets
    bool is_wide;   // some difference of times needs more than 31 bits
  };

  HSTU_DEVICE Block find_block(const TimeRange& rows, const TimeRange& keys) const {
    const DifferenceRange differences = find_difference_range(rows, keys);
    const BucketCell least = load_cell(bias_.prepared.cells + difference_cell(differences.least));
    const BucketCell most = load_cell(bias_.prepared.cells + difference_cell(differences.most));
    const int lowest = bucket_in(least, differences.least);
    const int highest = bucket_in(most, differences.most);
    return {__ldg(weights_ + lowest), lowest != highest || least.count > 1 || most.count > 1,
            differences.most > INT32_MAX};
  }

  // NOTE: these are volatile, so that the compiler does not sink one load behind the use of
  // another.
  HSTU_DEVICE WeightCell load(const NarrowCells& cells, int cell) const {
    return ptx::ld_shared_volatile(cells.cells + cell);
  }
  HSTU_DEVICE WeightCell load(const CellsInDeviceMemory&, int cell) const {
    return ptx::ld_global_nc_volatile(weight_cells_ + cell);
  }

  // Finds the weights of the blocks in `mixed`, score by score. kIsWide says if times are compared
  // in 64 bits.
  template <bool kIsWide, typename Position, typename Cells, typename Store>
  HSTU_DEVICE void replace_mixed(const RowTimes& row, const int64_t* keys, const float* position,
                                 const Cells& cells, const MixedBlocks& mixed, int num_mixed,
                                 Store store) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int begin = 0; begin < num_mixed; begin += 4) {
      const int block = mixed.blocks[min(begin + lane / 8, num_mixed - 1)];
      const int own = block / 16 * 8 + lane % 8;  // the row
      const int chunk = block % 16;
      const int64_t* const times = keys + chunk * 8;
      float x[8];
      Position::load(position + chunk * 8 - (own - lane), x);
      const int64_t row_time = __shfl_sync(0xffffffff, row.time, own);
      bool has_search = false;
      const auto add = [&](int n, auto difference, const WeightCell& cell) {
        const bool is_high = difference >= static_cast<decltype(difference)>(cell.threshold);
        has_search |= cell.threshold >> 32 == WeightCell::kSeveral >> 32;
        x[n] += is_high ? cell.high : cell.low;
      };
      if constexpr (kIsWide) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const uint64_t difference = time_difference(row_time, times[n]);
          add(n, difference, load_cell(weight_cells_ + difference_cell(difference)));
        }
      } else {
        // The low words are enough. Loads of four cells are in flight at once.
#pragma unroll
        for (int half = 0; half < 8; half += 4) {
          uint32_t differences[4];
          WeightCell found[4];
#pragma unroll
          for (int n = 0; n < 4; n += 2) {
            const int4 pair = *reinterpret_cast<const int4*>(times + half + n);
            differences[n] = abs(static_cast<int>(row_time) - pair.x);
            differences[n + 1] = abs(static_cast<int>(row_time) - pair.z);
          }
#pragma unroll
          for (int n = 0; n < 4; ++n) found[n] = load(cells, difference_cell(differences[n]));
#pragma unroll
          for (int n = 0; n < 4; ++n) add(half + n, differences[n], found[n]);
        }
      }
      if (has_search) {
        Position::load(position + chunk * 8 - (own - lane), x);
#pragma unroll 1
        for (int key = 0; key < 8; ++key) {
          const uint64_t difference = time_difference(row_time, times[key]);
          const float weight = __ldg(weights_ + bucket_of(bias_, difference));
#pragma unroll
          for (int n = 0; n < 8; ++n) {
            if (n == key) x[n] += weight;
          }
        }
      }
      store(own, chunk, x);
    }
  }

  const RelativeBias& bias_;
  const Sequence& sequence_;
  const int sequence_index_;
  const float* position_ = nullptr;  // null: no weights by position
  const float* weights_ = nullptr;   // null: no weights by time
  const WeightCell* weight_cells_ = nullptr;
};

}  // namespace hstu::sm90
