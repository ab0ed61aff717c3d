// The kernel that computes the gradient of a dense bias where the backward cannot store its own dS:
// if heads share a bias head, in fp16, and for rows that no tensor map can describe. With it, calls
// with shared bias heads take .42 to .60 of the time of the sm80 kernels, which would otherwise run
// (docs/log/sm90_backward.md).
//
// dRab = sum over heads of alpha * scale * M * dP * silu'(alpha * S). S and dP are computed once
// more, for one tile of rows and keys at a time and for all heads of a bias head, and the sum stays
// in registers: it is rounded once and has a fixed order.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "../common/activation.h"
#include "../common/launch.h"
#include "backward_traits.h"
#include "bias.h"
#include "masking.h"

namespace hstu::sm90 {

template <int kHeadDim_, typename Element_>
struct BiasGradient {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumers = 2;
  static constexpr int kRows = kConsumers * kWarpgroupRows;
  static constexpr int kKeys = BackwardTraits<kHeadDim, Element, DenseScoreBias,
                                              false>::kBlockKeys;  // its tensor maps are used
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr int kBlocksPerSm = 1;
  static constexpr Registers kRegisters = {.producer = 56, .consumer = 224};

  using Mma = SmemMma<Element, kKeys, kHeadDim>;  // rows by keys
  using Scores = decltype(partition_fragment_C(Mma{}, Shape<Int<kWarpgroupRows>, Int<kKeys>>{}));
  // A tile of a bias matrix, for all heads that share it.
  struct WorkTile {
    SequenceTile tile;  // sequence and sequence_index; index is not used
    int bias_head;
    int first_head;  // the first of the heads that share the bias head
    int first_row;   // a query row, a multiple of kRows; rows below 0 do not exist
    int first_key;
    bool is_visible;           // some row of some head sees some key
    bool is_full[kConsumers];  // all rows of a warpgroup see all keys, in every head
  };
  using WorkState = PipelineState<2>;
  using HeadState = PipelineState<kHeadDim <= 64 ? 2 : 1>;
  using BiasState = PipelineState<1>;

  struct SharedMemory {
    alignas(1024) Element q[HeadState::kStages][kRows * kHeadDim];
    alignas(1024) Element k[HeadState::kStages][kKeys * kHeadDim];
    alignas(1024) Element dout[HeadState::kStages][kRows * kHeadDim];
    alignas(1024) Element v[HeadState::kStages][kKeys * kHeadDim];
    alignas(1024) Element bias[kRows * kKeys];
    WorkTile work_tiles[WorkState::kStages];
    Pipeline<WorkState::kStages> pipeline_work;
    Pipeline<HeadState::kStages> pipeline_qk;      // Q and K
    Pipeline<HeadState::kStages> pipeline_dout_v;  // dO and V
    Pipeline<BiasState::kStages> pipeline_bias;
  };
  static_assert(sizeof(SharedMemory) <= kSharedMemory, "a block has 227 KB of shared memory");

  // Numbers of tiles of the bias matrices. Row tiles are aligned to query row 0, not to bias row 0.
  static HSTU_HOST_DEVICE int row_tiles(const DenseBias& bias) { return bias.length / kRows + 2; }
  static HSTU_HOST_DEVICE int key_tiles(const DenseBias& bias) {
    return ceil_div(bias.length, kKeys);
  }
  static HSTU_HOST_DEVICE int64_t tiles(const DenseBias& bias, int batch) {
    return int64_t{batch} * bias.heads * row_tiles(bias) * key_tiles(bias);
  }

  static HSTU_DEVICE void run(const BackwardParams& params, const BackwardMaps& maps,
                              const WorkList& list, SharedMemory& smem) {
    if (threadIdx.x == 0) {
      smem.pipeline_work.init(/*consumers=*/kConsumers * kWarpgroup);
      smem.pipeline_qk.init(/*consumers=*/kConsumers * 4 * kArrivalsOfWarp);
      smem.pipeline_dout_v.init(/*consumers=*/kConsumers * 4 * kArrivalsOfWarp);
      smem.pipeline_bias.init(/*consumers=*/kConsumers * 4 * kArrivalsOfWarp);
      cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    wait_for_previous_kernel();

    const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<kRegisters.producer>();
      if (threadIdx.x == 0) produce(params, maps, list, smem);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kRegisters.consumer>();
      consume(params, smem, warpgroup - 1);
    }
  }

 private:
  // Computes work tile number `work_index`. Called by one thread.
  static HSTU_DEVICE void find_work_tile(const BackwardParams& params, const WorkList& list,
                                         int64_t work_index, WorkTile& work_tile) {
    const DenseBias& bias = params.drab;
    const int key_tile = static_cast<int>(work_index % key_tiles(bias));
    work_index /= key_tiles(bias);
    const int row_tile = static_cast<int>(work_index % row_tiles(bias));
    work_index /= row_tiles(bias);
    const int heads = params.heads / bias.heads;
    work_tile.bias_head = static_cast<int>(work_index % bias.heads);
    work_tile.first_head = work_tile.bias_head * heads;
    work_tile.tile.sequence_index = static_cast<int>(work_index / bias.heads);
    work_tile.tile.sequence = load_sequence(params.batch, work_tile.tile.sequence_index);
    compiler_barrier();
    const Sequence& sequence = work_tile.tile.sequence;
    const int tiles_before = ceil_div(max(sequence.offset, 0), kRows);
    work_tile.first_row = (row_tile - tiles_before) * kRows;
    work_tile.first_key = key_tile * kKeys;
    work_tile.is_visible = false;
    for (int warpgroup = 0; warpgroup < kConsumers; ++warpgroup) {
      const int row = work_tile.first_row + warpgroup * kWarpgroupRows;
      // NOTE: tiles at the ends of the sequence are not full, because the bias continues past them.
      bool is_full =
          row + kWarpgroupRows <= sequence.q_len && work_tile.first_key + kKeys <= sequence.k_len;
      if (row >= 0 && row < sequence.q_len && work_tile.first_key < sequence.k_len) {
#pragma unroll 1
        for (int head = work_tile.first_head; head < work_tile.first_head + heads; ++head) {
          static_assert(kBackwardRows == kWarpgroupRows, "summaries are of a warpgroup's rows");
          const TileKind kind = list.classify<kWarpgroupRows, kKeys>(
              params.mask, work_tile.tile, head, row / kWarpgroupRows, key_tile);
          work_tile.is_visible |= kind != TileKind::kEmpty;
          is_full &= kind == TileKind::kFull;
        }
      } else {
        is_full = false;
      }
      work_tile.is_full[warpgroup] = is_full;
    }
  }

  // Computes the work tiles and copies their operands. Called by one thread.
  static HSTU_DEVICE void produce(const BackwardParams& params, const BackwardMaps& maps,
                                  const WorkList& list, SharedMemory& smem) {
    const int heads = params.heads / params.drab.heads;
    WorkState work_state;
    HeadState state;
    BiasState bias_state;
    for (int64_t n = blockIdx.x; n < tiles(params.drab, params.batch.batch); n += gridDim.x) {
      WorkTile& work_tile = smem.work_tiles[work_state.index()];
      smem.pipeline_work.producer_acquire(work_state);
      find_work_tile(params, list, n, work_tile);
      smem.pipeline_work.full[work_state.index()].arrive();
      work_state.advance();
      if (!work_tile.is_visible) continue;
      const Sequence& sequence = work_tile.tile.sequence;
      smem.pipeline_bias.producer_acquire(bias_state);
      auto& bias_full = smem.pipeline_bias.full[bias_state.index()];
      bias_full.arrive_and_expect_tx(kRows * kKeys * sizeof(Element));
      start_copy_bias<kRows, kKeys>(maps.bias, work_tile.tile.sequence_index, work_tile.bias_head,
                                    work_tile.first_row + sequence.offset, work_tile.first_key,
                                    smem.bias, bias_full);
      bias_state.advance();
#pragma unroll 1
      for (int head = work_tile.first_head; head < work_tile.first_head + heads; ++head) {
        const RaggedRows rows = {sequence.q_begin, sequence.q_len, head};
        const RaggedRows keys = {sequence.k_begin, sequence.k_len, head};
        const int stage = state.index();
        copy_both(maps.q, maps.k, rows, keys, work_tile, smem.q[stage], smem.k[stage],
                  smem.pipeline_qk, state);
        copy_both(maps.dout, maps.v, rows, keys, work_tile, smem.dout[stage], smem.v[stage],
                  smem.pipeline_dout_v, state);
        state.advance();
      }
    }
  }

  // Copies the operands of S or of dP.
  static HSTU_DEVICE void copy_both(const CUtensorMap& row_map, const CUtensorMap& key_map,
                                    const RaggedRows& rows, const RaggedRows& keys,
                                    const WorkTile& work_tile, Element* to_rows, Element* to_keys,
                                    Pipeline<HeadState::kStages>& pipeline, HeadState state) {
    pipeline.producer_acquire(state);
    auto& full = pipeline.full[state.index()];
    full.arrive_and_expect_tx((kRows + kKeys) * kHeadDim * sizeof(Element));
    start_copy_rows<kRows, kHeadDim, kWarpgroupRows>(row_map, rows, work_tile.first_row, to_rows,
                                                     full);
    start_copy_rows<kKeys, kHeadDim>(key_map, keys, work_tile.first_key, to_keys, full);
  }

  static HSTU_DEVICE void consume(const BackwardParams& params, SharedMemory& smem, int warpgroup) {
    const int heads = params.heads / params.drab.heads;
    const int own = warpgroup * kWarpgroupRows;
    WorkState work_state;
    HeadState state;
    BiasState bias_state;
    for (int64_t n = blockIdx.x; n < tiles(params.drab, params.batch.batch); n += gridDim.x) {
      smem.pipeline_work.consumer_wait(work_state);
      const WorkTile& work_tile = smem.work_tiles[work_state.index()];
      Scores sum;
      clear(sum);
      if (work_tile.is_visible) {
        smem.pipeline_bias.consumer_wait(bias_state);
#pragma unroll 1
        for (int h = 0; h < heads; ++h) {
          const int stage = state.index();
          const bool is_full = work_tile.is_full[warpgroup];
          const uint64_t visible = is_full ? 0 : find_visible(params, work_tile, h, own);
          // S = Q K^T + bias and dP = dO V^T
          Scores scores, gradients;
          load_bias<kKeys>(smem.bias + own * kKeys, scores);
          smem.pipeline_qk.consumer_wait(state);
          start_product(smem.q[stage] + own * kHeadDim, smem.k[stage], scores, GMMA::ScaleOut::One);
          smem.pipeline_dout_v.consumer_wait(state);
          start_product(smem.dout[stage] + own * kHeadDim, smem.v[stage], gradients,
                        GMMA::ScaleOut::Zero);
          wait_for_wgmma<1>(scores);
          smem.pipeline_qk.consumer_release_by_warp(state);
          // S = silu'(alpha * S)
          const float half_alpha = 0.5f * static_cast<float>(params.alpha);
#pragma unroll
          for (int i = 0; i < size(scores); ++i) {
            const float x = half_alpha * scores(i);
            scores(i) = silu_derivative_of_half(x, ptx::tanh_approx(x));
          }
          if (!is_full) apply_mask_to_scores<kKeys>(visible, scores);
          warpgroup_fence_operand(scores);  // computed while the second product runs
          wait_for_wgmma<0>(gradients);
          smem.pipeline_dout_v.consumer_release_by_warp(state);
          state.advance();
          // dRab += M * dP * silu'(alpha * S)
#pragma unroll
          for (int i = 0; i < size(sum); ++i) sum(i) += scores(i) * gradients(i);
        }
        smem.pipeline_bias.consumer_release_by_warp(bias_state);
        bias_state.advance();
      }
      store(params, work_tile, own, sum);
      smem.pipeline_work.consumer_release(work_state);
      work_state.advance();
    }
  }

  static HSTU_DEVICE void start_product(Element* rows, Element* keys, Scores& product,
                                        GMMA::ScaleOut scale) {
    start_gemm(Mma{}, rows_tensor<kWarpgroupRows, kHeadDim>(rows),
               rows_tensor<kKeys, kHeadDim>(keys), product, scale);
  }

  // The thread's row m, relative to the warpgroup's first row.
  static HSTU_DEVICE int row_of_thread(int m) {
    const int thread = reload_thread_idx() % kWarpgroup;
    return thread / 32 * 16 + thread % 32 / 4 + 8 * m;
  }

  // Returns which of 64 keys one row sees in head h of the work tile, as visible_to_lane() expects
  // it.
  static HSTU_DEVICE uint64_t find_visible(const BackwardParams& params, const WorkTile& work_tile,
                                           int h, int own) {
    const Sequence& sequence = work_tile.tile.sequence;
    const int thread = reload_thread_idx() % kWarpgroup;
    const int row = work_tile.first_row + own + thread / 32 * 16 + thread % 16;
    if (row < 0 || row >= sequence.q_len) return 0;
    return Mask(params.mask, sequence, work_tile.first_head + h)
        .row_bits(row, work_tile.first_key + thread % 32 / 16 * 64);
  }

  // Stores dRab = alpha * scale * sum, rounded, for the elements of the tile that are in the
  // matrix.
  static HSTU_DEVICE void store(const BackwardParams& params, const WorkTile& work_tile, int own,
                                Scores& sum) {
    const Sequence& sequence = work_tile.tile.sequence;
    auto matrix = as_matrix(sum);
    float scale = params.attn_scale ? params.attn_scale[0] : static_cast<float>(params.scale);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int row = work_tile.first_row + own + row_of_thread(m);
      if (params.attn_scale_per_row && row >= 0 && row < sequence.q_len) {
        scale = params.attn_scale[sequence.q_begin + row];
      }
      const float factor = static_cast<float>(params.alpha) * scale;
#pragma unroll
      for (int n = 0; n < size<1>(matrix); ++n) matrix(m, n) *= factor;
    }
    const DenseBias& drab = params.drab;
    Element* const to = static_cast<Element*>(drab.data) +
                        work_tile.tile.sequence_index * drab.batch_stride +
                        work_tile.bias_head * drab.head_stride + work_tile.first_key;
    const int first = work_tile.first_row + own + sequence.offset;  // may be negative
    const int columns = drab.length - work_tile.first_key;
    const bool is_aligned =
        drab.row_stride % 8 == 0 && columns % 8 == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0;
    if (is_aligned && first >= 0) {
      const PackedTensor rows = {to, drab.row_stride, 0, columns};
      store_sum<Element, kKeys>(sum, rows, 0, first, drab.length - first, 0);
      return;
    }
    const int lane_column = reload_thread_idx() % 4 * 2;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int i = first + row_of_thread(m);
      if (i < 0 || i >= drab.length) continue;
#pragma unroll
      for (int n = 0; n < size<1>(matrix); ++n) {
        const int column = n / 2 * 8 + lane_column + n % 2;
        if (column < columns) to[i * drab.row_stride + column] = static_cast<Element>(matrix(m, n));
      }
    }
  }
};

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    run_bias_gradient(const __grid_constant__ BackwardParams params,
                      const __grid_constant__ BackwardMaps maps, const WorkList list) {
  extern __shared__ __align__(1024) char smem[];
  Kernel::run(params, maps, list, *reinterpret_cast<typename Kernel::SharedMemory*>(smem));
}

}  // namespace hstu::sm90
