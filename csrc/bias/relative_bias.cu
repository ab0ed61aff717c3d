#include "relative_bias.h"

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include <algorithm>

#include "../common/launch.h"

namespace hstu {
namespace {

constexpr int kThreads = 256;

__host__ __device__ int cells_to_find(const RelativeBias& bias) {
  return bias.time.data ? (1 + bias.time.heads) * kDifferenceCells : 0;
}

__device__ float read_weight(const BiasTable& table, int head, int entry) {
  const int64_t index = head * table.head_stride + entry;
  switch (table.dtype) {
    case DType::kBFloat16:
      return static_cast<const cutlass::bfloat16_t*>(table.data)[index];
    case DType::kFloat16:
      return static_cast<const cutlass::half_t*>(table.data)[index];
    default:
      return static_cast<const float*>(table.data)[index];
  }
}

__device__ void copy_position_table(const RelativeBias& bias, int thread, int threads) {
  const PreparedBias& prepared = bias.prepared;
  for (int head = 0; head < bias.position.heads; ++head) {
    const int64_t first = head * prepared.position_head_stride;
    for (int copy = 0; copy < 4; ++copy) {
      for (int n = thread; n < prepared.position_copy_stride; n += threads) {
        const int entry = min(max(n + copy - prepared.position_margin, 0), bias.position.size - 1);
        prepared.position[first + int64_t{copy} * prepared.position_copy_stride + n] =
            read_weight(bias.position, head, entry);
      }
    }
  }
}

__device__ void copy_time_table(const RelativeBias& bias, int thread, int threads) {
  const PreparedBias& prepared = bias.prepared;
  const auto weight_of = [&](int head, int entry) { return read_weight(bias.time, head, entry); };
  for (int head = 0; head < bias.time.heads; ++head) {
    float* const to = prepared.time + int64_t{head} * bias.time.size;
    for (int n = thread; n < bias.time.size; n += threads) to[n] = weight_of(head, n);
  }
  // The cells of buckets, then those of each head's weights.
  for (int n = thread; n < cells_to_find(bias); n += threads) {
    const int index = n % kDifferenceCells;
    const BucketCell cell = find_bucket_cell(bias, index);
    if (n < kDifferenceCells) {
      prepared.cells[n] = cell;
      continue;
    }
    const int head = n / kDifferenceCells - 1;
    const float low = weight_of(head, cell.first);
    const float high = cell.count > 0 ? weight_of(head, cell.first + 1) : low;
    const uint64_t threshold = cell.count > 1 ? WeightCell::kSeveral : cell.threshold;
    prepared.weight_cells[n - kDifferenceCells] = {threshold, low, high};
    if (index < kNarrowCells) {
      const uint32_t bucket = cell.count > 1 ? NarrowCell::kSeveral : cell.first;
      prepared.narrow_cells[head * kNarrowCells + index] = {static_cast<uint32_t>(threshold),
                                                            bucket, low, high};
    }
  }
}

// Finds the range of each 8 of the times time_of(0) to time_of(length - 1). Writes them to
// `blocks`, together with the times, or to `ranges` if `blocks` is null.
template <typename TimeOf>
__device__ void find_ranges(int length, int thread, int threads, TimeOf time_of, TimeRange* ranges,
                            KeyBlockTimes* blocks) {
  for (int n = thread; n * 8 < length; n += threads) {
    const int64_t first = time_of(n * 8);
    TimeRange range = {first, first};
    for (int next = n * 8 + 1; next < min(n * 8 + 8, length); ++next) {
      const int64_t time = time_of(next);
      range.earliest = min(range.earliest, time);
      range.latest = max(range.latest, time);
    }
    if (!blocks) {
      ranges[n] = range;
      continue;
    }
    KeyBlockTimes block;
    block.range = range;
    for (int next = 0; next < 8; ++next) {
      block.times[next] = static_cast<uint32_t>(time_of(min(n * 8 + next, length - 1)));
    }
    blocks[n] = block;
  }
}

// Element n of an array, or null if there is no array.
template <typename T>
__device__ T* at(T* array, int64_t n) {
  return array ? array + n : nullptr;
}

__device__ void find_ranges(const RelativeBias& bias, const BatchParams& batch, int b, int thread,
                            int threads) {
  const Sequence sequence = load_sequence(batch, b);
  const PreparedBias& prepared = bias.prepared;
  const int64_t first_keys = first_tile(sequence.k_begin, b, 8);
  const int64_t first_rows = first_tile(sequence.q_begin, b, 8);
  find_ranges(
      sequence.k_len, thread, threads,
      [&](int key) { return bias.timestamps[sequence.k_begin + key]; },
      prepared.ranges + first_keys, at(prepared.time_blocks, first_keys));
  find_ranges(
      sequence.q_len, thread, threads, [&](int row) { return time_of_row(bias, sequence, row); },
      prepared.row_ranges + first_rows, at(prepared.row_blocks, first_rows));
}

// The first `table_blocks` blocks copy the tables. Each of the others finds a part of the ranges of
// a sequence.
__global__ void __launch_bounds__(kThreads)
    prepare_relative_bias_kernel(const __grid_constant__ RelativeBias bias,
                                 const __grid_constant__ BatchParams batch, int table_blocks) {
  const int block = static_cast<int>(blockIdx.x) - table_blocks;
  if (block < 0) {
    const int thread = static_cast<int>(blockIdx.x) * kThreads + threadIdx.x;
    if (bias.position.data) copy_position_table(bias, thread, table_blocks * kThreads);
    if (bias.time.data) copy_time_table(bias, thread, table_blocks * kThreads);
    return;
  }
  const int parts = (static_cast<int>(gridDim.x) - table_blocks) / batch.batch;
  find_ranges(bias, batch, block / parts, block % parts * kThreads + threadIdx.x, parts * kThreads);
}

// Rounds the sums of the position table, then those of the time table, one in each thread.
__global__ void __launch_bounds__(kThreads)
    round_table_sums_kernel(const __grid_constant__ BackwardParams params,
                            const __grid_constant__ TableSums sums, double rest_of_scale) {
  int64_t entry = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const bool is_position = entry < sums.position.entries;
  if (!is_position) entry -= sums.position.entries;
  const TableSum& sum = is_position ? sums.position : sums.time;
  if (entry >= sum.entries) return;
  double scale = rest_of_scale;
  if (!params.attn_scale_per_row) scale = params.attn_scale ? params.attn_scale[0] : params.scale;
  float* const gradient = is_position ? params.dpos_weight : params.dts_weight;
  gradient[entry] = static_cast<float>(params.alpha * scale * sum.value(entry));
}

}  // namespace

void round_table_sums(const BackwardParams& params, const TableSums& sums, double rest_of_scale,
                      const CudaLaunch& launch) {
  const int64_t entries = sums.position.entries + sums.time.entries;
  launch_kernel(round_table_sums_kernel,
                {.blocks = ceil_div(entries, kThreads), .threads = kThreads}, launch,
                "gradients of the relative bias's tables", params, sums, rest_of_scale);
}

void prepare_relative_bias(const RelativeBias& bias, const BatchParams& batch,
                           const CudaLaunch& launch) {
  const int multiprocessors = launch.device.multiprocessors;
  const int64_t weights = bias.position.heads * bias.prepared.position_head_stride +
                          int64_t{bias.time.heads} * bias.time.size;
  // A search of a cell takes as long as copies of many weights.
  const int64_t threads = std::max<int64_t>(weights / 4, cells_to_find(bias));
  const int64_t table_blocks = clamp(ceil_div(threads, kThreads), 1, multiprocessors);
  int64_t range_blocks = 0;
  if (bias.time.data) {
    const int64_t ranges = std::max(batch.total_q, batch.total_k) / 8 / batch.batch;
    range_blocks = batch.batch * clamp(ceil_div(ranges, kThreads), 1, multiprocessors);
  }
  launch_kernel(prepare_relative_bias_kernel,
                {.blocks = table_blocks + range_blocks, .threads = kThreads}, launch,
                "preparation of the relative bias", bias, batch, static_cast<int>(table_blocks));
}

}  // namespace hstu
