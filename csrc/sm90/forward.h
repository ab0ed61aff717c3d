// The fused forward: O = (M * silu(alpha * (Q K^T + bias)) * scale) V.
//
// A work item is a tile of rows of one head, 64 rows for each of two or three consumer warpgroups.
// In the producer warpgroup, one warp finds the items and which tiles of keys they see, and a
// thread of each other warp copies Q, K or V by TMA. Consumers multiply by wgmma; scores and P
// never leave the registers.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "../common/launch.h"
#include "../common/zero.h"
#include "forward_consumers.h"
#include "forward_producers.h"

namespace hstu::sm90 {

template <int kHeadDim, typename Element, bool kHasBias_, KeyForm kForm = KeyForm{}>
struct Forward : ForwardTraits<kHeadDim, Element, kHasBias_, kForm> {
  using Traits = ForwardTraits<kHeadDim, Element, kHasBias_, kForm>;
  using Traits::kConsumers;
  using Traits::kHasBias;
  using Traits::kIsPaged;
  using Traits::kRegisters;
  using typename Traits::SharedMemory;

  static HSTU_DEVICE void run(const ForwardParams& params, const ForwardMaps& maps,
                              const WorkList& list, const SplitKV& split_kv, SharedMemory& smem) {
    constexpr int kConsumerWarps = kConsumers * 4;
    if (threadIdx.x == 0) {
      Traits::init(smem);
      prefetch_map(maps.q);
      prefetch_map(maps.k);
      prefetch_map(maps.v);
      if constexpr (kHasBias) prefetch_map(maps.bias);
      if constexpr (kIsPaged) prefetch_map(maps.pages.map);
    }
    __syncthreads();
    if (!list.tiles) wait_for_previous_kernel();  // else before the list is read

    // NOTE: by a shuffle, so that the compiler knows it to be the same in all lanes.
    const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<kRegisters.producer>();
      ForwardProducers<Traits>::run(params, maps, list, split_kv, smem);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kRegisters.consumer>();
      ForwardConsumers<Traits>::run(params, split_kv, smem, warpgroup - 1);
      if (!list.tiles) {  // nothing else ran before
        const int warp =
            static_cast<int>(blockIdx.x) * kConsumerWarps + static_cast<int>(threadIdx.x) / 32 - 4;
        zero_unowned_rows<RowsOf::kQueries>(params.batch, params.out, params.heads, warp,
                                            static_cast<int>(gridDim.x) * kConsumerWarps);
      }
    }
  }
};

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    run_forward(const __grid_constant__ ForwardParams params,
                const __grid_constant__ ForwardMaps maps, const WorkList list,
                const __grid_constant__ SplitKV split_kv) {
  extern __shared__ __align__(1024) char smem[];
  Kernel::run(params, maps, list, split_kv,
              *reinterpret_cast<typename Kernel::SharedMemory*>(smem));
}

}  // namespace hstu::sm90
