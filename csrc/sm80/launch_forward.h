// Host side of the forward: workspace, prepare(), and the choice of the kernel's form.
#pragma once

#include "forward.h"
#include "launch.h"

namespace hstu::sm80 {

template <int kHeadDim, DType kDType>
struct ForwardLauncher {
  using Element = ElementOf<kDType>;
  template <Memory kMemory, bool kHasBias = false>
  using Kernel = Forward<kHeadDim, Element, kMemory, kHasBias>;

  static constexpr int kLargeBytes = sizeof(typename Kernel<Memory::kLarge>::SharedMemory);

  static int64_t workspace_bytes(const ForwardParams& params, const CudaLaunch& launch) {
    Workspace workspace(nullptr);
    if (is_small(launch)) {
      take_list<Memory::kSmall>(workspace, params, launch);
    } else {
      take_list<Memory::kLarge>(workspace, params, launch);
    }
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

  // A batch whose items all find room on the GPU at once needs no list, and nothing prepared.
  template <Memory kMemory>
  static WorkList take_list(Workspace& workspace, const ForwardParams& params,
                            const CudaLaunch& launch) {
    using Form = Kernel<kMemory>;
    const BatchParams& batch = params.batch;
    const int64_t items =
        int64_t{WorkList::max_tiles(batch.total_q, batch.batch, Form::kRows)} * params.heads;
    WorkList list;
    list.capacity = static_cast<int>(items / params.heads);
    if (items > resident_blocks<Form>(launch) || is_given_by_row(params.mask)) {
      list = workspace.take_list(batch.total_q, batch.batch, Form::kRows);
      list.summaries = workspace.take_summaries(params.mask, batch, params.heads, Form::kRows);
    }
    list.parts = params.heads;
    return list;
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
    static_assert(Form::kRows == Kernel<kMemory>::kRows, "the workspace does not ask for rab");
    Workspace workspace(launch.workspace);
    const WorkList list = take_list<kMemory>(workspace, params, launch);
    int64_t blocks = int64_t{list.capacity} * params.heads;
    if (list.tiles) {
      PrepareParams prepared;
      prepared.batch = params.batch;
      prepared.mask = params.mask;
      prepared.list = list;
      prepared.tile_rows = Form::kRows;
      prepared.tile_keys = Form::kKeys;
      prepared.heads = params.heads;
      prepared.row_output = params.out;
      prepare(prepared, launch);
      blocks = persistent_blocks<Form>(launch, blocks);
    }
    launch_attention<Form>(run_forward<Form>, launch, blocks, "forward", params, list);
  }
};

template <int kHeadDim, DType kDType>
ForwardKernel forward() {
  using Launcher = ForwardLauncher<kHeadDim, kDType>;
  return {Launcher::workspace_bytes, Launcher::run};
}

}  // namespace hstu::sm80
