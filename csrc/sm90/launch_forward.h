// Host side of the forward: workspace, prepare(), and tensor maps.
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
  template <bool kHasBias, bool kIsQuantised, typename Use>
  static auto choose_form(const ForwardParams& params, const CudaLaunch& launch, Use use) {
    constexpr KeyForm kForm = {.source = kSource, .is_quantised = kIsQuantised};
    if constexpr (kSource == KeySource::kPaged) {
      const int splits = key_splits(params, launch);
      if (splits == kManySplits) {
        return use.template operator()<Kernel<kHasBias, with_splits(kForm, kManySplits)>>();
      }
      if (splits == kFewSplits) {
        return use.template operator()<Kernel<kHasBias, with_splits(kForm, kFewSplits)>>();
      }
      if (key_shares(params, launch).count > 1) {
        return use.template operator()<Kernel<kHasBias, with_shares(kForm)>>();
      }
    }
    return use.template operator()<Kernel<kHasBias, kForm>>();
  }

  // Tiles of rows and heads, if all sequences were as long as they may be.
  static int64_t most_items(const ForwardParams& params) {
    const BatchParams& batch = params.batch;
    return int64_t{batch.batch} * params.heads * divided(batch.max_seqlen_q, Kernel<false>::kRows);
  }
  static int64_t divided(int64_t n, int64_t by) { return (n + by - 1) / by; }

  // How many blocks share the keys of a tile of rows: more than one where all run at once. By the
  // shape of the call, which is that of every replay of a graph, and not by lengths: sums are made
  // in the same order.
  static int key_splits(const ForwardParams& params, const CudaLaunch& launch) {
    if (is_given_by_row(params.mask)) return 1;
    const int64_t items = most_items(params);
    const int blocks = launch.device.multiprocessors - launch.sm_margin;
    if (items * kManySplits <= blocks) return kManySplits;
    return items * kFewSplits <= blocks ? kFewSplits : 1;
  }

  // Which items share the keys of a tile of rows: what should end soonest. By the shape of the
  // call, too.
  static KeyShares key_shares(const ForwardParams& params, const CudaLaunch& launch) {
    using Form = Kernel<false, with_shares({.source = kSource})>;
    constexpr double kToLeave = 1.0 * keys_to_leave_sum(kHeadDim) / Form::kKeys;  // in tiles
    constexpr double kToAdd = 1.0 * kKeysToAddSum / Form::kKeys;
    const int64_t items = most_items(params);
    const int64_t tiles = divided(params.batch.max_seqlen_k, Form::kKeys);
    const int64_t blocks = resident_blocks<Form>(launch);
    double least = 0.9 * divided(items, blocks) * tiles;  // a little faster is not worth it
    KeyShares shares;
    const auto try_shares = [&](int count, int64_t share, double time) {
      if (time >= least) return;
      least = time;
      shares.count = count;
      shares.keys = static_cast<int>(share) * Form::kKeys;
    };
    for (int count = 2; count <= kMostShares; ++count) {
      const int64_t equal = divided(tiles, count);
      try_shares(count, equal, divided(items * count, blocks) * (equal + kToLeave + kToAdd));
      // A block for each of the others, which end when those left have taken `several` last shares.
      const int others = count - 1;
      const int64_t left = blocks - items * others;
      if (left <= 0) continue;
      const int64_t several = divided(items, left);
      const auto share =
          static_cast<int64_t>(several * (tiles + kToLeave) / (1 + several * others));
      const int64_t last = tiles - others * share;
      if (share == 0 || last <= 0) continue;
      const double time = std::max<double>(share, several * (last + kToLeave));
      try_shares(count, share, time + others * kToAdd);
    }
    return shares;
  }

  struct Taken {
    WorkList list;
    KeyShares shares;
    int64_t counter_bytes = 0;  // of shares
  };

  template <typename Form>
  static Taken take(Workspace& workspace, const ForwardParams& params, const CudaLaunch& launch) {
    Taken taken;
    if constexpr (Form::kIsSplit) {  // a cluster for each tile of rows, and no list
      const BatchParams& batch = params.batch;
      taken.list.parts = params.heads;
      taken.list.capacity = WorkList::max_tiles(batch.total_q, batch.batch, Form::kRows);
      return taken;
    }
    KeyShares& shares = taken.shares;
    if constexpr (Form::kIsShared) shares = key_shares(params, launch);
    taken.list = take_forward_list<Form>(workspace, params, launch, shares.count);
    if constexpr (Form::kIsShared) {
      const int64_t places = int64_t{taken.list.capacity} * params.heads * Form::kConsumers;
      shares.sums = workspace.take<float>(places * shares.count * kWarpgroupRows * kHeadDim);
      shares.arrived = workspace.take<int>(places);
      taken.counter_bytes = Workspace::bytes<int>(places);
    }
    return taken;
  }

  template <typename Form>
  static void run_form(const ForwardParams& params, const CudaLaunch& launch) {
    Workspace workspace(launch.workspace);
    const Taken taken = take<Form>(workspace, params, launch);
    const int64_t blocks = prepare_forward<Form>(taken.list, params, launch, taken.shares.arrived,
                                                 taken.counter_bytes);
    run_kernel<Form>(params, launch, taken.list, taken.shares, blocks * Form::kClusterBlocks);
  }

  template <typename Form>
  static void run_kernel(const ForwardParams& params, const CudaLaunch& launch,
                         const WorkList& list, const KeyShares& shares, int64_t blocks) {
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
                           shares);
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
