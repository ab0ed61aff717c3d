// The relative bias: the sum of a weight by position and a weight by elapsed time, for the kernels
// of every GPU.
//
// Times differ little within blocks of 8 rows and 8 keys, so most blocks have one or two buckets.
// prepare_relative_bias() finds the range of the times of 8 rows or keys. From two such ranges, the
// range of the buckets of a block is found at once, whatever the order of the times.
#pragma once

#include "math.h"
#include "sequence.h"

namespace hstu {

// Cells of time differences: 0, and 8 cells for each power of two.
constexpr int kCellsOfPower = 8;
constexpr int kDifferenceCells = 1 + 64 * kCellsOfPower;
constexpr int kNarrowCells = 1 + 31 * kCellsOfPower;  // of differences below 2^31

#if defined(__CUDACC__)
// The cell of a time difference, rounded toward zero to fp32: the exponent of the number and the
// first 3 bits of its fraction.
HSTU_DEVICE int cell_of_rounded(float difference) {
  constexpr int kFirst = 127 * kCellsOfPower - 1;  // the exponent of 1 is 127
  return max(__float_as_int(difference) >> 20, kFirst) - kFirst;
}
#endif

// The cell of a time difference.
HSTU_HOST_DEVICE int difference_cell(uint64_t difference) {
#if defined(__CUDA_ARCH__)
  return cell_of_rounded(__ull2float_rz(difference));
#else
  if (difference == 0) return 0;
  const int exponent = 63 - __builtin_clzll(difference);
  const uint64_t normalized = difference << (63 - exponent);
  return 1 + exponent * kCellsOfPower + static_cast<int>(normalized >> 60 & 7);
#endif
}

// The cell of a time difference below 2^32.
HSTU_HOST_DEVICE int difference_cell(uint32_t difference) {
#if defined(__CUDA_ARCH__)
  return cell_of_rounded(__uint2float_rz(difference));
#else
  return difference_cell(uint64_t{difference});
#endif
}

// The smallest difference of a cell. A cell of a power of two below 8 may be empty: the result is
// the smallest difference of the next cell.
HSTU_HOST_DEVICE uint64_t first_difference(int cell) {
  if (cell == 0) return 0;
  const int exponent = (cell - 1) / kCellsOfPower;
  const uint64_t eighths = kCellsOfPower + (cell - 1) % kCellsOfPower;
  if (exponent >= 3) return eighths << (exponent - 3);
  const uint64_t unit = uint64_t{1} << (3 - exponent);
  return ceil_div(eighths, unit);
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

// The thresholds in cell `cell`. A threshold that leads past the last bucket is left out.
HSTU_HOST_DEVICE BucketCell find_bucket_cell(const RelativeBias& bias, int cell) {
  const uint64_t least = first_difference(cell);
  const uint64_t end = cell + 1 < kDifferenceCells ? first_difference(cell + 1) : 0;
  const int thresholds = smaller(bias.num_thresholds, bias.time.size - 1);
  const int first = count_reached(bias.thresholds, 0, thresholds, least);
  const int last = count_reached(bias.thresholds, first, thresholds, end - 1);
  return {first < last ? static_cast<uint64_t>(bias.thresholds[first]) : UINT64_MAX, first,
          last - first};
}

// Loads 16 bytes: a BucketCell, a WeightCell or a TimeRange.
template <typename T>
HSTU_HOST_DEVICE T load_cell(const T* from) {
#if defined(__CUDA_ARCH__)
  static_assert(sizeof(T) == sizeof(int4));
  const int4 words = __ldg(reinterpret_cast<const int4*>(from));
  T result;
  memcpy(&result, &words, sizeof(T));
  return result;
#else
  return *from;
#endif
}

// The bucket of a time difference in `cell`, which has at most one threshold.
HSTU_HOST_DEVICE int bucket_in(const BucketCell& cell, uint64_t difference) {
  return cell.first + (cell.count > 0 && difference >= cell.threshold);
}

// The bucket of a time difference.
HSTU_HOST_DEVICE int bucket_of(const RelativeBias& bias, uint64_t difference) {
  const BucketCell cell = load_cell(bias.prepared.cells + difference_cell(difference));
  if (cell.count <= 1) return bucket_in(cell, difference);
  return count_reached(bias.thresholds, cell.first, cell.first + cell.count, difference);
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

// Returns a range that contains the time differences of all rows and keys whose times are in these
// ranges.
HSTU_HOST_DEVICE DifferenceRange find_difference_range(const TimeRange& rows,
                                                       const TimeRange& keys) {
  const uint64_t past = time_difference(rows.latest, keys.earliest);
  const uint64_t future = time_difference(rows.earliest, keys.latest);
  if (keys.latest <= rows.earliest) return {future, past};
  if (rows.latest <= keys.earliest) return {past, future};
  return {0, past > future ? past : future};
}

// find_difference_range() in 32 bits.
struct NarrowDifferences {
  uint32_t least;
  uint32_t most;
  bool is_wide;  // `most` needs more than 31 bits; neither is valid

  HSTU_HOST_DEVICE NarrowDifferences(const TimeRange& rows, const TimeRange& keys) {
    uint64_t past = static_cast<uint64_t>(rows.latest) - static_cast<uint64_t>(keys.earliest);
    uint64_t future = static_cast<uint64_t>(rows.earliest) - static_cast<uint64_t>(keys.latest);
    least = static_cast<uint32_t>(future);
    if (keys.latest > rows.earliest) {  // seldom, if times are in order
      if (rows.latest < keys.earliest) past = -past;
      future = -future;
      least = rows.latest <= keys.earliest ? static_cast<uint32_t>(past) : 0;
      if (past < future) past = future;
    }
    is_wide = past > INT32_MAX;
    most = static_cast<uint32_t>(past) & INT32_MAX;
    if (least > most) least = most;
  }
};

HSTU_HOST_DEVICE BucketRange find_bucket_range(const RelativeBias& bias,
                                               const DifferenceRange& differences) {
  return {bucket_of(bias, differences.least), bucket_of(bias, differences.most)};
}
HSTU_HOST_DEVICE BucketRange find_bucket_range(const RelativeBias& bias, const TimeRange& rows,
                                               const TimeRange& keys) {
  return find_bucket_range(bias, find_difference_range(rows, keys));
}

// Returns the address of the time of query row `row`.
HSTU_HOST_DEVICE const int64_t* find_time_of_row(const RelativeBias& bias, const Sequence& sequence,
                                                 int row) {
  if (bias.row_timestamps) return bias.row_timestamps + sequence.q_begin + row;
  const int64_t next = clamp(row + sequence.offset + 1, 0, sequence.k_len - 1);
  return bias.timestamps + sequence.k_begin + next;
}
HSTU_HOST_DEVICE int64_t time_of_row(const RelativeBias& bias, const Sequence& sequence, int row) {
  return *find_time_of_row(bias, sequence, row);
}

}  // namespace hstu
