// The relative bias of a row: the sum of a weight by position and a weight by elapsed time, for the
// kernels of every GPU.
//
// Weights are found for 8 neighboring keys at a time. The weight by time depends on a bucket, and
// the times that are in one bucket of a row, on one side of the row's time, are an interval. If it
// contains the earliest and the latest time of the 8 keys, which prepare_relative_bias() has found,
// all of them have the same weight. That holds for most keys, in whatever order their times are.
#pragma once

#include "sequence.h"
#if defined(__CUDACC__)
#include "../scheduler/work_list.h"
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
  return uint64_t{4} + cell % 4 << (cell / 4 - 1);
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

// Times [first, last], all of which are in one bucket of a row. The default is empty.
struct BucketSpan {
  int64_t first = 1;
  int64_t last = 0;
  int bucket = 0;

  HSTU_HOST_DEVICE bool contains(int64_t time) const { return first <= time && time <= last; }
};

// x - y and x + y, or the least and the largest int64 where these would overflow.
HSTU_HOST_DEVICE int64_t subtract_saturated(int64_t x, uint64_t y) {
  const uint64_t room = static_cast<uint64_t>(x) - static_cast<uint64_t>(INT64_MIN);
  return y > room ? INT64_MIN : static_cast<int64_t>(static_cast<uint64_t>(x) - y);
}
HSTU_HOST_DEVICE int64_t add_saturated(int64_t x, uint64_t y) {
  const uint64_t room = static_cast<uint64_t>(INT64_MAX) - static_cast<uint64_t>(x);
  return y > room ? INT64_MAX : static_cast<int64_t>(static_cast<uint64_t>(x) + y);
}

// The bucket of a row and a key, and the times around the key's that have the same bucket.
HSTU_HOST_DEVICE BucketSpan find_bucket_span(const RelativeBias& bias, int64_t row_time,
                                             int64_t key_time) {
  const bool is_past = key_time <= row_time;
  const uint64_t difference =
      is_past ? static_cast<uint64_t>(row_time) - static_cast<uint64_t>(key_time)
              : static_cast<uint64_t>(key_time) - static_cast<uint64_t>(row_time);
  const int cell = difference_cell(difference);
  const int last_bucket = bias.time.size - 1;
  int bucket = count_reached(bias.thresholds, bias.prepared.cells[cell],
                             bias.prepared.cells[cell + 1], difference);
  uint64_t least = 0;
  uint64_t most = UINT64_MAX;
  if (bucket < last_bucket) {
    if (bucket < bias.num_thresholds) most = static_cast<uint64_t>(bias.thresholds[bucket]) - 1;
  } else {
    bucket = last_bucket;
  }
  if (bucket > 0) least = static_cast<uint64_t>(bias.thresholds[bucket - 1]);
  BucketSpan span;
  span.bucket = bucket;
  span.first =
      is_past || least == 0 ? subtract_saturated(row_time, most) : add_saturated(row_time, least);
  span.last =
      !is_past || least == 0 ? add_saturated(row_time, most) : subtract_saturated(row_time, least);
  return span;
}

// The bucket of a time difference.
HSTU_HOST_DEVICE int bucket_of(const RelativeBias& bias, uint64_t difference) {
  const int cell = difference_cell(difference);
  const int bucket = count_reached(bias.thresholds, bias.prepared.cells[cell],
                                   bias.prepared.cells[cell + 1], difference);
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

// Buckets among which are those of all rows and keys with times in these ranges.
HSTU_HOST_DEVICE BucketRange find_bucket_range(const RelativeBias& bias, const TimeRange& rows,
                                               const TimeRange& keys) {
  const uint64_t past = time_difference(rows.latest, keys.earliest);
  const uint64_t future = time_difference(rows.earliest, keys.latest);
  if (keys.latest <= rows.earliest) return {bucket_of(bias, future), bucket_of(bias, past)};
  if (rows.latest <= keys.earliest) return {bucket_of(bias, past), bucket_of(bias, future)};
  return {bucket_of(bias, 0), bucket_of(bias, past > future ? past : future)};
}

// Finds the buckets of several differences, which are in `range`, at the same time.
template <int kCount>
HSTU_HOST_DEVICE void find_buckets(const RelativeBias& bias, BucketRange range,
                                   const uint64_t (&differences)[kCount], int (&buckets)[kCount]) {
  for (int n = 0; n < kCount; ++n) buckets[n] = range.first;
  int step = 1;
  while (2 * step <= range.last - range.first) step *= 2;
  for (; step > 0; step /= 2) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int n = 0; n < kCount; ++n) {
      const int next = buckets[n] + step;
      if (next <= range.last &&
          static_cast<uint64_t>(bias.thresholds[next - 1]) <= differences[n]) {
        buckets[n] = next;
      }
    }
  }
}

// The time of query row `row`.
HSTU_HOST_DEVICE int64_t time_of_row(const RelativeBias& bias, const Sequence& sequence, int row) {
  if (bias.row_timestamps) return bias.row_timestamps[sequence.q_begin + row];
  const int64_t next = clamp(row + sequence.offset + 1, 0, sequence.k_len - 1);
  return bias.timestamps[sequence.k_begin + next];
}

#if defined(__CUDACC__)

// The bias of one row and head.
class BiasOfRow {
 public:
  // A row that does not exist has the bias of the last one.
  HSTU_DEVICE BiasOfRow(const RelativeBias& bias, const Sequence& sequence, int sequence_index,
                        int heads, int head, int row)
      : bias_(bias),
        k_len_(sequence.k_len),
        origin_(bias.prepared.reach - 1 - row - sequence.offset) {
    if (bias.position.data) {
      position_ = bias.prepared.position +
                  head / (heads / bias.position.heads) * bias.prepared.position_head_stride;
    }
    if (!bias.time.data) return;
    weights_ = bias.prepared.time + head / (heads / bias.time.heads) * bias.time.size;
    times_ = bias.timestamps + sequence.k_begin;
    ranges_ = bias.prepared.ranges + first_tile(sequence.k_begin, sequence_index, 8);
    row_time_ = time_of_row(bias, sequence, min(row, sequence.q_len - 1));
  }

  // Sets x to the bias of keys [j, j + 8), with zeros past the end of the sequence. With
  // kFindsBuckets, `buckets` gets a byte for each key and `lowest` their minimum.
  template <bool kFindsBuckets = false>
  HSTU_DEVICE void find(int j, float (&x)[8], uint2* buckets = nullptr, int* lowest = nullptr) {
    find_position(j, x);
    if (weights_) add_time<kFindsBuckets>(j, x, buckets, lowest);
    if (j + 8 > k_len_) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        if (j + n >= k_len_) x[n] = 0;
      }
    }
  }

 private:
  HSTU_DEVICE void find_position(int j, float (&x)[8]) const {
    if (!position_) {
#pragma unroll
      for (int n = 0; n < 8; ++n) x[n] = 0;
      return;
    }
    // NOTE: copy n of the table begins with its entry n, so that any entry is aligned to 16 bytes
    // in one copy.
    const int size = 2 * bias_.prepared.reach - 1;
    const int entry = min(max(j + origin_, -8), size) + 8;
    const int copy = entry % 4;
    const auto* from = reinterpret_cast<const float4*>(
        position_ + copy * bias_.prepared.position_copy_stride + (entry - copy));
    const float4 low = __ldg(from);
    const float4 high = __ldg(from + 1);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  }

  template <bool kFindsBuckets>
  HSTU_DEVICE void add_time(int j, float (&x)[8], uint2* buckets, int* lowest) {
    const int last_range = (k_len_ - 1) / 8;
    TimeRange range = ranges_[min(j / 8, last_range)];
    if (j % 8 != 0) {
      const TimeRange next = ranges_[min(j / 8 + 1, last_range)];
      range.earliest = min(range.earliest, next.earliest);
      range.latest = max(range.latest, next.latest);
    }
    if (span_.contains(range.earliest) && span_.contains(range.latest)) {
#pragma unroll
      for (int n = 0; n < 8; ++n) x[n] += weight_;
      if constexpr (kFindsBuckets) {
        buckets->x = buckets->y = span_.bucket * 0x01010101u;
        *lowest = min(*lowest, span_.bucket);
      }
      return;
    }
    if constexpr (kFindsBuckets) *buckets = {};
    int64_t times[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) times[n] = times_[min(j + n, k_len_ - 1)];
    for (uint32_t pending = 0xff;;) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        if (pending >> n & 1 && span_.contains(times[n])) {
          x[n] += weight_;
          pending &= ~(1u << n);
          if constexpr (kFindsBuckets) {
            (n < 4 ? buckets->x : buckets->y) |= static_cast<uint32_t>(span_.bucket) << n % 4 * 8;
            *lowest = min(*lowest, span_.bucket);
          }
        }
      }
      if (!pending) return;
      span_ = find_bucket_span(bias_, row_time_, times_[min(j + __ffs(pending) - 1, k_len_ - 1)]);
      weight_ = __ldg(weights_ + span_.bucket);
    }
  }

  const RelativeBias& bias_;
  const int k_len_;
  const int origin_;                   // entry of the position table for key 0
  const float* position_ = nullptr;    // null: no weights by position
  const float* weights_ = nullptr;     // null: no weights by time
  const int64_t* times_ = nullptr;     // of the sequence's keys
  const TimeRange* ranges_ = nullptr;  // of the sequence's keys
  int64_t row_time_ = 0;
  BucketSpan span_;   // the last one that was found
  float weight_ = 0;  // of its bucket
};

#endif

}  // namespace hstu
