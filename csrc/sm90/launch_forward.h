// Host side of the forward: chooses the form of the kernel, and launches it.
#pragma once

#include "../bias/bias_bounds.h"
#include "../bias/relative_bias.h"
#include "../common/attention_launch.h"
#include "../common/static_switch.h"
#include "../scheduler/attention_list.h"
#include "forward.h"
#include "kernels.h"
#include "split_heuristic.h"

namespace hstu::sm90 {

template <int kHeadDim, DType kDType>
class ForwardLauncher {
 public:
  static ForwardPlan plan(const ForwardParams& params, const CudaLaunch& launch) {
    if constexpr (kDType == DType::kFloat8E4M3) {
      if (params.relative_bias) {
        return plan_form<Kernel<E4m3Keys<float>, RelativeScoreBias>>(params, launch, {});
      }
      if (params.rab.data) {
        return plan_form<Kernel<E4m3Keys<float>, AddedDenseBias>>(params, launch, {});
      }
      return bool_switch(params.fp8.half_sums, [&](auto half_sums) {
        using ScoreSum = std::conditional_t<half_sums, cutlass::half_t, float>;
        return plan_form<Kernel<E4m3Keys<ScoreSum>, NoScoreBias>>(params, launch, {});
      });
    } else {
      return plan_packed(params, launch);
    }
  }

  static ForwardPlan plan_paged(const ForwardParams& params, const CudaLaunch& launch) {
    if constexpr (kDType == DType::kFloat8E4M3) {
      return plan_paged_fp8(params, launch);
    } else {
      return plan_paged_16_bits(params, launch);
    }
  }

 private:
  static ForwardPlan plan_paged_fp8(const ForwardParams& params, const CudaLaunch& launch) {
    const ForwardPlan plan = plan_splits<E4m3PagedKeys, NoScoreBias>(params, launch);
    if constexpr (kHeadDim <= 128) {
      using Small = UnbiasedKernel<E4m3PagedKeys, /*kHasSmallTiles=*/true, /*kIsClosedForm=*/false>;
      if (plan.split_kv.reduction == Reduction::kNone && fits_at_once<Small>(params, launch)) {
        return plan_form<Small>(params, launch, {});
      }
    }
    return plan;
  }
  static ForwardPlan plan_paged_16_bits(const ForwardParams& params, const CudaLaunch& launch) {
    if (params.paged.scales) {
      return plan_splits<QuantizedPagedKeys, NoScoreBias>(params, launch);
    }
    if (params.relative_bias) return plan_splits<PagedKeys, RelativeScoreBias>(params, launch);
    return bool_switch(params.rab.data, [&](auto has_bias) {
      return plan_splits<PagedKeys, ScoreBias<has_bias>>(params, launch);
    });
  }

  using Reduction = SplitKVReduction;
  template <bool kHasBias>
  using ScoreBias = std::conditional_t<kHasBias, DenseScoreBias, NoScoreBias>;
  template <typename Source, typename Bias, Reduction kReduction = Reduction::kNone,
            int kClusterSize = 1, int kColumns = kHeadDim>
  using Kernel = Forward<kColumns, ElementOf<kDType>, Source, Bias, kReduction, kClusterSize>;
  template <typename Source, bool kHasSmallTiles, bool kIsClosedForm, int kColumns = kHeadDim>
  using UnbiasedKernel = Forward<kColumns, ElementOf<kDType>, Source, NoScoreBias, Reduction::kNone,
                                 1, kHasSmallTiles, kIsClosedForm>;

  static ForwardPlan plan_packed(const ForwardParams& params, const CudaLaunch& launch) {
    if (params.relative_bias.time.data) {
      return plan_form<Kernel<PackedKeys, RelativeScoreBias>>(params, launch, {});
    }
    if (params.relative_bias) {
      return plan_form<Kernel<PackedKeys, PositionScoreBias>>(params, launch, {});
    }
    if (params.rab.data) {
      return plan_form<Kernel<PackedKeys, DenseScoreBias>>(params, launch, {});
    }
    // Calls without a bias have tiles of 96 and 192 columns, too.
    if constexpr (kHeadDim >= 128) {
      constexpr int kColumns = kHeadDim / 4 * 3;
      if (params.q.head_dim <= kColumns && params.v.head_dim <= kColumns) {
        return plan_unbiased<kColumns>(params, launch);
      }
    }
    return plan_unbiased<kHeadDim>(params, launch);
  }

  // The plan of a call without a bias, with tiles of kColumns columns.
  template <int kColumns>
  static ForwardPlan plan_unbiased(const ForwardParams& params, const CudaLaunch& launch) {
    return bool_switch(!is_given_by_row(params.mask), [&](auto is_closed_form) {
      using Small = UnbiasedKernel<PackedKeys, true, is_closed_form, kColumns>;
      if (fits_at_once<Small>(params, launch)) return plan_form<Small>(params, launch, {});
      using Usual = UnbiasedKernel<PackedKeys, false, is_closed_form, kColumns>;
      return plan_form<Usual>(params, launch, {});
    });
  }

  // True if all work tiles of Form are resident at once, whatever the lengths of sequences are.
  template <typename Form>
  static bool fits_at_once(const ForwardParams& params, const CudaLaunch& launch) {
    const BatchParams& batch = params.batch;
    const int64_t tiles = WorkList::max_tiles(batch.total_q, batch.batch, Form::kRows);
    const int64_t longest = ceil_div(int64_t{batch.max_seqlen_q}, Form::kRows);
    return std::min(tiles, longest * batch.batch) * params.heads <= resident_blocks<Form>(launch);
  }

  template <typename Source, typename Bias>
  static ForwardPlan plan_splits(const ForwardParams& params, const CudaLaunch& launch) {
    using Form = Kernel<Source, Bias>;
    constexpr bool kAllowsClusters = !Bias::kIsRelative;  // fewer kernels to compile
    const BatchParams& batch = params.batch;
    SplitKVShape shape = {
        .row_tiles = int64_t{batch.batch} * params.heads *
                     ceil_div(int64_t{batch.max_seqlen_q}, Form::kRows),
        .key_tiles = ceil_div(int64_t{batch.max_seqlen_k}, Form::kKeys),
        .tile_keys = Form::kKeys,
        .head_dim = kHeadDim,
        .blocks = resident_blocks<Form>(launch),
    };
    if constexpr (kAllowsClusters) {
      if (!is_given_by_row(params.mask)) {
        for_each_cluster_size([&](auto n) {
          using Split = Kernel<Source, Bias, Reduction::kCluster, kClusterSizes[n]>;
          shape.clusters[n] = resident_clusters<Split>(run_forward<Split>, launch, "forward");
        });
      }
    }
    const SplitKVPlan split_kv = plan_split_kv(shape);
    if (split_kv.reduction == Reduction::kNone) return plan_form<Form>(params, launch, split_kv);
    if (split_kv.reduction == Reduction::kGlobalMemory) {
      return plan_form<Kernel<Source, Bias, Reduction::kGlobalMemory>>(params, launch, split_kv);
    }
    ForwardPlan plan;
    if constexpr (kAllowsClusters) {
      for_each_cluster_size([&](auto n) {
        if (split_kv.num_splits != kClusterSizes[n]) return;
        plan = plan_form<Kernel<Source, Bias, Reduction::kCluster, kClusterSizes[n]>>(
            params, launch, split_kv);
      });
    }
    return plan;
  }

  // Calls visit(n) with each index n of kClusterSizes as a constant.
  template <typename Visit>
  static void for_each_cluster_size(Visit visit) {
    [&]<size_t... n>(std::index_sequence<n...>) {
      (visit(std::integral_constant<size_t, n>{}), ...);
    }(std::make_index_sequence<std::size(kClusterSizes)>{});
  }

  template <typename Form>
  static ForwardPlan plan_form(const ForwardParams& params, const CudaLaunch& launch,
                               const SplitKVPlan& split_kv) {
    Workspace workspace(nullptr);
    ForwardParams laid_out = params;
    take_workspace<Form>(workspace, launch, split_kv, laid_out);
    return {.workspace_bytes = workspace.used(),
            .split_kv = split_kv,
            .prepare = prepare<Form>,
            .run = run<Form>};
  }

  // Takes the memory of everything that precedes attention or that attention writes to.
  template <typename Form>
  static SchedulerMetadata take_workspace(Workspace& workspace, const CudaLaunch& launch,
                                          const SplitKVPlan& split_kv, ForwardParams& params) {
    const SchedulerMetadata metadata = take_metadata<Form>(workspace, params, launch, split_kv);
    if constexpr (Form::kHasRelativeBias) {
      params.relative_bias.prepared =
          take_prepared_bias(workspace, params.relative_bias, params.batch,
                             Form::BiasWindow::Position::kMargin, Form::kKeys);
    }
    if constexpr (Form::kIsFp8 && Form::kHasBias) {
      params.fp8.bias_bounds = take_bias_bounds(workspace, params);
    }
    return metadata;
  }

  template <typename Form>
  static SchedulerMetadata take_metadata(Workspace& workspace, const ForwardParams& params,
                                         const CudaLaunch& launch, const SplitKVPlan& split_kv) {
    SchedulerMetadata metadata;
    metadata.split_kv = split_kv;
    if constexpr (Form::kIsSplitByCluster) {  // each row tile has a cluster, and there is no list
      const BatchParams& batch = params.batch;
      metadata.list.work_per_tile = params.heads;
      metadata.list.capacity = WorkList::max_tiles(batch.total_q, batch.batch, Form::kRows);
      const int64_t tiles = int64_t{metadata.list.capacity} * params.heads;
      take_totals<Form>(workspace, tiles * Form::kClusterSize, metadata);
      return metadata;
    }
    metadata.list = take_forward_list<Form>(workspace, params, launch, split_kv.num_splits);
    if constexpr (Form::kIsSplitByList) {
      const int64_t slots = partial_slots<Form>(metadata.list, params);
      metadata.partial_out =
          workspace.take<float>(slots * split_kv.num_splits * kWarpgroupRows * kHeadDim);
      metadata.arrived = workspace.take<int>(slots);
    }
    take_totals<Form>(workspace, resident_blocks<Form>(launch), metadata);
    return metadata;
  }

  // Takes the totals of Promotion for `blocks` blocks.
  template <typename Form>
  static void take_totals(Workspace& workspace, int64_t blocks, SchedulerMetadata& metadata) {
    if constexpr (Form::kGlobalTotals > 0) {
      metadata.totals = workspace.take<float>(blocks * Form::kConsumers * Form::kGlobalTotals);
    }
  }

  // Returns how many warpgroups, over all row tiles, may have partial O.
  template <typename Form>
  static int64_t partial_slots(const WorkList& list, const ForwardParams& params) {
    return int64_t{list.capacity} * params.heads * Form::kConsumers;
  }

  template <typename Form>
  static bool prepare(const ForwardPlan& plan, const ForwardParams& given,
                      const CudaLaunch& launch) {
    Workspace workspace(launch.workspace);
    ForwardParams params = given;
    const SchedulerMetadata metadata =
        take_workspace<Form>(workspace, launch, plan.split_kv, params);
    if constexpr (Form::kHasRelativeBias) {
      prepare_relative_bias(params.relative_bias, params.batch, launch);
    }
    if constexpr (Form::kIsFp8 && Form::kHasBias) find_bias_bounds(params, launch);
    const int64_t counter_bytes =
        metadata.arrived ? Workspace::bytes<int>(partial_slots<Form>(metadata.list, params)) : 0;
    return prepare_forward<Form>(metadata.list, params, launch, metadata.arrived, counter_bytes);
  }

  template <typename Form>
  static void run(const ForwardPlan& plan, const ForwardParams& given, const CudaLaunch& launch) {
    Workspace workspace(launch.workspace);
    ForwardParams params = given;
    const SchedulerMetadata metadata =
        take_workspace<Form>(workspace, launch, plan.split_kv, params);
    const int64_t blocks = forward_blocks<Form>(metadata.list, launch) * Form::kClusterSize;
    const ForwardMaps maps = make_maps<Form>(params);
    launch_attention<Form>(run_forward<Form>, launch, blocks, "forward", params, maps, metadata);
  }

  template <typename Form>
  static ForwardMaps make_maps(const ForwardParams& params) {
    constexpr int kColumns = Form::kHeadDim;
    const int heads = params.heads;
    ForwardMaps maps = {};
    maps.q = make_ragged_map<kColumns>(params.q, heads, kWarpgroupRows, kDType);
    maps.k = make_ragged_map<kColumns>(params.k, heads, Form::kKeys, kDType);
    if constexpr (Form::kHasBlockDescales) {
      maps.v = make_value_block_map<kColumns>(params.v, heads, params.fp8.blocks);
    } else {
      maps.v = make_ragged_map<kColumns>(params.v, heads, Form::kValueBoxRows, kDType);
    }
    if (params.rab.data) maps.bias = make_bias_map(params.rab, params.batch.batch);
    if constexpr (Form::Source::kIsPaged) {
      maps.pages = make_page_map<kColumns>(params.paged, params.q.head_dim, heads,
                                           Form::kValueBoxRows, kDType);
    }
    return maps;
  }
};

template <int kHeadDim, DType kDType>
ForwardKernel forward() {
  ForwardKernel kernel;
  kernel.plan = ForwardLauncher<kHeadDim, kDType>::plan;
  return kernel;
}

template <int kHeadDim, DType kDType>
ForwardKernel paged_forward() {
  ForwardKernel kernel;
  kernel.plan = ForwardLauncher<kHeadDim, kDType>::plan_paged;
  return kernel;
}

}  // namespace hstu::sm90
