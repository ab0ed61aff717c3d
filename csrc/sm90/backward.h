// The fused backward: it recomputes the scores and computes dQ, dK and dV in one pass.
//
// A work tile is a tile of keys of one head, whose dK and dV stay in registers. S and dP are
// computed transposed, keys by rows, so that P^T and dS^T are in the registers that the products
// for dV and dK read as A operands. dS goes through shared memory for dQ = dS K; TMA reductions add
// each tile of dQ to an accumulator in device memory, in fp32 (bf16 in backward_e4m3.h), which
// convert_dq scales and rounds.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "../common/launch.h"
#include "backward_bias.h"
#include "backward_cluster.h"
#include "backward_consumers.h"
#include "backward_e4m3.h"
#include "backward_producers.h"

namespace hstu::sm90 {

template <int kHeadDim_, typename Element_, typename Bias_, bool kIsDeterministic_,
          typename Out_ = Element_, bool kIsClosedForm_ = false, bool kStoresDq_ = false>
struct Backward : BackwardTraits<kHeadDim_, Element_, Bias_, kIsDeterministic_, Out_,
                                 kIsClosedForm_, kStoresDq_> {
  using Traits = BackwardTraits<kHeadDim_, Element_, Bias_, kIsDeterministic_, Out_, kIsClosedForm_,
                                kStoresDq_>;
  template <typename T>
  using Consumers16 =
      std::conditional_t<T::kIsCluster, BackwardClusterConsumers<T>, BackwardConsumers<T>>;
  using Consumers = typename std::conditional_t<Traits::kIsE4m3,
                                                std::type_identity<BackwardE4m3Consumers<Traits>>,
                                                std::type_identity<Consumers16<Traits>>>::type;
  using typename Traits::SharedMemory;
  using DqMma = typename Consumers::DqMma;

  static HSTU_DEVICE void run(const BackwardParams& params, const typename Traits::Maps& maps,
                              const BackwardBuffers& buffers, SharedMemory& smem) {
    if (threadIdx.x == 0) {
      Traits::init(params, smem);
      cute::prefetch_tma_descriptor(&maps.q);
      cute::prefetch_tma_descriptor(&maps.k);
      cute::prefetch_tma_descriptor(&maps.v);
      cute::prefetch_tma_descriptor(&maps.dout);
      Traits::Bias::prefetch(maps);
    }
    sync_blocks();  // the barriers are initialized
    // Without a list, only the threads that add dQ need what prepare_scheduler() writes; and if the
    // consumers store dQ, that kernel does not run.
    if (!Traits::is_unlisted(buffers.list) || Traits::kStoresDq) wait_for_previous_kernel();

    // NOTE: the shuffle tells the compiler that the value is the same in all lanes.
    const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::kRegisters.producer>();
      BackwardProducers<Traits>::run(params, maps, buffers, smem);
    } else if (Traits::kHasRelativeBias && warpgroup > Traits::kConsumers) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::kRegisters.bias>();
      if constexpr (Traits::kHasRelativeBias) {
        BackwardBias<Traits>::run(params, buffers, smem, warpgroup - Traits::kConsumers - 1);
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<Traits::kRegisters.consumer>();
      Consumers::run(params, buffers, smem, warpgroup - 1);
      if constexpr (Traits::kStoresDq) zero_unowned_rows_of_gradients(params);
    }
    // NOTE: a block must not exit while the other block still writes to its shared memory.
    if constexpr (Traits::kIsCluster) sync_blocks();
  }

 private:
  // Does what prepare_scheduler() does otherwise. Called by all consumers.
  static HSTU_DEVICE void zero_unowned_rows_of_gradients(const BackwardParams& params) {
    const int warp = static_cast<int>(blockIdx.x) * Traits::kConsumerWarps +
                     static_cast<int>(threadIdx.x) / 32 - 4;
    const int warps = static_cast<int>(gridDim.x) * Traits::kConsumerWarps;
    zero_unowned_rows<RowsOf::kQueries>(params.batch, params.dq, params.heads, warp, warps);
    zero_unowned_rows<RowsOf::kKeys>(params.batch, params.dk, params.heads, warp, warps);
    zero_unowned_rows<RowsOf::kKeys>(params.batch, params.dv, params.heads, warp, warps);
  }

  // Called by all threads of the block, or of the cluster.
  static HSTU_DEVICE void sync_blocks() {
    if constexpr (Traits::kIsCluster) {
      cute::cluster_sync();
    } else {
      __syncthreads();
    }
  }
};

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    run_backward(const __grid_constant__ BackwardParams params,
                 const __grid_constant__ typename Kernel::Maps maps,
                 const __grid_constant__ BackwardBuffers buffers) {
  extern __shared__ __align__(1024) char smem[];
  Kernel::run(params, maps, buffers, *reinterpret_cast<typename Kernel::SharedMemory*>(smem));
}

// Scales and rounds a block's tile of dQ: one row tile of one head. The sums of row `r` of the
// sequence are multiplied by factor_of(tile, head, r).
template <typename Kernel, typename Factor>
HSTU_DEVICE void convert_dq_tile(const BackwardParams& params, const float* sums,
                                 Factor factor_of) {
  using Dq = typename Kernel::Dq;
  wait_for_previous_kernel();
  const int tile_index = blockIdx.x / params.heads;
  const int head = blockIdx.x % params.heads;
  SequenceTile work;
  if (!find_row_tile(params.batch, tile_index, Kernel::kRows, work)) return;

  const int part = threadIdx.x / kWarpgroup;
  const int thread = threadIdx.x % kWarpgroup;
  const int first = work.index * Kernel::kRows;
  // A thread has pairs of columns of two rows.
  const int row = first + thread / 32 * 16 + thread % 32 / 4;
  const float factors[2] = {factor_of(work, head, row), factor_of(work, head, row + 8)};
  Tensor dq = partition_fragment_C(typename Kernel::DqMma{},
                                   Shape<Int<kWarpgroupRows>, Int<Dq::kColumns>>{});
  using Element = typename Kernel::DqElement;
  constexpr int kPiece = 16 / sizeof(Element);
  const Element* const from = reinterpret_cast<const Element*>(sums) +
                              int64_t{blockIdx.x} * Dq::kSize + part * Dq::kPartSize +
                              thread * kPiece;
#pragma unroll
  for (int n = 0; n < size(dq); n += kPiece) {
    const auto piece =
        *reinterpret_cast<const cutlass::AlignedArray<Element, kPiece>*>(from + n * kWarpgroup);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      dq(n + i) = static_cast<float>(piece[i]) * factors[(n + i) / 2 % 2];
    }
  }
  store_sum<typename Kernel::Out, Dq::kColumns>(dq, params.dq, head, work.sequence.q_begin + first,
                                                work.sequence.q_len - first, part * Dq::kColumns);
}

// dQ = alpha * scale * sum
template <typename Kernel>
__global__ void __launch_bounds__(Kernel::Dq::kParts* kWarpgroup)
    convert_dq(const __grid_constant__ BackwardParams params, const float* sums) {
  convert_dq_tile<Kernel>(params, sums, [&](const SequenceTile&, int, int) {
    return Kernel::Consumers::factor_of_ds(params);
  });
}

// convert_dq() for the backward in e4m3, with the factors of the sequence and head and of the row.
template <typename Kernel>
__global__ void __launch_bounds__(Kernel::Dq::kParts* kWarpgroup)
    convert_e4m3_dq(const __grid_constant__ BackwardParams params,
                    const __grid_constant__ E4m3Descales descales, const float* sums) {
  convert_dq_tile<Kernel>(params, sums, [&](const SequenceTile& tile, int head, int row) {
    const Sequence& sequence = tile.sequence;
    if (row >= sequence.q_len) return 0.0f;
    const E4m3Factors factors = find_factors(descales, sequence, tile.sequence_index, head,
                                             Kernel::kHeadDim, static_cast<float>(params.alpha));
    return factors.dq * Kernel::Consumers::factor_of_ds(params) *
           descales.dout_row_scale[head * descales.total_q + sequence.q_begin + row];
  });
}

}  // namespace hstu::sm90
