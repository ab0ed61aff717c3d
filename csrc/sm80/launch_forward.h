// Host side of the forward: workspace, prepare(), and the choice of the kernel's form.
#pragma once

#include "forward.h"
#include "launch.h"

namespace hstu::sm80 {

template <int kHeadDim, DType kDType>
struct ForwardLauncher {
  using Element = ElementOf<kDType>;
  template <Memory kMemory, bool kHasBias>
  using Kernel = Forward<kHeadDim, Element, kMemory, kHasBias>;

  static constexpr int kLargeBytes = sizeof(typename Kernel<Memory::kLarge, false>::SharedMemory);

  static int64_t workspace_bytes(const ForwardParams& params, const CudaLaunch& launch) {
    Workspace workspace(nullptr);
    workspace.take_list(params.batch.total_q, params.batch.batch, rows_of_a_tile(launch));
    return workspace.used();
  }

  static void run(const ForwardParams& params, const CudaLaunch& launch) {
    if constexpr (kLargeBytes > kSmallMemory) {
      if (is_small(launch)) return run_form<Memory::kSmall>(params, launch);
    }
    run_form<Memory::kLarge>(params, launch);
  }

 private:
  static bool is_small(const CudaLaunch& launch) {
    return launch.device.shared_memory_bytes < kLargeBytes;
  }

  static int rows_of_a_tile(const CudaLaunch& launch) {
    return is_small(launch) ? forward_tiles<kHeadDim, Memory::kSmall>().rows
                            : forward_tiles<kHeadDim, Memory::kLarge>().rows;
  }

  template <Memory kMemory>
  static void run_form(const ForwardParams& params, const CudaLaunch& launch) {
    constexpr ForwardTiles kTiles = forward_tiles<kHeadDim, kMemory>();
    PrepareParams prepared;
    prepared.batch = params.batch;
    prepared.mask = params.mask;
    prepared.list =
        Workspace(launch.workspace).take_list(params.batch.total_q, params.batch.batch, kTiles.rows);
    prepared.list.parts = params.heads;
    prepared.tile_rows = kTiles.rows;
    prepared.tile_keys = kTiles.keys;
    prepared.heads = params.heads;
    prepared.row_outputs[0] = params.out;
    prepare(prepared, launch);

    const int64_t items = int64_t{prepared.list.capacity} * params.heads;
    if (params.rab.data) {
      launch_persistent<Kernel<kMemory, true>>(run_forward<kHeadDim, Element, kMemory, true>,
                                               launch, items, "forward", params, prepared.list);
    } else {
      launch_persistent<Kernel<kMemory, false>>(run_forward<kHeadDim, Element, kMemory, false>,
                                                launch, items, "forward", params, prepared.list);
    }
  }
};

template <int kHeadDim, DType kDType>
ForwardKernel forward() {
  using Launcher = ForwardLauncher<kHeadDim, kDType>;
  return {Launcher::workspace_bytes, Launcher::run};
}

}  // namespace hstu::sm80
