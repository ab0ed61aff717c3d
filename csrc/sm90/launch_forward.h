// Host side of the forward: workspace, prepare_scheduler(), and tensor maps.
#pragma once

#include "../common/attention_launch.h"
#include "forward.h"
#include "kernels.h"

namespace hstu::sm90 {

template <int kHeadDim, DType kDType, KeySource kSource>
struct ForwardLauncher {
  static int64_t workspace_bytes(const ForwardParams& params, const CudaLaunch& launch) {
    return choose(params, launch, [&]<typename Form>() {
      Workspace workspace(nullptr);
      take<Form>(workspace, params, launch);
      return workspace.used();
    });
  }

  static void run(const ForwardParams& params, const CudaLaunch& launch) {
    choose(params, launch, [&]<typename Form>() { run_form<Form>(params, launch); });
  }

 private:
  template <bool kHasBias, KeyForm kForm = KeyForm{.source = kSource}>
  using Kernel = Forward<kHeadDim, ElementOf<kDType>, kHasBias, kForm>;

  // use<the form of kernel for the call>()
  template <typename Use>
  static auto choose(const ForwardParams& params, const CudaLaunch& launch, Use use) {
    if constexpr (kSource == KeySource::kPaged) {
      if (params.paged.scales) return choose_form<false, true>(params, launch, use);
    }
    return params.rab.data ? choose_form<true, false>(params, launch, use)
                           : choose_form<false, false>(params, launch, use);
  }
  template <bool kHasBias, bool kIsQuantized, typename Use>
  static auto choose_form(const ForwardParams& params, const CudaLaunch& launch, Use use) {
    constexpr KeyForm kForm = {.source = kSource, .is_quantized = kIsQuantized};
    if constexpr (kSource == KeySource::kPaged) {
      const int cluster_size = choose_cluster_size(params, launch);
      if (cluster_size == kLargeCluster) {
        return use.template operator()<Kernel<kHasBias, with_cluster(kForm, kLargeCluster)>>();
      }
      if (cluster_size == kSmallCluster) {
        return use.template operator()<Kernel<kHasBias, with_cluster(kForm, kSmallCluster)>>();
      }
      if (plan_split_kv(params, launch).num_splits > 1) {
        return use.template operator()<Kernel<kHasBias, with_split_kv(kForm)>>();
      }
    }
    return use.template operator()<Kernel<kHasBias, kForm>>();
  }

  // Tiles of rows and heads, if all sequences were as long as they may be.
  static int64_t max_work_tiles(const ForwardParams& params) {
    const BatchParams& batch = params.batch;
    return int64_t{batch.batch} * params.heads * divided(batch.max_seqlen_q, Kernel<false>::kRows);
  }
  static int64_t divided(int64_t n, int64_t by) { return (n + by - 1) / by; }

  // How many blocks share the keys of a tile of rows: more than one where all run at once. By the
  // shape of the call, which is that of every replay of a graph, and not by lengths: sums are made
  // in the same order.
  static int choose_cluster_size(const ForwardParams& params, const CudaLaunch& launch) {
    if (is_given_by_row(params.mask)) return 1;
    const int64_t work_tiles = max_work_tiles(params);
    const int blocks = launch.device.multiprocessors - launch.sm_margin;
    if (work_tiles * kLargeCluster <= blocks) return kLargeCluster;
    return work_tiles * kSmallCluster <= blocks ? kSmallCluster : 1;
  }

  // Which items share the keys of a tile of rows: what should end soonest. By the shape of the
  // call, too.
  static SplitKV plan_split_kv(const ForwardParams& params, const CudaLaunch& launch) {
    using Form = Kernel<false, with_split_kv({.source = kSource})>;
    constexpr double kToStore = 1.0 * keys_to_store_partial(kHeadDim) / Form::kKeys;  // in tiles
    constexpr double kToAdd = 1.0 * kKeysToAddPartial / Form::kKeys;
    const int64_t work_tiles = max_work_tiles(params);
    const int64_t tiles = divided(params.batch.max_seqlen_k, Form::kKeys);
    const int64_t blocks = resident_blocks<Form>(launch);
    double least = 0.9 * divided(work_tiles, blocks) * tiles;  // a little faster is not worth it
    SplitKV split_kv;
    const auto try_splits = [&](int count, int64_t split, double time) {
      if (time >= least) return;
      least = time;
      split_kv.num_splits = count;
      split_kv.keys_per_split = static_cast<int>(split) * Form::kKeys;
    };
    for (int count = 2; count <= kMaxSplits; ++count) {
      const int64_t equal = divided(tiles, count);
      try_splits(count, equal, divided(work_tiles * count, blocks) * (equal + kToStore + kToAdd));
      // A block for each of the others, which end when those left have taken `several` last shares.
      const int others = count - 1;
      const int64_t left = blocks - work_tiles * others;
      if (left <= 0) continue;
      const int64_t several = divided(work_tiles, left);
      const auto split =
          static_cast<int64_t>(several * (tiles + kToStore) / (1 + several * others));
      const int64_t last = tiles - others * split;
      if (split == 0 || last <= 0) continue;
      const double time = std::max<double>(split, several * (last + kToStore));
      try_splits(count, split, time + others * kToAdd);
    }
    return split_kv;
  }

  struct Taken {
    WorkList list;
    SplitKV split_kv;
    int64_t counter_bytes = 0;  // of shares
  };

  template <typename Form>
  static Taken take(Workspace& workspace, const ForwardParams& params, const CudaLaunch& launch) {
    Taken taken;
    if constexpr (Form::kIsClusterSplit) {  // a cluster for each tile of rows, and no list
      const BatchParams& batch = params.batch;
      taken.list.work_per_tile = params.heads;
      taken.list.capacity = WorkList::max_tiles(batch.total_q, batch.batch, Form::kRows);
      return taken;
    }
    SplitKV& split_kv = taken.split_kv;
    if constexpr (Form::kIsSplitKV) split_kv = plan_split_kv(params, launch);
    taken.list = take_forward_list<Form>(workspace, params, launch, split_kv.num_splits);
    if constexpr (Form::kIsSplitKV) {
      const int64_t slots = int64_t{taken.list.capacity} * params.heads * Form::kConsumers;
      split_kv.partial_out =
          workspace.take<float>(slots * split_kv.num_splits * kWarpgroupRows * kHeadDim);
      split_kv.arrived = workspace.take<int>(slots);
      taken.counter_bytes = Workspace::bytes<int>(slots);
    }
    return taken;
  }

  template <typename Form>
  static void run_form(const ForwardParams& params, const CudaLaunch& launch) {
    Workspace workspace(launch.workspace);
    const Taken taken = take<Form>(workspace, params, launch);
    const int64_t blocks = prepare_forward<Form>(taken.list, params, launch, taken.split_kv.arrived,
                                                 taken.counter_bytes);
    run_kernel<Form>(params, launch, taken.list, taken.split_kv, blocks * Form::kClusterSize);
  }

  template <typename Form>
  static void run_kernel(const ForwardParams& params, const CudaLaunch& launch,
                         const WorkList& list, const SplitKV& split_kv, int64_t blocks) {
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
    launch_attention<Form>(run_forward<Form>, launch, blocks, "forward", params, maps, list,
                           split_kv);
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
