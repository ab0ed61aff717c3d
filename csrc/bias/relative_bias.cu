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
  const int stride = prepared.position_copy_stride;
  if (!bias.position.data) {
    for (int n = thread; n < 4 * stride; n += threads) prepared.position[n] = 0;
  }
  for (int head = 0; head < bias.position.heads; ++head) {
    float* const to = prepared.position + head * prepared.position_head_stride;
    for (int n = thread; n < 4 * stride; n += threads) {
      int entry = n / stride + n % stride;
      if (prepared.has_position_of_blocks) entry = n / 4 + n % 2 - n % 4 / 2 * 8;
      entry = min(max(entry - prepared.position_margin, 0), bias.position.size - 1);
      to[n] = read_weight(bias.position, head, entry);
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
  // The cells of buckets, then the cells of each head's weights.
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

// Writes the times time_of(0) to time_of(length - 1) to `blocks`, each of which has 8 of them.
template <typename TimeOf>
__device__ void copy_times(int length, int thread, int threads, TimeOf time_of,
                           KeyBlockTimes* blocks) {
  for (int n = thread; n * 8 < length; n += threads) {
    KeyBlockTimes block;
    for (int next = 0; next < 8; ++next) {
      const int64_t time = time_of(min(n * 8 + next, length - 1));
      block.range.earliest = next == 0 ? time : min(block.range.earliest, time);
      block.range.latest = next == 0 ? time : max(block.range.latest, time);
      block.times[next] = static_cast<uint32_t>(time);
    }
    blocks[n] = block;
  }
}

__device__ void copy_times(const RelativeBias& bias, const BatchParams& batch, int b, int thread,
                           int threads) {
  const Sequence sequence = load_sequence(batch, b);
  const PreparedBias& prepared = bias.prepared;
  copy_times(
      sequence.k_len, thread, threads,
      [&](int key) { return bias.timestamps[sequence.k_begin + key]; },
      prepared.time_blocks + first_tile(sequence.k_begin, b, 8));
  copy_times(
      sequence.q_len, thread, threads, [&](int row) { return time_of_row(bias, sequence, row); },
      prepared.row_blocks + first_tile(sequence.q_begin, b, 8));
}

// The first `table_blocks` blocks copy the tables. Each of the others copies a part of the times of
// a sequence.
__global__ void __launch_bounds__(kThreads)
    prepare_relative_bias_kernel(const __grid_constant__ RelativeBias bias,
                                 const __grid_constant__ BatchParams batch, int table_blocks) {
  const int block = static_cast<int>(blockIdx.x) - table_blocks;
  if (block < 0) {
    const int thread = static_cast<int>(blockIdx.x) * kThreads + threadIdx.x;
    if (bias.prepared.position) copy_position_table(bias, thread, table_blocks * kThreads);
    if (bias.time.data) copy_time_table(bias, thread, table_blocks * kThreads);
    return;
  }
  const int parts = (static_cast<int>(gridDim.x) - table_blocks) / batch.batch;
  copy_times(bias, batch, block / parts, block % parts * kThreads + threadIdx.x, parts * kThreads);
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
  int64_t time_blocks = 0;
  if (bias.time.data) {
    const int64_t threads_of_sequence = std::max(batch.total_q, batch.total_k) / 8 / batch.batch;
    time_blocks = batch.batch * clamp(ceil_div(threads_of_sequence, kThreads), 1, multiprocessors);
  }
  launch_kernel(prepare_relative_bias_kernel,
                {.blocks = table_blocks + time_blocks, .threads = kThreads}, launch,
                "preparation of the relative bias", bias, batch, static_cast<int>(table_blocks));
}

}  // namespace hstu
