// Host side of the forward: chooses the kernel's form, lays out the workspace and launches the
// kernels.
#pragma once

#include "../common/attention_launch.h"
#include "forward.h"
#include "kernels.h"

namespace hstu::sm80 {

template <int kHeadDim, DType kDType, KeySource kSource>
struct ForwardLauncher {
  using Element = ElementOf<kDType>;
  template <Memory kMemory, bool kHasBias = false>
  using Kernel = Forward<kHeadDim, Element, kMemory, kHasBias, kSource>;

  static constexpr int kLargeBytes = sizeof(typename Kernel<Memory::kLarge>::SharedMemory);

  static int64_t workspace_bytes(const ForwardParams& params, const CudaLaunch& launch) {
    Workspace workspace(nullptr);
    if (is_small(launch)) {
      take_forward_list<Kernel<Memory::kSmall>>(workspace, params, launch);
    } else {
      take_forward_list<Kernel<Memory::kLarge>>(workspace, params, launch);
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
    const WorkList list = take_forward_list<Kernel<kMemory>>(workspace, params, launch);
    const int64_t blocks = prepare_forward<Form>(list, params, launch);
    launch_attention<Form>(run_forward<Form>, launch, blocks, "forward", params, list);
  }
};

template <int kHeadDim, DType kDType>
ForwardKernel forward() {
  using Launcher = ForwardLauncher<kHeadDim, kDType, KeySource::kPacked>;
  return {Launcher::workspace_bytes, Launcher::run};
}

template <int kHeadDim, DType kDType>
ForwardKernel paged_forward() {
  using Launcher = ForwardLauncher<kHeadDim, kDType, KeySource::kPaged>;
  return {Launcher::workspace_bytes, Launcher::run};
}

}  // namespace hstu::sm80
