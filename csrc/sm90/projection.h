// Linear maps of e4m3 rows, with epilogues for a layer:
//
//   z = x_descale[row] * weight_descale[column] * (x8 W8^T) + bias, in bf16
//
// The projection to u, v, q and k also quantizes silu(z) of v, q and k for FP8 attention, with the
// scales of quantize_qkv() in mode kBlock. Its SiLU has an absolute error of 2^-12 |z|. The output
// map adds the residual to z.
//
// A work tile has 128 rows of one sequence, 64 for each of two consumer warpgroups, and 256
// columns. The warpgroups take turns (a ping-pong schedule): while the products of one run, the
// other has its epilogue. The two blocks of a cluster have the same columns, so that each copies
// one half of the weight's rows to both.
//
// The 128 rows of a head share a scale, and the warpgroups find their magnitudes one after the
// other. So a warpgroup keeps SiLU of its rows, in 16 bits, until its next products have run: then
// the magnitudes of the other warpgroup are known, too. To read:
//
//   projection_traits.h      tiles and shared memory
//   projection_producer.h    which rows a work tile has, and the copies
//   projection_consumers.h   the products, and the epilogue with the quantization
//   launch_projection.h      the host side
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "../common/launch.h"
#include "projection_consumers.h"
#include "projection_producer.h"

namespace hstu::sm90 {

// The kernel of the projection to heads of kHeadDim columns or, if kHeadDim is 0, of the output
// map.
template <int kHeadDim>
struct Projection : ProjectionTraits<kHeadDim> {
  using Traits = ProjectionTraits<kHeadDim>;
  using SharedMemory = typename Traits::SharedMemory;
  using Traits::kClusterSize;

  static HSTU_DEVICE void run(const ProjectionParams& params, const ProjectionMaps& maps,
                              SharedMemory& smem) {
    if (threadIdx.x == 0) {
      smem.pipeline.init(kClusterSize * 4 * kArrivalsOfWarp);
      for (auto& slot : smem.has_largest) {
        for (auto& barrier : slot) barrier.init(4 * kArrivalsOfWarp);
      }
      cutlass::arch::fence_barrier_init();
      cute::prefetch_tma_descriptor(&maps.x);
      cute::prefetch_tma_descriptor(&maps.weight);
    }
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
    wait_for_previous_kernel();
    if (warp == 0) ProjectionProducer<Traits>::count_blocks(params, smem);
    __syncthreads();
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
    if (warp < 4) {
      cutlass::arch::warpgroup_reg_dealloc<24>();
      if (warp == 0) ProjectionProducer<Traits>::run(params, maps, smem);
    } else {
      cutlass::arch::warpgroup_reg_alloc<240>();
      ProjectionConsumer<Traits>(params, smem, warp / 4 - 1).run();
    }
    // The other block of the cluster may still copy to this one, or arrive at its barriers.
    cute::cluster_arrive();
    cute::cluster_wait();
  }
};

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    run_projection(const __grid_constant__ ProjectionParams params,
                   const __grid_constant__ ProjectionMaps maps) {
  extern __shared__ __align__(1024) char smem[];
  Kernel::run(params, maps, *reinterpret_cast<typename Kernel::SharedMemory*>(smem));
}

}  // namespace hstu::sm90
