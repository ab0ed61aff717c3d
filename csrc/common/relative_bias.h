// The relative bias: the sum of a weight by position and a weight by elapsed time, for the kernels
// of every GPU.
//
// Times differ little within blocks of 8 rows and 8 keys, so most blocks have one or two buckets.
// prepare_relative_bias() finds the range of the times of 8 rows or keys; with these, the range of
// the buckets of a block is found at once, in whatever order the times are.
#pragma once

#include "sequence.h"
#if defined(__CUDACC__)
#include "../scheduler/work_list.h"
#include "ptx.h"
#endif

namespace hstu {

// Ranges of time differences that the search for a bucket begins with: 4 for each power of two.
constexpr int kDifferenceCells = 252;

// The cell of a time difference. Differences below 4 have a cell each.
HSTU_HOST_DEVICE int difference_cell(uint64_t difference) {
  if (difference < 4) return static_cast<int>(difference);
#if defined(__CUDA_ARCH__)
  const int exponent = 63 - __clzll(static_cast<long long>(difference));
#else
  const int exponent = 63 - __builtin_clzll(difference);
#endif
  return (exponent - 1) * 4 + static_cast<int>(difference >> (exponent - 2) & 3);
}

// The smallest difference of a cell.
HSTU_HOST_DEVICE uint64_t first_difference(int cell) {
  if (cell < 4) return cell;
  return (uint64_t{4} + cell % 4) << (cell / 4 - 1);
}

// The number of thresholds in [low, high) of the list that are <= difference, plus low.
// NOTE: a negative threshold is larger than every difference, as in the CPU kernel.
HSTU_HOST_DEVICE int count_reached(const int64_t* thresholds, int low, int high,
                                   uint64_t difference) {
  while (low < high) {
    const int middle = (low + high) / 2;
    if (static_cast<uint64_t>(thresholds[middle]) <= difference) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// The thresholds in cell `cell`.
HSTU_HOST_DEVICE BucketCell find_bucket_cell(const RelativeBias& bias, int cell) {
  const uint64_t last = cell + 1 < kDifferenceCells ? first_difference(cell + 1) - 1 : UINT64_MAX;
  const int first = count_reached(bias.thresholds, 0, bias.num_thresholds, first_difference(cell));
  const int end = count_reached(bias.thresholds, first, bias.num_thresholds, last);
  const uint64_t threshold = first < end ? static_cast<uint64_t>(bias.thresholds[first]) : 0;
  return {threshold, first, end - first};
}

// The bucket of a time difference.
HSTU_HOST_DEVICE int bucket_of(const RelativeBias& bias, uint64_t difference) {
#if defined(__CUDA_ARCH__)
  // NOTE: this is one load of 16 bytes.
  const int4 words =
      __ldg(reinterpret_cast<const int4*>(bias.prepared.cells + difference_cell(difference)));
  const BucketCell cell = {
      static_cast<uint64_t>(static_cast<uint32_t>(words.x)) | static_cast<uint64_t>(words.y) << 32,
      words.z, words.w};
#else
  const BucketCell cell = bias.prepared.cells[difference_cell(difference)];
#endif
  int bucket = cell.first;
  if (cell.threshold <= difference && cell.count > 0) {
    ++bucket;
    if (cell.count > 1) {
      bucket = count_reached(bias.thresholds, bucket, cell.first + cell.count, difference);
    }
  }
  return bucket < bias.time.size ? bucket : bias.time.size - 1;
}

HSTU_HOST_DEVICE uint64_t time_difference(int64_t row_time, int64_t key_time) {
  const uint64_t difference = static_cast<uint64_t>(row_time) - static_cast<uint64_t>(key_time);
  return key_time <= row_time ? difference : -difference;
}

// Buckets [first, last].
struct BucketRange {
  int first;
  int last;
};

// Time differences [least, most].
struct DifferenceRange {
  uint64_t least;
  uint64_t most;
};

// The differences of all rows and keys with times in these ranges are among these.
HSTU_HOST_DEVICE DifferenceRange find_difference_range(const TimeRange& rows,
                                                       const TimeRange& keys) {
  const uint64_t past = time_difference(rows.latest, keys.earliest);
  const uint64_t future = time_difference(rows.earliest, keys.latest);
  if (keys.latest <= rows.earliest) return {future, past};
  if (rows.latest <= keys.earliest) return {past, future};
  return {0, past > future ? past : future};
}

HSTU_HOST_DEVICE BucketRange find_bucket_range(const RelativeBias& bias,
                                               const DifferenceRange& differences) {
  return {bucket_of(bias, differences.least), bucket_of(bias, differences.most)};
}
HSTU_HOST_DEVICE BucketRange find_bucket_range(const RelativeBias& bias, const TimeRange& rows,
                                               const TimeRange& keys) {
  return find_bucket_range(bias, find_difference_range(rows, keys));
}

// The time of query row `row`.
HSTU_HOST_DEVICE int64_t time_of_row(const RelativeBias& bias, const Sequence& sequence, int row) {
  if (bias.row_timestamps) return bias.row_timestamps[sequence.q_begin + row];
  const int64_t next = clamp(row + sequence.offset + 1, 0, sequence.k_len - 1);
  return bias.timestamps[sequence.k_begin + next];
}

#if defined(__CUDACC__)

// The range of the 8 times from time n on, of `length` times whose ranges begin at multiples of 8.
// It may contain further times.
HSTU_DEVICE TimeRange range_of_8(const TimeRange* ranges, int n, int length) {
  const int last = (length - 1) / 8;
  TimeRange range = ranges[min(n / 8, last)];
  if (n % 8 != 0) {
    const TimeRange next = ranges[min(n / 8 + 1, last)];
    range.earliest = min(range.earliest, next.earliest);
    range.latest = max(range.latest, next.latest);
  }
  return range;
}

// The bias of 32 rows of one head, one for each lane of a warp. All functions are called by all
// lanes.
class BiasOfRows {
 public:
  // Rows that do not exist have the time of the last one.
  HSTU_DEVICE BiasOfRows(const RelativeBias& bias, const Sequence& sequence, int sequence_index,
                         int heads, int head, int first_row)
      : bias_(bias),
        k_len_(sequence.k_len),
        origin_(bias.prepared.reach - 1 - first_row - lane() - sequence.offset) {
    const PreparedBias& prepared = bias.prepared;
    if (bias.position.data) {
      position_ =
          prepared.position + head / (heads / bias.position.heads) * prepared.position_head_stride;
    }
    if (!bias.time.data) return;
    weights_ = prepared.time + head / (heads / bias.time.heads) * bias.time.size;
    times_ = bias.timestamps + sequence.k_begin;
    key_ranges_ = prepared.ranges + first_tile(sequence.k_begin, sequence_index, 8);
    row_ranges_ = prepared.row_ranges + first_tile(sequence.q_begin, sequence_index, 8);
    first_row_ = first_row;
    const int row = min(first_row + lane(), sequence.q_len - 1);
    rows_ = row_ranges_[row / 8];
    row_time_ = time_of_row(bias, sequence, row);
  }

  // Prefetches what find() reads of `keys` keys, which are at least 64.
  HSTU_DEVICE void prefetch(int first, int keys) const {
    // Lines of 128 bytes: 16 times, 8 ranges or 32 weights. The last line is the one of the end.
    const auto line = [&](int n, int per_line, int end) { return min(n * per_line, end); };
    const int lane_ = lane();
    if (lane_ < 12) {
      if (!weights_) return;
      const int last = k_len_ - 1;
      if (lane_ < 9) {
        ptx::prefetch_l1(times_ + min(first + line(lane_, 16, keys), last));
      } else {
        ptx::prefetch_l1(key_ranges_ + min(first / 8 + line(lane_ - 9, 8, keys / 8), last / 8));
      }
    } else if (position_) {
      // NOTE: the lanes read entries from first + origin_ on, and that of lane 0 is the largest.
      const int size = 2 * bias_.prepared.reach - 1;
      const int own = first + origin_ + lane_ + line((lane_ - 12) / 4, 32, keys - 32);
      const int entry = min(max(own, -8), size) + 8;
      ptx::prefetch_l1(position_ + lane_ % 4 * bias_.prepared.position_copy_stride + entry);
    }
  }

  // Prefetches what a BiasOfRows for rows `step` behind these reads for the same keys.
  HSTU_DEVICE void prefetch_rows(const Sequence& sequence, int step, int first, int keys) const {
    const int lane_ = lane();
    if (lane_ >= 12) {
      prefetch(first - step, keys);
    } else if (weights_) {
      const int row = first_row_ + step;  // of the row's time
      const int last = sequence.q_len - 1;
      const int64_t* const times =
          bias_.row_timestamps ? bias_.row_timestamps + sequence.q_begin : times_ + sequence.offset;
      if (lane_ < 3) ptx::prefetch_l1(times + min(max(row + lane_ * 16, 0), last));
      if (lane_ == 3) ptx::prefetch_l1(row_ranges_ + min(max(row / 8, 0), last / 8));
    }
  }

  // Calls store(chunk, x, buckets) for each chunk of 8 keys of the row of the lane: x is the bias
  // of keys first + 8 chunk and following, with zeros past the end of the sequence, and `buckets`
  // has a byte for each of these keys.
  template <int kChunks, typename Store>
  HSTU_DEVICE void find(int first, Store store) const {
    static_assert(kChunks == 4 || kChunks == 8 || kChunks == 16);
    // Lane 8 g + n finds the buckets of rows [8 g, 8 g + 8) and chunks n and n + 8.
    uint32_t blocks[2] = {};
    float weights[2] = {};  // of their lowest buckets
    if (weights_) {
#pragma unroll
      for (int n = 0; n < (kChunks == 16 ? 2 : 1); ++n) {
        blocks[n] = find_block(first + lane() % 8 * 8 + n * 64);
        weights[n] = __ldg(weights_ + (blocks[n] & ~kKind));
      }
    }
#pragma unroll 1
    for (int n = 0; n < kChunks; ++n) {
      // NOTE: rows that are 8 apart begin 8 keys apart, because their buckets do, too.
      const int chunk = (n + lane() / 8) % kChunks;
      const int key = first + chunk * 8;
      float x[8];
      find_position(key, x);
      uint2 buckets = {};
      if (weights_) {
        // NOTE: the 8 lanes of a block have the same chunk.
        const int owner = lane() / 8 * 8 + chunk % 8;
        const uint32_t block = __shfl_sync(0xffffffff, chunk < 8 ? blocks[0] : blocks[1], owner);
        const float weight = __shfl_sync(0xffffffff, chunk < 8 ? weights[0] : weights[1], owner);
        buckets = add_time(key, block, weight, x);
      }
      if (key + 8 > k_len_) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (key + e >= k_len_) x[e] = 0;
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

  static HSTU_DEVICE int lane() { return static_cast<int>(threadIdx.x) % 32; }

  // Finds the buckets of the block of the lane's 8 rows and keys [key, key + 8).
  HSTU_DEVICE uint32_t find_block(int key) const {
    const TimeRange keys = range_of_8(key_ranges_, key, k_len_);
    const bool is_past = keys.latest <= rows_.earliest;
    const bool is_future = !is_past && rows_.latest <= keys.earliest;
    const BucketRange range = find_bucket_range(bias_, rows_, keys);
    if (range.last == range.first) return kOne | range.first;
    const bool are_two = range.last == range.first + 1;
    if (are_two && is_past) return kTwoPast | range.first;
    if (are_two && is_future) return kTwoFuture | range.first;
    return kMany;
  }

  HSTU_DEVICE void find_position(int key, float (&x)[8]) const {
    if (!position_) {
#pragma unroll
      for (int n = 0; n < 8; ++n) x[n] = 0;
      return;
    }
    // NOTE: copy n of the table begins with its entry n, so that any entry is aligned to 16 bytes
    // in one copy.
    const int size = 2 * bias_.prepared.reach - 1;
    const int entry = min(max(key + origin_, -8), size) + 8;
    const int copy = entry % 4;
    const auto* from = reinterpret_cast<const float4*>(
        position_ + copy * bias_.prepared.position_copy_stride + (entry - copy));
    const float4 low = __ldg(from);
    const float4 high = __ldg(from + 1);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  }

  // Adds the weights of keys [key, key + 8), whose block find_block() found; `low` is the weight of
  // its lowest bucket. Returns their buckets.
  HSTU_DEVICE uint2 add_time(int key, uint32_t block, float low, float (&x)[8]) const {
    const uint32_t kind = block & kKind;
    const uint32_t lowest = block & ~kKind;
    if (kind == kOne) {
#pragma unroll
      for (int n = 0; n < 8; ++n) x[n] += low;
      return {lowest * 0x01010101u, lowest * 0x01010101u};
    }
    uint64_t differences[8];
    const int64_t* const times = times_ + key;
    if (key + 8 <= k_len_) {
#pragma unroll
      for (int n = 0; n < 8; ++n) differences[n] = __ldg(times + n);
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n) differences[n] = __ldg(times_ + min(key + n, k_len_ - 1));
    }
    uint32_t buckets[8];
    if (kind == kMany) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        buckets[n] = bucket_of(bias_, time_difference(row_time_, differences[n]));
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) x[n] += __ldg(weights_ + buckets[n]);
    } else {
      const uint64_t threshold = __ldg(bias_.thresholds + lowest);
      const float high = __ldg(weights_ + lowest + 1);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const uint64_t past = static_cast<uint64_t>(row_time_) - differences[n];
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
  const int k_len_;
  const int origin_;                       // entry of the position table for key 0
  const float* position_ = nullptr;        // null: no weights by position
  const float* weights_ = nullptr;         // null: no weights by time
  const int64_t* times_ = nullptr;         // of the sequence's keys
  const TimeRange* key_ranges_ = nullptr;  // of the sequence's keys
  const TimeRange* row_ranges_ = nullptr;  // of the sequence's rows
  int first_row_ = 0;                      // the first of the 32 rows
  TimeRange rows_ = {};                    // of the 8 rows that the lane's is one of
  int64_t row_time_ = 0;
};

#endif

}  // namespace hstu
