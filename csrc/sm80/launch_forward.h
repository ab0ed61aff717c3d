// Host side of the forward: chooses the kernel's form, lays out the workspace and launches the
// kernels.
#pragma once

#include "../common/attention_launch.h"
#include "forward.h"
#include "kernels.h"
#include "memory_switch.h"

namespace hstu::sm80 {

template <int kHeadDim, DType kDType, KeySource kSource>
struct ForwardLauncher {
  using Element = ElementOf<kDType>;
  template <Memory kMemory, bool kHasBias = false>
  using Kernel = Forward<kHeadDim, Element, kMemory, kHasBias, kSource>;

  static ForwardPlan plan(const ForwardParams& params, const CudaLaunch& launch) {
    return memory_switch<Kernel<Memory::kLarge>>(launch, [&](auto memory) {
      return bool_switch(params.rab.data, [&](auto has_bias) {
        return plan_kernel<Kernel<memory, has_bias>>(params, launch);
      });
    });
  }

 private:
  template <typename Form>
  static ForwardPlan plan_kernel(const ForwardParams& params, const CudaLaunch& launch) {
    Workspace workspace(nullptr);
    take_forward_list<Form>(workspace, params, launch);
    return {.workspace_bytes = workspace.used(), .split_kv = {}, .run = run<Form>};
  }

  template <typename Form>
  static void run(const ForwardPlan&, const ForwardParams& params, const CudaLaunch& launch) {
    Workspace workspace(launch.workspace);
    const WorkList list = take_forward_list<Form>(workspace, params, launch);
    const int64_t blocks = prepare_forward<Form>(list, params, launch);
    launch_attention<Form>(run_forward<Form>, launch, blocks, "forward", params, list);
  }
};

template <int kHeadDim, DType kDType>
ForwardKernel forward() {
  ForwardKernel kernel;
  kernel.plan = ForwardLauncher<kHeadDim, kDType, KeySource::kPacked>::plan;
  return kernel;
}

template <int kHeadDim, DType kDType>
ForwardKernel paged_forward() {
  ForwardKernel kernel;
  kernel.plan = ForwardLauncher<kHeadDim, kDType, KeySource::kPaged>::plan;
  return kernel;
}

}  // namespace hstu::sm80
