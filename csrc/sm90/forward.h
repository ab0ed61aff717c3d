// The fused forward: O = (M * silu(alpha * (Q K^T + bias)) * scale) V.
//
// A work tile is a tile of rows of one head, 64 rows for each of one to four consumer warpgroups.
// The producer warpgroup schedules work tiles and copies Q, K and V by TMA; consumers multiply by
// wgmma. To read:
//
//   tensor_map.h, pipeline.h      copies and barriers
//   forward_traits.h              tiles, shared memory, and five invariants
//   forward_consumers.h           S, activation, mask, O: the main loop
//   weights.h, masking.h          how P is activated, rounded and masked, in 16 bits and in e4m3
//   forward_producers.h           copies of Q, K and V, and the conversion of e4m3 pages
//   tile_scheduler.h              which work tiles a block gets
//   epilogue.h                    how O is stored, and how the partial O of splits are added
//   key_source.h, score_bias.h    policies: packed, paged or e4m3 keys; a bias or none
//   e4m3_pages.h                  pages of e4m3 that are multiplied without conversion
//   position_score_bias.h         how consumers add weights by position alone
//   relative_score_bias.h         how consumers compute a relative bias with weights by time
//   split_heuristic.h             how many splits there are
//   launch_forward.h              the host side
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "../common/launch.h"
#include "../common/zero.h"
#include "forward_consumers.h"
#include "forward_producers.h"

namespace hstu::sm90 {

template <int kHeadDim, typename Element, typename Source, typename Bias,
          SplitKVReduction kReduction = SplitKVReduction::kNone, int kClusterSize = 1,
          bool kHasSmallTiles = false, bool kIsClosedForm = false>
struct Forward : ForwardTraits<kHeadDim, Element, Source, Bias, kReduction, kClusterSize,
                               kHasSmallTiles, kIsClosedForm> {
  using Traits = ForwardTraits<kHeadDim, Element, Source, Bias, kReduction, kClusterSize,
                               kHasSmallTiles, kIsClosedForm>;
  using SharedMemory = typename Traits::SharedMemory;

  static HSTU_DEVICE void run(const ForwardParams& params, const ForwardMaps& maps,
                              const SchedulerMetadata& metadata, SharedMemory& smem) {
    constexpr bool kMovesRegisters = Traits::kRegisters.consumer > 0;
    const bool has_list = metadata.list.tiles != nullptr;
    if (threadIdx.x == 0) {
      Traits::init(smem);
      cute::prefetch_tma_descriptor(&maps.q);
      cute::prefetch_tma_descriptor(&maps.k);
      cute::prefetch_tma_descriptor(&maps.v);
      Bias::prefetch(maps);
      if constexpr (Source::kIsPaged) cute::prefetch_tma_descriptor(&maps.pages.map);
    }
    if constexpr (Traits::kHasTimeBias) Traits::clear_bias(params.relative_bias, smem);
    __syncthreads();
    // With a list, the scheduler waits before it reads the list. After a quantization, the warps
    // that read codes or scales wait.
    if (!has_list && !Traits::kFollowsQuantization) wait_for_previous_kernel();

    // NOTE: after a shuffle, the compiler knows that all lanes have the same value.
    const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (warpgroup == 0) {
      if constexpr (kMovesRegisters) {
        cutlass::arch::warpgroup_reg_dealloc<Traits::kRegisters.producer>();
      }
      ForwardProducer<Traits>::run(params, maps, metadata, smem);
    } else if (Traits::kHasConverter && warpgroup > Traits::kConsumers) {
      if constexpr (Traits::kHasConverter) {
        cutlass::arch::warpgroup_reg_dealloc<Traits::kRegisters.converter>();
        convert_pages<Traits>(smem);
      }
    } else {
      if constexpr (kMovesRegisters) {
        cutlass::arch::warpgroup_reg_alloc<Traits::kRegisters.consumer>();
      }
      ForwardConsumer<Traits>(params, metadata, smem, warpgroup - 1).run();
      if (!has_list) {  // without a list, prepare_scheduler() has not zeroed these rows
        const int warp = static_cast<int>(blockIdx.x) * Traits::kConsumerWarps +
                         static_cast<int>(threadIdx.x) / 32 - 4;
        zero_unowned_rows<RowsOf::kQueries>(params.batch, params.out, params.heads, warp,
                                            static_cast<int>(gridDim.x) * Traits::kConsumerWarps);
      }
    }
  }
};

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocksPerSm)
    run_forward(const __grid_constant__ ForwardParams params,
                const __grid_constant__ ForwardMaps maps,
                const __grid_constant__ SchedulerMetadata metadata) {
  extern __shared__ __align__(1024) char smem[];
  Kernel::run(params, maps, metadata, *reinterpret_cast<typename Kernel::SharedMemory*>(smem));
}

}  // namespace hstu::sm90
