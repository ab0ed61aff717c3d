// Host side of the forward: workspace, prepare(), and tensor maps.
#pragma once

#include "../common/attention_launch.h"
#include "forward.h"
#include "kernels.h"

namespace hstu::sm90 {

template <int kHeadDim, DType kDType, KeySource kSource>
struct ForwardLauncher {
  template <bool kHasBias, int kSplits = 1>
  using Kernel = Forward<kHeadDim, ElementOf<kDType>, kHasBias, kSource, kSplits>;

  static int64_t workspace_bytes(const ForwardParams& params, const CudaLaunch& launch) {
    Workspace workspace(nullptr);
    if (splits_keys(params)) return 0;
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
  // Whether few rows are to meet many keys: then blocks share the keys of a
  // tile of rows. By nothing that differs between the calls of a captured
  // graph, nor by what else is in the batch, so that sums are always made in
  // the same order.
  static bool splits_keys(const ForwardParams& params) {
    return kSource == KeySource::kPaged && params.batch.max_seqlen_q <= kFewRows &&
           !is_given_by_row(params.mask);
  }

  template <bool kHasBias>
  static void run_form(const ForwardParams& params, const CudaLaunch& launch) {
    if constexpr (kSource == KeySource::kPaged) {
      if (splits_keys(params)) {
        using Form = Kernel<kHasBias, kKeySplits>;
        WorkList list;  // none: a cluster for each tile of rows
        list.parts = params.heads;
        list.capacity = WorkList::max_tiles(params.batch.total_q, params.batch.batch, Form::kRows);
        const int64_t clusters = int64_t{list.capacity} * params.heads;
        return run_kernel<Form>(params, launch, list, clusters * kKeySplits);
      }
    }
    using Form = Kernel<kHasBias>;
    Workspace workspace(launch.workspace);
    const WorkList list = take_forward_list<Form>(workspace, params, launch);
    run_kernel<Form>(params, launch, list, prepare_forward<Form>(list, params, launch));
  }

  template <typename Form>
  static void run_kernel(const ForwardParams& params, const CudaLaunch& launch,
                         const WorkList& list, int64_t blocks) {
    const int heads = params.heads;
    ForwardMaps maps = {};
    maps.q = make_ragged_map<kHeadDim>(params.q, heads, kWarpgroupRows, kDType);
    maps.k = make_ragged_map<kHeadDim>(params.k, heads, Form::kKeys, kDType);
    maps.v = make_ragged_map<kHeadDim>(params.v, heads, Form::kKeys, kDType);
    if (params.rab.data) maps.bias = make_bias_map(params.rab, params.batch.batch);
    if constexpr (Form::kIsPaged) {
      maps.pages =
          make_page_map<kHeadDim>(params.paged, params.q.head_dim, heads, Form::kKeys, kDType);
    }
    launch_attention<Form>(run_forward<Form>, launch, blocks, "forward", params, maps, list);
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

}  // namespace hstu::sm90
