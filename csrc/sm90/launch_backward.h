// Host side of the backward: lays out the workspace, makes the tensor maps and launches
// prepare_scheduler(), the backward and the kernels that follow it.
#pragma once

#include "../common/attention_launch.h"
#include "../common/static_switch.h"
#include "../scheduler/attention_list.h"
#include "backward.h"
#include "bias_gradient.h"
#include "kernels.h"

namespace hstu::sm90 {

// kHeadDim is the number of columns of tiles.
template <int kHeadDim, DType kDType>
struct BackwardLauncher {
  template <typename Bias, bool kIsDeterministic, bool kIsClosedForm = false,
            bool kStoresDq = false>
  using Kernel = Backward<kHeadDim, ElementOf<kDType>, Bias, kIsDeterministic, ElementOf<kDType>,
                          kIsClosedForm, kStoresDq>;
  using Form = Kernel<NoScoreBias, false>;  // all forms have the same tile sizes

  static int64_t workspace_bytes(const BackwardParams& params, const CudaLaunch& launch) {
    return Plan(params, launch, nullptr).workspace.used();
  }

  static void run(const BackwardParams& params, const CudaLaunch& launch) {
    const Plan plan(params, launch, launch.workspace);
    PrepareParams prepared = prepare_params(params);
    prepared.list = plan.buffers.list;
    prepared.tile_rows = Form::kRows;
    prepared.tile_keys = Form::kKeys;
    prepared.dq_writers = plan.buffers.dq_writers;
    if (!needs_own_kernel(params)) prepared.bias_gradient = params.drab;
    prepared.zeros = static_cast<char*>(launch.workspace) + plan.zeros_begin;
    prepared.zero_bytes = plan.zeros_end - plan.zeros_begin;
    set_backward_chunks(prepared, params, launch);
    if (params.relative_bias) {
      prepare_relative_bias(with_prepared_bias(params, plan.prepared_bias).relative_bias,
                            params.batch, launch);
    }
    if (!plan.stores_dq) {
      prepare_scheduler(prepared, launch);
    } else if (plan.buffers.list.next) {
      check_cuda(cudaMemsetAsync(plan.buffers.list.next, 0, sizeof(int), launch.stream),
                 "backward");
    }

    if constexpr (!kAllowsBias) {
      run_form<NoScoreBias>(params, launch, plan);
    } else if (params.relative_bias) {
      const BackwardParams prepared_params = with_prepared_bias(params, plan.prepared_bias);
      if (params.relative_bias.time.data) {
        run_form<RelativeScoreBias>(prepared_params, launch, plan);
      } else {
        run_form<PositionScoreBias>(prepared_params, launch, plan);
      }
    } else if (params.rab.data) {
      run_form<DenseScoreBias>(params, launch, plan);
    } else {
      run_form<NoScoreBias>(params, launch, plan);
    }
  }

  static constexpr bool kAllowsBias = kHeadDim != 96 && kHeadDim != 192;
  static bool takes(const BackwardParams& params) {
    return !params.rab.data && !params.relative_bias && params.q.head_dim <= kHeadDim &&
           params.v.head_dim <= kHeadDim;
  }

 private:
  // The layout of the workspace.
  struct Plan {
    Workspace workspace;
    BackwardBuffers buffers = {};
    PreparedBias prepared_bias;
    int64_t dq_tiles;     // row tiles * heads
    int64_t zeros_begin;  // [zeros_begin, zeros_end) bytes must be zeroed
    int64_t zeros_end;
    bool stores_dq;  // see BackwardTraits::kStoresDq

    Plan(const BackwardParams& params, const CudaLaunch& launch, void* memory) : workspace(memory) {
      const BatchParams& batch = params.batch;
      const int sequence_tiles = unlisted_tiles(params, launch);
      if (sequence_tiles > 0) {
        buffers.list.sequence_tiles = sequence_tiles;
        buffers.list.capacity = sequence_tiles * batch.batch;
      } else {
        buffers.list = workspace.take_list(batch.total_k, batch.batch, Form::kKeys);
        buffers.list.summaries =
            workspace.take_summaries(params.mask, batch, params.heads, Form::kRows);
      }
      buffers.list.work_per_tile = params.heads;
      stores_dq = sequence_tiles == 1;
      if (stores_dq && counts_sequences(params, launch)) {
        buffers.list.next = workspace.take<int>(1);
      }
      const int64_t row_tiles = WorkList::max_tiles(batch.total_q, batch.batch, Form::kRows);
      dq_tiles = row_tiles * params.heads;
      const bool is_ordered = launch.deterministic;
      buffers.dq_writers = is_ordered ? workspace.take<TileSpans>(row_tiles) : nullptr;
      zeros_begin = workspace.used();
      buffers.dq = workspace.take<float>(dq_tiles * Form::Dq::kSize);
      buffers.dq_semaphore =
          is_ordered ? workspace.take<int>(dq_tiles * Form::kClusterSize) : nullptr;
      buffers.sums = take_table_sums(workspace, params);
      zeros_end = workspace.used();
      if (params.relative_bias) {
        prepared_bias = take_prepared_bias(workspace, params.relative_bias, batch,
                                           Form::PositionWindow::kMargin, Form::kKeys);
      }
    }
  };

  // Returns how many tiles of keys each sequence may have where there is no list of work tiles, or
  // 1 if a block takes all of a sequence; 0 if there is a list.
  static int unlisted_tiles(const BackwardParams& params, const CudaLaunch& launch) {
    if (!runs_closed_form(params, launch)) return 0;
    const BatchParams& batch = params.batch;
    const int tiles = ceil_div(batch.max_seqlen_k, Form::kKeys);
    const int64_t possible = int64_t{tiles} * batch.batch * params.heads;
    const int64_t work_tiles =
        int64_t{WorkList::max_tiles(batch.total_k, batch.batch, Form::kKeys)} * params.heads;
    if (takes_sequences(params, tiles, launch)) return 1;
    // Otherwise one block could have two work tiles, and another none.
    const bool is_even = work_tiles > resident(launch) || possible <= resident(launch);
    return is_even && possible <= Form::kUnlistedRounds * resident(launch) ? tiles : 0;
  }

  // Blocks, or clusters of blocks, that run at the same time.
  static int64_t resident(const CudaLaunch& launch) {
    return std::max<int64_t>(resident_blocks<Form>(launch) / Form::kClusterSize, 1);
  }

  // True if a block takes all `tiles` tiles of keys of a sequence and head. If there are several
  // tiles, this is faster than sums of dQ from all blocks if it keeps four fifths of the blocks
  // busy, and if sequences have similar lengths or blocks take so many of them that they end at
  // about the same time.
  static bool takes_sequences(const BackwardParams& params, int tiles, const CudaLaunch& launch) {
    const BatchParams& batch = params.batch;
    const int64_t sequences = int64_t{batch.batch} * params.heads;
    const int64_t blocks = ceil_div(sequences, resident(launch)) * resident(launch);
    if (tiles * sequences > INT32_MAX - blocks) return false;
    if (tiles == 1) return true;
    const int64_t longest = batch.max_seqlen_k;
    const bool is_even =
        5 * int64_t{batch.total_k} >= 4 * longest * batch.batch ||
        (counts_sequences(params, launch) && 2 * sequences > tiles * resident(launch));
    return tiles <= Form::kMostTilesOfBlock && 5 * sequences >= 4 * blocks && is_even;
  }

  // True if blocks that take whole sequences count them. The counter must be zeroed first, which
  // takes time, so blocks with at most two sequences take those of their own number.
  static bool counts_sequences(const BackwardParams& params, const CudaLaunch& launch) {
    return int64_t{params.batch.batch} * params.heads > 2 * resident(launch);
  }

  // True if the backward cannot store its dS as the gradient of the bias; see bias_gradient.h.
  static bool needs_own_kernel(const BackwardParams& params) {
    const DenseBias& drab = params.drab;
    if (!drab.data) return false;
    return drab.heads != params.heads || kDType == DType::kFloat16 || drab.length % 8 != 0 ||
           !can_map(drab, params.batch.batch, kDType);
  }

  static BackwardParams with_prepared_bias(BackwardParams params, const PreparedBias& prepared) {
    params.relative_bias.prepared = prepared;
    return params;
  }

  template <typename Bias>
  static void run_form(const BackwardParams& params, const CudaLaunch& launch, const Plan& plan) {
    BackwardParams own = params;  // without drab if BiasGradient computes it
    if (needs_own_kernel(params)) own.drab = {};
    const BackwardMaps maps = make_maps(own);
    if (std::is_same_v<Bias, NoScoreBias> && runs_closed_form(params, launch)) {
      run_closed_form(params, launch, maps, plan);
      if (plan.stores_dq) return;
    } else {
      bool_switch(launch.deterministic, [&](auto is_deterministic) {
        run_kernel<Kernel<Bias, is_deterministic>>(own, launch, maps, plan.buffers);
      });
    }
    if constexpr (Bias::kHasTiles) {
      if (needs_own_kernel(params)) {
        using Gradient = BiasGradient<kHeadDim, ElementOf<kDType>>;
        const int64_t tiles = Gradient::tiles(params.drab, params.batch.batch);
        launch_attention<Gradient>(run_bias_gradient<Gradient>, launch,
                                   persistent_blocks<Gradient>(launch, tiles),
                                   "gradient of the bias", params, maps, plan.buffers.list);
      }
    }
    const LaunchConfig per_tile = {plan.dq_tiles, Form::Dq::kParts * kWarpgroup, 0, true};
    using Unbiased = std::conditional_t<Bias::kIsRelative, NoScoreBias, Bias>;
    launch_kernel(convert_dq<Kernel<Unbiased, false>>, per_tile, launch, "dq of the backward", own,
                  plan.buffers.dq);
    if constexpr (Bias::kIsRelative) {
      round_table_sums(params, plan.buffers.sums, /*rest_of_scale=*/params.scale, launch);
    }
  }

  static void run_closed_form(const BackwardParams& params, const CudaLaunch& launch,
                              const BackwardMaps& maps, const Plan& plan) {
    bool_switch(plan.stores_dq, [&](auto stores_dq) {
      using Chosen = Kernel<NoScoreBias, false, /*kIsClosedForm=*/true, stores_dq>;
      run_kernel<Chosen>(params, launch, maps, plan.buffers);
    });
  }

  static BackwardMaps make_maps(const BackwardParams& params) {
    const int heads = params.heads;
    const int batch = params.batch.batch;
    BackwardMaps maps = {};
    const auto map = [&](const PackedTensor& tensor, int rows) {
      return make_ragged_map<kHeadDim, Form::kIsNarrow>(tensor, heads, rows, kDType);
    };
    maps.q = map(params.q, Form::kRows);
    maps.k = map(params.k, Form::kBlockKeys);
    maps.v = map(params.v, Form::kBlockKeys);
    maps.dout = map(params.dout, Form::kRows);
    if (params.rab.data) maps.bias = make_bias_map(params.rab, batch);
    if (params.drab.data) maps.bias_gradient = make_bias_map(params.drab, batch);
    return maps;
  }

  template <typename Chosen>
  static void run_kernel(const BackwardParams& params, const CudaLaunch& launch,
                         const BackwardMaps& maps, const BackwardBuffers& buffers) {
    const int64_t work_tiles = int64_t{buffers.list.capacity} * buffers.list.work_per_tile;
    launch_attention<Chosen>(run_backward<Chosen>, launch,
                             persistent_blocks<Chosen>(launch, work_tiles), "backward", params,
                             maps, buffers);
  }
};

// Calls without a bias have tiles of 96 and 192 columns, too.
template <int kHeadDim, DType kDType>
struct ChosenBackwardLauncher {
  using Usual = BackwardLauncher<kHeadDim, kDType>;
  static constexpr bool kHasNarrow = kHeadDim >= 128;
  using Narrow = BackwardLauncher<kHeadDim / 4 * 3, kDType>;

  static int64_t workspace_bytes(const BackwardParams& params, const CudaLaunch& launch) {
    if constexpr (kHasNarrow) {
      if (Narrow::takes(params)) return Narrow::workspace_bytes(params, launch);
    }
    return Usual::workspace_bytes(params, launch);
  }

  static void run(const BackwardParams& params, const CudaLaunch& launch) {
    if constexpr (kHasNarrow) {
      if (Narrow::takes(params)) return Narrow::run(params, launch);
    }
    Usual::run(params, launch);
  }
};

template <int kHeadDim, DType kDType>
BackwardKernel backward() {
  using Launcher = ChosenBackwardLauncher<kHeadDim, kDType>;
  return {Launcher::workspace_bytes, Launcher::run, true};
}

}  // namespace hstu::sm90
