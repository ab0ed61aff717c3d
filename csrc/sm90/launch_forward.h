// Host side of the forward: workspace, prepare(), and tensor maps.
#pragma once

#include "../common/attention_launch.h"
#include "forward.h"
#include "kernels.h"

namespace hstu::sm90 {

template <int kHeadDim, DType kDType>
struct ForwardLauncher {
  template <bool kHasBias>
  using Kernel = Forward<kHeadDim, ElementOf<kDType>, kHasBias>;

  static int64_t workspace_bytes(const ForwardParams& params, const CudaLaunch& launch) {
    Workspace workspace(nullptr);
    if (params.rab.data) {
      take_forward_list<Kernel<true>>(workspace, params, launch);
    } else {
      take_forward_list<Kernel<false>>(workspace, params, launch);
    }
    return workspace.used();
  }

  static void run(const ForwardParams& params, const CudaLaunch& launch) {
    params.rab.data ? run_form<true>(params, launch) : run_form<false>(params, launch);
  }

 private:
  template <bool kHasBias>
  static void run_form(const ForwardParams& params, const CudaLaunch& launch) {
    using Form = Kernel<kHasBias>;
    Workspace workspace(launch.workspace);
    const WorkList list = take_forward_list<Form>(workspace, params, launch);
    const int64_t blocks = prepare_forward<Form>(list, params, launch);
    const int heads = params.heads;
    ForwardMaps maps = {};
    maps.q = make_ragged_map<kHeadDim>(params.q, heads, kWarpgroupRows, kDType);
    maps.k = make_ragged_map<kHeadDim>(params.k, heads, Form::kKeys, kDType);
    maps.v = make_ragged_map<kHeadDim>(params.v, heads, Form::kKeys, kDType);
    if constexpr (kHasBias) maps.bias = make_bias_map(params.rab, params.batch.batch);
    launch_attention<Form>(run_forward<Form>, launch, blocks, "forward", params, maps, list);
  }
};

template <int kHeadDim, DType kDType>
ForwardKernel forward() {
  using Launcher = ForwardLauncher<kHeadDim, kDType>;
  return {Launcher::workspace_bytes, Launcher::run};
}

}  // namespace hstu::sm90
