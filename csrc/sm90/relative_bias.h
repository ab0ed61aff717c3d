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

// The weights by position of kRows rows and kKeys keys: weights[n] is the one of distance
// n - (kRows - 1) of a key and a row, counted from the first of each.
template <int kRows, int kKeys>
struct PositionWeights {
  float weights[kRows + kKeys];
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
      weights_ = prepared.time + head / (heads / bias.time.heads) * bias.time.size;
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

  // The same for weights by position, for rows from `row` and keys from `key` on.
  template <int kThreads, int kRows, int kKeys>
  HSTU_DEVICE void start_copy_position(int thread, int row, int key,
                                       PositionWeights<kRows, kKeys>& to) const {
    if (!position_) return;
    const int last = 2 * bias_.prepared.reach - 2;
    const int first = key - row - sequence_.offset - (kRows - 1) + bias_.prepared.reach - 1;
    for (int n = thread; n < kRows + kKeys; n += kThreads) {
      // NOTE: the table begins with 8 more entries.
      ptx::cp_async_4(position_ + 8 + min(max(first + n, 0), last), to.weights + n);
    }
  }

  // A row that does not exist has the times of the last one.
  HSTU_DEVICE RowTimes times_of_row(int row) const {
    if (!weights_) return {};
    const int own = min(row, sequence_.q_len - 1);
    return {time_of_row(bias_, sequence_, own),
            bias_.prepared.row_ranges[first_tile(sequence_.q_begin, sequence_index_, 8) + own / 8]};
  }

  // Calls store(chunk, x, buckets) for kChunks chunks of 8 keys of the lane's row: x is the bias of
  // the chunk's keys, with zeros past the end of the sequence, and `buckets` has a byte for each.
  // `first` is the first key, and `times`, `ranges` and `position` have what was copied for it and
  // the lane's row. Called by all lanes of a warp, which have 32 neighboring rows.
  template <int kChunks, typename Store>
  HSTU_DEVICE void find(const RowTimes& row, int first, const int64_t* times,
                        const TimeRange* ranges, const float* position, Store store) const {
    static_assert(kChunks == 4 || kChunks == 8 || kChunks == 16);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    // Lane 8 g + n finds the buckets of rows [8 g, 8 g + 8) and chunks n and n + 8.
    uint32_t blocks[2] = {};
    float weights[2] = {};  // of their lowest buckets
    if (weights_) {
#pragma unroll
      for (int n = 0; n < (kChunks == 16 ? 2 : 1); ++n) {
        blocks[n] = find_block(row.range, ranges[lane % 8 % kChunks + n * 8]);
        weights[n] = __ldg(weights_ + (blocks[n] & ~kKind));
      }
    }
#pragma unroll 1
    for (int n = 0; n < kChunks; ++n) {
      // NOTE: rows that are 8 apart begin 8 keys apart. They have the same distances, and mostly
      // the same buckets.
      const int chunk = (n + lane / 8) % kChunks;
      float x[8] = {};
      if (position_) {
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = position[chunk * 8 + e];
      }
      uint2 buckets = {};
      if (weights_) {
        // NOTE: the 8 lanes of a block have the same chunk.
        const int owner = lane / 8 * 8 + chunk % 8;
        const uint32_t block = __shfl_sync(0xffffffff, chunk < 8 ? blocks[0] : blocks[1], owner);
        const float weight = __shfl_sync(0xffffffff, chunk < 8 ? weights[0] : weights[1], owner);
        buckets = add_time(row.time, times + chunk * 8, block, weight, x);
      }
      const int keys = sequence_.k_len - first - chunk * 8;
      if (keys < 8) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (e >= keys) x[e] = 0;
        }
      }
      store(chunk, x, buckets);
    }
  }

 private:
  // The buckets of a block of 8 x 8 scores: the lowest one, and how many there are.
  enum Block : uint32_t {
    kOne = 0,
    kTwoPast = 1u << 30,    // the next one, too; all keys are earlier than all rows
    kTwoFuture = 2u << 30,  // or later
    kMany = 3u << 30,
    kKind = 3u << 30,
  };

  HSTU_DEVICE uint32_t find_block(const TimeRange& rows, const TimeRange& keys) const {
    const bool is_past = keys.latest <= rows.earliest;
    const bool is_future = !is_past && rows.latest <= keys.earliest;
    const BucketRange range = find_bucket_range(bias_, rows, keys);
    if (range.last == range.first) return kOne | range.first;
    const bool are_two = range.last == range.first + 1;
    if (are_two && is_past) return kTwoPast | range.first;
    if (are_two && is_future) return kTwoFuture | range.first;
    return kMany;
  }

  // Adds the weights of 8 keys, whose block find_block() found; `low` is the weight of its lowest
  // bucket. Returns their buckets.
  HSTU_DEVICE uint2 add_time(int64_t row_time, const int64_t* times, uint32_t block, float low,
                             float (&x)[8]) const {
    const uint32_t kind = block & kKind;
    const uint32_t lowest = block & ~kKind;
    if (kind == kOne) {
#pragma unroll
      for (int n = 0; n < 8; ++n) x[n] += low;
      return {lowest * 0x01010101u, lowest * 0x01010101u};
    }
    uint32_t buckets[8];
    if (kind == kMany) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        buckets[n] = bucket_of(bias_, time_difference(row_time, times[n]));
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) x[n] += __ldg(weights_ + buckets[n]);
    } else {
      const uint64_t threshold = __ldg(bias_.thresholds + lowest);
      const float high = __ldg(weights_ + lowest + 1);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const uint64_t past = static_cast<uint64_t>(row_time) - static_cast<uint64_t>(times[n]);
        const bool is_high = (kind == kTwoPast ? past : -past) >= threshold;
        x[n] += is_high ? high : low;
        buckets[n] = lowest + is_high;
      }
    }
    const auto bytes = [&](int n) {
      return buckets[n] | buckets[n + 1] << 8 | buckets[n + 2] << 16 | buckets[n + 3] << 24;
    };
    return {bytes(0), bytes(4)};
  }

  const RelativeBias& bias_;
  const Sequence& sequence_;
  const int sequence_index_;
  const float* position_ = nullptr;  // null: no weights by position
  const float* weights_ = nullptr;   // null: no weights by time
};

}  // namespace hstu::sm90
