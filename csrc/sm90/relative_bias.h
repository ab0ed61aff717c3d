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

// Where consumers add the weights by position.
struct NoPosition {};

// The cells of time differences below 2^31.
struct NarrowCells {
  NarrowCell cells[kNarrowCells];
};

// The same where shared memory has no room.
struct CellsInDeviceMemory {};

// A block of 8 x 8 scores that has several buckets.
struct alignas(16) MixedBlock {
  uint32_t threshold;  // of the second bucket
  float low;           // the weights of both, if there are two
  float high;
  int index;  // 16 times the number of the block's rows, plus that of its chunk
};

// A warp's list of such blocks: first those of two buckets, from the end on the others.
// kChunks is as in HeadBias::find().
template <int kChunks>
struct MixedBlocks {
  static constexpr int kCount = 4 * kChunks;
  MixedBlock blocks[kCount];
};

// The time of a row, the range of times of its 8 rows, and the keys that these may see.
struct RowTimes {
  int64_t time = 0;
  TimeRange range = {};  // of the 8 rows that the row is one of
  int keys = 0;          // none of these 8 rows sees this key or a later one
};

// The bias of one sequence and head.
class HeadBias {
 public:
  HSTU_DEVICE HeadBias(const RelativeBias& bias, const MaskParams& mask, const Sequence& sequence,
                       int sequence_index, int heads, int head)
      : bias_(bias),
        mask_(mask, sequence, head),
        sequence_(sequence),
        sequence_index_(sequence_index) {
    const PreparedBias& prepared = bias.prepared;
    if (bias.position.data) {
      const int64_t first = head / (heads / bias.position.heads) * prepared.position_head_stride;
      position_ = prepared.position + first;
    }
    if (bias.time.data) {
      const int table_head = head / (heads / bias.time.heads);
      weights_ = prepared.time + table_head * bias.time.size;
      weight_cells_ = prepared.weight_cells + table_head * kDifferenceCells;
      narrow_cells_ = prepared.narrow_cells + table_head * kNarrowCells;
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
    for (unsigned n = thread; n < kNarrowCells; n += kThreads) {
      ptx::cp_async_cached_16(narrow_cells_ + n, cells.cells + n);
    }
  }

  // Reads what times_of_row() of a row will return into the L1 cache.
  HSTU_DEVICE void prefetch_times_of_row(int row) const {
    if (!weights_) return;
    const int own = min(row, sequence_.q_len - 1);
    ptx::prefetch_l1(find_time_of_row(bias_, sequence_, own));
    ptx::prefetch_l1(bias_.prepared.row_ranges + first_tile(sequence_.q_begin, sequence_index_, 8) +
                     own / 8);
  }

  // A row that does not exist has the times of the last one.
  HSTU_DEVICE RowTimes times_of_row(int row) const {
    if (!weights_) return {};
    const int own = min(row, sequence_.q_len - 1);
    return {time_of_row(bias_, sequence_, own),
            bias_.prepared.row_ranges[first_tile(sequence_.q_begin, sequence_index_, 8) + own / 8],
            mask_.estimate(row / 8 * 8, row / 8 * 8 + 8).end};
  }

  // Computes the bias of 32 rows and kChunks chunks of 8 keys. Calls store(row, chunk, x) for each
  // row and chunk, some of them twice: x is then replaced. Then calls clear(row, key) for each key
  // past the end of the sequence. `first` is the first key; `keys`, `ranges` and `position` are
  // what was copied for it and the lane's row (NoPosition: x is without the weights by position),
  // and `mixed` is memory of the warp. Called by all
  // lanes of a warp, which have neighboring rows, the first of them a multiple of 8.
  template <int kChunks, typename Position, typename Cells, typename Store, typename Clear>
  HSTU_DEVICE void find(const RowTimes& row, int first, const int64_t* keys,
                        const TimeRange* ranges, const float* position, const Cells& cells,
                        MixedBlocks<kChunks>& mixed, Store store, Clear clear) const {
    static_assert(kChunks == 4 || kChunks == 8 || kChunks == 16);
    constexpr int kLaneBlocks = kChunks == 16 ? 2 : 1;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    // Lane 8 g + n has the blocks of rows [8 g, 8 g + 8) and chunks n and n + 8.
    float weights[2] = {};  // of their lowest buckets
    int num_two = 0;
    int num_many = 0;
    bool is_wide = false;
    if (weights_) {
#pragma unroll
      for (int n = 0; n < kLaneBlocks; ++n) {
        const int chunk = lane % 8 % kChunks + n * 8;
        const bool is_visible = first + chunk * 8 < row.keys && lane % 8 < kChunks;
        MixedBlock block;
        const Buckets buckets = find_block(row.range, ranges[chunk], cells, block);
        weights[n] = block.low;
        block.index = lane / 8 * 16 + chunk;
        is_wide |= is_visible && buckets == Buckets::kWide;
        const uint32_t two = __ballot_sync(0xffffffff, is_visible && buckets == Buckets::kTwo);
        const uint32_t many = __ballot_sync(0xffffffff, is_visible && buckets >= Buckets::kMany);
        const uint32_t before = (1u << lane) - 1;
        const uint32_t own = 1u << lane;
        if (two & own) mixed.blocks[num_two + __popc(two & before)] = block;
        if (many & own) {
          mixed.blocks[mixed.kCount - 1 - num_many - __popc(many & before)] = block;
        }
        num_two += __popc(two);
        num_many += __popc(many);
      }
    }
    // All blocks, as if each had one bucket. Several are loaded at once, before a store that might
    // change what they load, for all that the compiler knows.
    constexpr int kBatch = batch_of<Position>();
#pragma unroll
    for (int begin = 0; begin < kChunks; begin += kBatch) {
      float x[kBatch][8];
#pragma unroll
      for (int n = 0; n < kBatch; ++n) load_position<Position>(position + (begin + n) * 8, x[n]);
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        const int chunk = begin + n;
        const float weight = __shfl_sync(0xffffffff, weights[chunk / 8], chunk % 8, 8);
#pragma unroll
        for (int e = 0; e < 8; ++e) add<Position>(x[n][e], weight);
        store(lane, chunk, x[n]);
      }
    }
    // Then those with several, four at a time.
    if (num_two + num_many > 0) {
      __syncwarp();
      replace_two<Position>(row, keys, position, mixed, num_two, store);
      if (__any_sync(0xffffffff, is_wide)) {
        replace_many<true, Position>(row, keys, position, cells, mixed, num_many, store);
      } else {
        replace_many<false, Position>(row, keys, position, cells, mixed, num_many, store);
      }
    }
    const int keys_left = sequence_.k_len - first;
    if (keys_left < kChunks * 8) {
      __syncwarp();
      for (int key = max(keys_left, 0); key < kChunks * 8; ++key) clear(lane, key);
    }
  }

 private:
  template <typename Position>
  static constexpr int batch_of() {
    if constexpr (std::is_same_v<Position, NoPosition>)
      return 4;
    else
      return Position::kCopies == 1 ? 2 : 4;
  }
  template <typename Position>
  static HSTU_DEVICE void load_position(const float* from, float (&x)[8]) {
    if constexpr (!std::is_same_v<Position, NoPosition>) Position::load(from, x);
  }
  // Adds the weight by time to that by position.
  template <typename Position>
  static HSTU_DEVICE void add(float& x, float weight) {
    if constexpr (std::is_same_v<Position, NoPosition>) {
      x = weight;
    } else {
      x += weight;
    }
  }

  // How many buckets a block of 8 x 8 scores has.
  enum class Buckets {
    kOne,
    kTwo,
    kMany,  // or not known
    kWide,  // the same, and some difference of times needs more than 31 bits
  };

  // Finds the buckets of a block, and writes what `block` has of them.
  template <typename Cells>
  HSTU_DEVICE Buckets find_block(const TimeRange& rows, const TimeRange& keys, const Cells& cells,
                                 MixedBlock& block) const {
    const DifferenceRange differences = find_difference_range(rows, keys);
    if (differences.most > INT32_MAX) {
      const BucketRange range = find_bucket_range(bias_, differences);
      block.low = __ldg(weights_ + range.first);
      return range.first == range.last ? Buckets::kOne : Buckets::kWide;
    }
    const auto least = static_cast<uint32_t>(differences.least);
    const auto most = static_cast<uint32_t>(differences.most);
    const NarrowCell first = load(cells, difference_cell(least));
    const NarrowCell last = load(cells, difference_cell(most));
    const uint32_t lowest = first.bucket + (least >= first.threshold);
    const uint32_t highest = last.bucket + (most >= last.threshold);
    block.low = least >= first.threshold ? first.high : first.low;
    block.high = most >= last.threshold ? last.high : last.low;
    if ((first.bucket | last.bucket) & NarrowCell::kSeveral) return Buckets::kMany;
    if (lowest == highest) return Buckets::kOne;
    if (lowest + 1 != highest) return Buckets::kMany;
    block.threshold = static_cast<uint32_t>(__ldg(bias_.thresholds + lowest));
    return Buckets::kTwo;
  }

  // NOTE: these are volatile, so that the compiler does not sink one load behind the use of
  // another.
  HSTU_DEVICE NarrowCell load(const NarrowCells& cells, int cell) const {
    return ptx::ld_shared_volatile(cells.cells + cell);
  }
  HSTU_DEVICE NarrowCell load(const CellsInDeviceMemory&, int cell) const {
    return ptx::ld_global_nc_volatile(narrow_cells_ + cell);
  }

  // A lane's row and chunk of one of four blocks.
  struct MixedChunk {
    int row;    // as the lane that has it
    int chunk;  // of the keys
    int64_t time;

    HSTU_DEVICE MixedChunk(const RowTimes& rows, int block)
        : row(block / 16 * 8 + static_cast<int>(threadIdx.x) % 8),
          chunk(block % 16),
          time(__shfl_sync(0xffffffff, rows.time, row)) {}

    // The absolute differences of times, if they are below 2^31: the low words are enough.
    HSTU_DEVICE void find_differences(const int64_t* keys, uint32_t (&differences)[8]) const {
      const int row_time = static_cast<int>(time);
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        const int4 pair = *reinterpret_cast<const int4*>(keys + chunk * 8 + n);
        differences[n] = abs(row_time - pair.x);
        differences[n + 1] = abs(row_time - pair.z);
      }
    }
    // Loads the weights by position; `position` is what the lane has for its own row.
    template <typename Position>
    HSTU_DEVICE void load_position(const float* position, float (&x)[8]) const {
      HeadBias::load_position<Position>(
          position + chunk * 8 - (row - static_cast<int>(threadIdx.x) % 32), x);
    }
  };

  // Finds the weights of the blocks that have two buckets.
  template <typename Position, int kChunks, typename Store>
  HSTU_DEVICE void replace_two(const RowTimes& row, const int64_t* keys, const float* position,
                               const MixedBlocks<kChunks>& mixed, int count, Store store) const {
    const int group = static_cast<int>(threadIdx.x) % 32 / 8;
#pragma unroll 1
    for (int begin = 0; begin < count; begin += 4) {
      const MixedBlock block = mixed.blocks[min(begin + group, count - 1)];
      const MixedChunk own(row, block.index);
      uint32_t differences[8];
      float x[8];
      own.find_differences(keys, differences);
      own.template load_position<Position>(position, x);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        add<Position>(x[n], differences[n] >= block.threshold ? block.high : block.low);
      }
      store(own.row, own.chunk, x);
    }
  }

  // Finds the weights of the other blocks, score by score. kIsWide says if times are compared in 64
  // bits.
  template <bool kIsWide, typename Position, typename Cells, int kChunks, typename Store>
  HSTU_DEVICE void replace_many(const RowTimes& row, const int64_t* keys, const float* position,
                                const Cells& cells, const MixedBlocks<kChunks>& mixed, int count,
                                Store store) const {
    const int group = static_cast<int>(threadIdx.x) % 32 / 8;
#pragma unroll 1
    for (int begin = 0; begin < count; begin += 4) {
      const int entry = mixed.kCount - 1 - min(begin + group, count - 1);
      const MixedChunk own(row, mixed.blocks[entry].index);
      float x[8];
      own.template load_position<Position>(position, x);
      bool has_search = false;
      if constexpr (kIsWide) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const uint64_t difference = time_difference(own.time, keys[own.chunk * 8 + n]);
          const WeightCell cell = load_cell(weight_cells_ + difference_cell(difference));
          has_search |= cell.threshold == WeightCell::kSeveral;
          add<Position>(x[n], difference >= cell.threshold ? cell.high : cell.low);
        }
      } else {
        uint32_t differences[8];
        own.find_differences(keys, differences);
        // Loads of four cells are in flight at once.
#pragma unroll
        for (int half = 0; half < 8; half += 4) {
          NarrowCell found[4];
#pragma unroll
          for (int n = 0; n < 4; ++n)
            found[n] = load(cells, difference_cell(differences[half + n]));
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            has_search |= found[n].bucket == NarrowCell::kSeveral;
            add<Position>(x[half + n], differences[half + n] >= found[n].threshold ? found[n].high
                                                                                   : found[n].low);
          }
        }
      }
      if (has_search) {
        own.template load_position<Position>(position, x);
#pragma unroll 1
        for (int key = 0; key < 8; ++key) {
          const uint64_t difference = time_difference(own.time, keys[own.chunk * 8 + key]);
          const float weight = __ldg(weights_ + bucket_of(bias_, difference));
#pragma unroll
          for (int n = 0; n < 8; ++n) {
            if (n == key) add<Position>(x[n], weight);
          }
        }
      }
      store(own.row, own.chunk, x);
    }
  }

  const RelativeBias& bias_;
  const Mask mask_;
  const Sequence& sequence_;
  const int sequence_index_;
  const float* position_ = nullptr;  // null: no weights by position
  const float* weights_ = nullptr;   // null: no weights by time
  const WeightCell* weight_cells_ = nullptr;
  const NarrowCell* narrow_cells_ = nullptr;
};

}  // namespace hstu::sm90
