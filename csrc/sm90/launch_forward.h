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
    if (key_splits(params, launch) > 1) return 0;
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
  // How many blocks share the keys of a tile of rows: more than one where all run at once. By the
  // shape of the call, which is that of every replay of a graph, and not by lengths: sums are made
  // in the same order.
  static int key_splits(const ForwardParams& params, const CudaLaunch& launch) {
    if (kSource != KeySource::kPaged || is_given_by_row(params.mask)) return 1;
    const BatchParams& batch = params.batch;
    constexpr int kRows = Kernel<false>::kRows;
    const int64_t items =
        int64_t{batch.batch} * params.heads * ((batch.max_seqlen_q + kRows - 1) / kRows);
    const int blocks = launch.device.multiprocessors - launch.sm_margin;
    if (items * kManySplits <= blocks) return kManySplits;
    return items * kFewSplits <= blocks ? kFewSplits : 1;
  }

  template <bool kHasBias>
  static void run_form(const ForwardParams& params, const CudaLaunch& launch) {
    if constexpr (kSource == KeySource::kPaged) {
      const int splits = key_splits(params, launch);
      if (splits == kManySplits) return run_split<Kernel<kHasBias, kManySplits>>(params, launch);
      if (splits == kFewSplits) return run_split<Kernel<kHasBias, kFewSplits>>(params, launch);
    }
    using Form = Kernel<kHasBias>;
    Workspace workspace(launch.workspace);
    const WorkList list = take_forward_list<Form>(workspace, params, launch);
    run_kernel<Form>(params, launch, list, prepare_forward<Form>(list, params, launch));
  }

  // A cluster for each tile of rows, and no list.
  template <typename Form>
  static void run_split(const ForwardParams& params, const CudaLaunch& launch) {
    WorkList list;
    list.parts = params.heads;
    list.capacity = WorkList::max_tiles(params.batch.total_q, params.batch.batch, Form::kRows);
    const int64_t clusters = int64_t{list.capacity} * params.heads;
    run_kernel<Form>(params, launch, list, clusters * Form::kClusterBlocks);
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
