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
    return is_small(launch) ? Kernel<Memory::kSmall, false>::kRows
                            : Kernel<Memory::kLarge, false>::kRows;
  }

  template <Memory kMemory>
  static void run_form(const ForwardParams& params, const CudaLaunch& launch) {
    if (params.rab.data) {
      run_kernel<kMemory, true>(params, launch);
    } else {
      run_kernel<kMemory, false>(params, launch);
    }
  }

  template <Memory kMemory, bool kHasBias>
  static void run_kernel(const ForwardParams& params, const CudaLaunch& launch) {
    using Form = Kernel<kMemory, kHasBias>;
    static_assert(Form::kRows == Kernel<kMemory, false>::kRows,
                  "the workspace does not ask for rab");
    const BatchParams& batch = params.batch;
    PrepareParams prepared;
    prepared.batch = batch;
    prepared.mask = params.mask;
    prepared.list = Workspace(launch.workspace).take_list(batch.total_q, batch.batch, Form::kRows);
    prepared.list.parts = params.heads;
    prepared.tile_rows = Form::kRows;
    prepared.tile_keys = Form::kKeys;
    prepared.heads = params.heads;
    prepared.row_outputs[0] = params.out;
    prepare(prepared, launch);
    launch_persistent<Form>(run_forward<kHeadDim, Element, kMemory, kHasBias>, launch,
                            int64_t{prepared.list.capacity} * params.heads, "forward", params,
                            prepared.list);
  }
};

template <int kHeadDim, DType kDType>
ForwardKernel forward() {
  using Launcher = ForwardLauncher<kHeadDim, kDType>;
  return {Launcher::workspace_bytes, Launcher::run};
}

}  // namespace hstu::sm80
