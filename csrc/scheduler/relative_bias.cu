#include "relative_bias.h"

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include <algorithm>

#include "../common/launch.h"

namespace hstu {
namespace {

constexpr int kThreads = 256;

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
  const int head_size = static_cast<int>(prepared.position_head_stride);
  for (int head = 0; head < bias.position.heads; ++head) {
    for (int n = thread; n < head_size; n += threads) {
      const int copy = n / prepared.position_copy_stride;
      const int entry = n % prepared.position_copy_stride + copy - 8;
      prepared.position[head * prepared.position_head_stride + n] =
          read_weight(bias.position, head, min(max(entry, 0), bias.position.size - 1));
    }
  }
}

__device__ void copy_time_table(const RelativeBias& bias, int thread, int threads) {
  for (int n = thread; n < bias.time.heads * bias.time.size; n += threads) {
    bias.prepared.time[n] = read_weight(bias.time, n / bias.time.size, n % bias.time.size);
  }
  for (int cell = thread; cell < kDifferenceCells; cell += threads) {
    bias.prepared.cells[cell] = find_bucket_cell(bias, cell);
  }
}

// Finds the ranges of `length` times, where time_of(n) is one.
template <typename TimeOf>
__device__ void find_ranges(int length, TimeRange* ranges, int thread, int threads,
                            TimeOf time_of) {
  for (int n = thread; n * 8 < length; n += threads) {
    const int64_t first = time_of(n * 8);
    TimeRange range = {first, first};
    for (int next = n * 8 + 1; next < min(n * 8 + 8, length); ++next) {
      const int64_t time = time_of(next);
      range.earliest = min(range.earliest, time);
      range.latest = max(range.latest, time);
    }
    ranges[n] = range;
  }
}

__device__ void find_ranges(const RelativeBias& bias, const BatchParams& batch, int b, int thread,
                            int threads) {
  const Sequence sequence = load_sequence(batch, b);
  const PreparedBias& prepared = bias.prepared;
  find_ranges(sequence.k_len, prepared.ranges + first_tile(sequence.k_begin, b, 8), thread, threads,
              [&](int key) { return bias.timestamps[sequence.k_begin + key]; });
  find_ranges(sequence.q_len, prepared.row_ranges + first_tile(sequence.q_begin, b, 8), thread,
              threads, [&](int row) { return time_of_row(bias, sequence, row); });
}

// One block of B + 1 copies the tables, the others find the ranges of a sequence.
__global__ void __launch_bounds__(kThreads)
    prepare_relative_bias_kernel(const __grid_constant__ RelativeBias bias,
                                 const __grid_constant__ BatchParams batch) {
  const int roles = batch.batch + 1;
  const int b = static_cast<int>(blockIdx.x) % roles;
  const int thread = static_cast<int>(blockIdx.x) / roles * kThreads + threadIdx.x;
  const int threads = static_cast<int>(gridDim.x) / roles * kThreads;
  if (b < batch.batch) {
    if (bias.time.data) find_ranges(bias, batch, b, thread, threads);
    return;
  }
  if (bias.position.data) copy_position_table(bias, thread, threads);
  if (bias.time.data) copy_time_table(bias, thread, threads);
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
  const int64_t ranges = bias.time.data ? batch.total_k / 8 : 0;
  const int64_t weights = bias.position.heads * bias.prepared.position_head_stride;
  const int64_t work = std::max(ranges / batch.batch, weights / 4);
  const int64_t blocks = clamp(ceil_div(work, kThreads), 1, launch.device.multiprocessors);
  launch_kernel(prepare_relative_bias_kernel,
                {.blocks = blocks * (batch.batch + 1), .threads = kThreads}, launch,
                "preparation of the relative bias", bias, batch);
}

}  // namespace hstu
