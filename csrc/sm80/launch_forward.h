// Host side of the forward: chooses the kernel's form, lays out the workspace and launches the
// kernels.
#pragma once

#include "../common/attention_launch.h"
#include "../common/static_switch.h"
#include "../scheduler/attention_list.h"
#include "forward.h"
#include "kernels.h"
#include "tiling_switch.h"

namespace hstu::sm80 {

template <int kHeadDim, DType kDType, KeySource kSource>
struct ForwardLauncher {
  using Element = ElementOf<kDType>;
  template <Tiling kTiling, ScoreBias kBias>
  using Kernel = Forward<kHeadDim, Element, kTiling, kBias, kSource>;

  static ForwardPlan plan(const ForwardParams& params, const CudaLaunch& launch) {
    return bias_switch(params, [&](auto bias) {
      if constexpr (kSource == KeySource::kPacked && bias != ScoreBias::kRelative) {
        const int longest = longest_if_short(params, launch);
        using UpTo32 = Kernel<Tiling::kUpTo32, bias>;
        if (longest <= 32 && fits<UpTo32>(launch)) return plan_kernel<UpTo32>(params, launch);
        if constexpr (kHeadDim >= 128) {
          using UpTo64 = Kernel<Tiling::kUpTo64, bias>;
          if (longest <= 64 && fits<UpTo64>(launch)) return plan_kernel<UpTo64>(params, launch);
        }
        if constexpr (kHeadDim <= 128) {
          using UpTo512 = Kernel<Tiling::kUpTo512, bias>;
          if (gains_by_short_forward(params, launch)) {
            return plan_kernel<UpTo512>(params, launch);
          }
        }
      }
      return tiling_switch<Kernel<Tiling::kLarge, bias>>(
          launch, [&](auto tiling) { return plan_kernel<Kernel<tiling, bias>>(params, launch); });
    });
  }

 private:
  template <typename Form>
  static ForwardPlan plan_kernel(const ForwardParams& params, const CudaLaunch& launch) {
    ForwardPlan plan;
    plan.prepare = prepare<Form>;
    plan.run = run<Form>;
    if constexpr (!Form::kIsShort) {
      Workspace workspace(nullptr);
      ForwardParams laid_out = params;
      take_workspace<Form>(workspace, launch, laid_out);
      plan.workspace_bytes = workspace.used();
    }
    return plan;
  }

  // Takes the memory of the work list and of the prepared bias.
  template <typename Form>
  static WorkList take_workspace(Workspace& workspace, const CudaLaunch& launch,
                                 ForwardParams& params) {
    const WorkList list = take_forward_list<Form>(workspace, params, launch);
    if constexpr (Form::kHasRelativeBias) {
      RelativeBias& bias = params.relative_bias;
      bias.prepared = take_prepared_bias(workspace, bias, params.batch);
    }
    return list;
  }

  template <typename Form>
  static bool prepare(const ForwardPlan&, const ForwardParams& given, const CudaLaunch& launch) {
    if constexpr (Form::kIsShort) return false;
    Workspace workspace(launch.workspace);
    ForwardParams params = given;
    const WorkList list = take_workspace<Form>(workspace, launch, params);
    if constexpr (Form::kHasRelativeBias) {
      prepare_relative_bias(params.relative_bias, params.batch, launch);
    }
    return prepare_forward<Form>(list, params, launch);
  }

  template <typename Form>
  static void run(const ForwardPlan&, const ForwardParams& given, const CudaLaunch& launch) {
    if constexpr (Form::kIsShort) {
      const int tiles = std::max(1, ceil_div(given.batch.max_seqlen_q, Form::kRows));
      launch_attention<Form>(run_forward<Form>, launch, dim3(given.batch.batch, given.heads, tiles),
                             "forward", given, WorkList{});
      return;
    }
    Workspace workspace(launch.workspace);
    ForwardParams params = given;
    const WorkList list = take_workspace<Form>(workspace, launch, params);
    launch_attention<Form>(run_forward<Form>, launch, forward_blocks<Form>(list, launch), "forward",
                           params, list);
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
