#include "bias_bounds.h"

#include <cfloat>

#include "../common/device_math.h"
#include "../common/launch.h"
#include "../scheduler/work_list.h"

namespace hstu {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;  // rows of a block, with a dense bias

// The largest and the smallest of the finite numbers that were added, and of 0.
struct Extremes {
  float largest = 0;
  float smallest = 0;

  HSTU_DEVICE void add(float x) {
    if (!(fabsf(x) <= FLT_MAX)) return;
    largest = fmaxf(largest, x);
    smallest = fminf(smallest, x);
  }
  HSTU_DEVICE void add_lanes() {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      smallest = fminf(smallest, __shfl_xor_sync(~0u, smallest, step));
    }
  }
  // The bound of a bias with these extremes.
  HSTU_DEVICE float bound(double alpha) const {
    constexpr float kLeastSilu = 0.2785f;
    const float high = static_cast<float>(alpha) * largest;
    const float low = static_cast<float>(alpha) * smallest;
    return fmaxf(fmaxf(high, low), fminf(-fminf(high, low), kLeastSilu));
  }
};

// Adds the first `count` numbers of a row. Each lane of a warp adds a part of them.
template <typename Element>
HSTU_DEVICE void add_row(const Element* row, int count, Extremes& extremes) {
  constexpr int kPiece = 8;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int whole = count / kPiece * kPiece;
#pragma unroll 4
  for (int n = lane * kPiece; n < whole; n += 32 * kPiece) {
    const uint4 piece = __ldg(reinterpret_cast<const uint4*>(row + n));
    for (const uint32_t word : {piece.x, piece.y, piece.z, piece.w}) {
      extremes.add(low_half<Element>(word));
      extremes.add(high_half<Element>(word));
    }
  }
  if (whole + lane < count) extremes.add(static_cast<float>(row[whole + lane]));
}

// A warp finds the bound of a row.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    dense_bounds_kernel(const __grid_constant__ ForwardParams params) {
  const DenseBias& rab = params.rab;
  const int head = static_cast<int>(blockIdx.x) % rab.heads;
  SequenceTile tile;
  if (!find_row_tile(params.batch, blockIdx.x / rab.heads, kWarps, tile)) return;
  const Sequence& sequence = tile.sequence;
  const int row = tile.index * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (row >= sequence.q_len) return;
  const int first_head = head * (params.heads / rab.heads);
  const int keys = Mask(params.mask, sequence, first_head).estimate(row, row + 1).end;
  Extremes extremes;
  // NOTE: lengths on a GPU are not checked, and a sequence may be longer than the bias.
  if (const int position = row + sequence.offset; position < rab.length) {
    const auto* const bias = static_cast<const Element*>(rab.data) +
                             tile.sequence_index * rab.batch_stride + head * rab.head_stride +
                             position * rab.row_stride;
    add_row(bias, min(keys, rab.length), extremes);
  }
  extremes.add_lanes();
  if (threadIdx.x % 32 == 0) {
    params.fp8.bias_bounds[head * params.batch.total_q + sequence.q_begin + row] =
        extremes.bound(params.alpha);
  }
}

// The bound of a table of `size` entries.
HSTU_DEVICE float bound_of_table(const float* table, int size, double alpha) {
  __shared__ Extremes of_warps[kWarps];
  Extremes extremes;
  for (int n = static_cast<int>(threadIdx.x); n < size; n += kThreads) extremes.add(table[n]);
  extremes.add_lanes();
  __syncthreads();  // an earlier call has read `of_warps`
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = extremes;
  __syncthreads();
  for (const Extremes& other : of_warps) {
    extremes.add(other.largest);
    extremes.add(other.smallest);
  }
  return extremes.bound(alpha);
}

// A block finds the bound of a head.
__global__ void __launch_bounds__(kThreads)
    relative_bounds_kernel(const __grid_constant__ ForwardParams params) {
  const int head = static_cast<int>(blockIdx.x);
  const RelativeBias& bias = params.relative_bias;
  const PreparedBias& prepared = bias.prepared;
  float bound = 0;
  if (bias.position.data) {
    const int table_head = head / (params.heads / bias.position.heads);
    bound += bound_of_table(
        prepared.position + table_head * prepared.position_head_stride + prepared.position_margin,
        bias.position.size, params.alpha);
  }
  if (bias.time.data) {
    const int table_head = head / (params.heads / bias.time.heads);
    bound += bound_of_table(prepared.time + int64_t{table_head} * bias.time.size, bias.time.size,
                            params.alpha);
  }
  if (threadIdx.x == 0) params.fp8.bias_bounds[head] = bound;
}

}  // namespace

void find_bias_bounds(const ForwardParams& params, const CudaLaunch& launch) {
  constexpr const char* kName = "bounds of a bias";
  LaunchConfig config = {.blocks = params.heads, .threads = kThreads};
  if (!params.rab.data) {
    return launch_kernel(relative_bounds_kernel, config, launch, kName, params);
  }
  const BatchParams& batch = params.batch;
  config.blocks =
      int64_t{WorkList::max_tiles(batch.total_q, batch.batch, kWarps)} * params.rab.heads;
  if (params.rab.dtype == DType::kFloat16) {
    launch_kernel(dense_bounds_kernel<cutlass::half_t>, config, launch, kName, params);
  } else {
    launch_kernel(dense_bounds_kernel<cutlass::bfloat16_t>, config, launch, kName, params);
  }
}

}  // namespace hstu
