// Host side of the backward: chooses the kernel's form, lays out the workspace and launches
// prepare_scheduler(), the backward and the kernels that follow it.
#pragma once

#include "../common/attention_launch.h"
#include "../common/static_switch.h"
#include "../scheduler/attention_list.h"
#include "backward.h"
#include "kernels.h"
#include "tiling_switch.h"

namespace hstu::sm80 {

template <int kHeadDim, DType kDType>
struct BackwardLauncher {
  using Element = ElementOf<kDType>;
  template <Tiling kTiling, ScoreBias kBias = ScoreBias::kNone, bool kIsDeterministic = false>
  using Kernel = Backward<kHeadDim, Element, kTiling, kBias, kIsDeterministic>;

  static int64_t workspace_bytes(const BackwardParams& params, const CudaLaunch& launch) {
    return form_switch(params, launch, [&](auto tiling, auto is_deterministic) -> int64_t {
      if constexpr (is_for_short_sequences(tiling)) {
        return take_short_dq<Kernel<tiling>>(params, launch, nullptr).bytes;
      }
      return Plan<tiling, is_deterministic>(params, nullptr).workspace.used();
    });
  }

  static void run(const BackwardParams& params, const CudaLaunch& launch) {
    form_switch(params, launch, [&](auto tiling, auto is_deterministic) {
      if constexpr (is_for_short_sequences(tiling)) {
        bool_switch(params.rab.data, [&](auto has_bias) {
          constexpr ScoreBias kBias = has_bias ? ScoreBias::kDense : ScoreBias::kNone;
          run_short<Kernel<tiling, kBias>>(params, launch);
        });
      } else {
        run_form<tiling, is_deterministic>(params, launch);
      }
    });
  }

 private:
  // NOTE: a form for short sequences is deterministic in any case.
  template <typename Use>
  static auto form_switch(const BackwardParams& params, const CudaLaunch& launch, Use use) {
    const int longest = longest_if_short(params, launch);
    const std::false_type any_order;
    if (longest <= 32 && fits<Kernel<Tiling::kUpTo32>>(launch)) {
      return use(std::integral_constant<Tiling, Tiling::kUpTo32>(), any_order);
    }
    const int blocks = blocks_of_sequence(params, launch);
    if (blocks > 1 && fits<Kernel<Tiling::kCluster>>(launch)) {
      return use(std::integral_constant<Tiling, Tiling::kCluster>(), any_order);
    }
    if (blocks == 1 && fits<Kernel<Tiling::kUpTo64>>(launch)) {
      return use(std::integral_constant<Tiling, Tiling::kUpTo64>(), any_order);
    }
    return bool_switch(launch.deterministic, [&](auto is_deterministic) {
      return tiling_switch<Kernel<Tiling::kLarge, ScoreBias::kNone, is_deterministic>>(
          launch, [&](auto tiling) { return use(tiling, is_deterministic); });
    });
  }

  // True if drab is summed over heads in an fp32 workspace first.
  static bool sums_drab(const BackwardParams& params) {
    return params.drab.data && params.drab.heads != params.heads &&
           params.drab.dtype != DType::kFloat32;
  }

  // The layout of the workspace.
  template <Tiling kTiling, bool kIsDeterministic>
  struct Plan {
    static constexpr BackwardTiles kTiles = backward_tiles<kHeadDim, kTiling, kIsDeterministic>();

    Workspace workspace;
    BackwardBuffers buffers;
    PreparedBias prepared_bias;
    int64_t dq_tiles;     // row tiles * heads
    int64_t drab_rows;    // rows of the fp32 drab
    int64_t zeros_begin;  // [zeros_begin, zeros_end) bytes must be zeroed
    int64_t zeros_end;

    Plan(const BackwardParams& params, void* memory) : workspace(memory) {
      const BatchParams& batch = params.batch;
      buffers.list = workspace.take_list(batch.total_k, batch.batch, kTiles.keys);
      buffers.list.work_per_tile = params.drab.data ? params.rab.heads : params.heads;
      buffers.heads_per_work_tile = params.heads / buffers.list.work_per_tile;
      if (is_given_by_row(params.mask)) {
        buffers.list.summaries =
            workspace.take_summaries(params.mask, batch, params.heads, kTiles.rows);
      }
      dq_tiles =
          int64_t{WorkList::max_tiles(batch.total_q, batch.batch, kTiles.rows)} * params.heads;
      drab_rows = int64_t{batch.batch} * params.drab.heads * params.drab.length;
      buffers.dq_writers =
          kIsDeterministic ? workspace.take<TileSpans>(dq_tiles / params.heads) : nullptr;
      prepared_bias = take_prepared_bias(workspace, params.relative_bias, batch);
      zeros_begin = workspace.used();
      buffers.dq = workspace.take<float>(dq_tiles * kTiles.rows * kHeadDim);
      buffers.dq_semaphore = kIsDeterministic ? workspace.take<int>(dq_tiles) : nullptr;
      buffers.drab = params.drab;
      if (sums_drab(params)) {
        DenseBias& drab = buffers.drab;
        drab.dtype = DType::kFloat32;
        drab.row_stride = drab.length;
        drab.head_stride = int64_t{drab.length} * drab.length;
        drab.batch_stride = drab.heads * drab.head_stride;
        drab.data = workspace.take<float>(drab_rows * drab.length);
      }
      buffers.sums = take_table_sums(workspace, params);
      zeros_end = workspace.used();
    }
  };

  template <Tiling kTiling, bool kIsDeterministic>
  static void run_form(const BackwardParams& given, const CudaLaunch& launch) {
    using Plain = Kernel<kTiling, ScoreBias::kNone, kIsDeterministic>;
    const Plan<kTiling, kIsDeterministic> plan(given, launch.workspace);
    BackwardParams params = given;
    params.relative_bias.prepared = plan.prepared_bias;
    if (params.relative_bias) prepare_relative_bias(params.relative_bias, params.batch, launch);
    PrepareParams prepared = prepare_params(params);
    prepared.list = plan.buffers.list;
    prepared.tile_rows = Plain::kRows;
    prepared.tile_keys = Plain::kKeys;
    prepared.dq_writers = plan.buffers.dq_writers;
    prepared.zeros = static_cast<char*>(launch.workspace) + plan.zeros_begin;
    prepared.zero_bytes = plan.zeros_end - plan.zeros_begin;
    // NOTE: with chunks, blocks finish less evenly, because they take work early. So there are
    // chunks only if they save much traffic.
    if (prepared.zero_bytes > 2 * launch.device.l2_bytes) {
      set_backward_chunks(prepared, params, launch);
    }
    prepare_scheduler(prepared, launch);

    bias_switch(params, [&](auto bias) {
      run_kernel<Kernel<kTiling, bias, kIsDeterministic>>(params, launch, plan.buffers);
    });
    const LaunchConfig per_tile = {plan.dq_tiles, Plain::kThreads, 0, true};
    launch_kernel(convert_dq<Plain>, per_tile, launch, "dq of the backward", params,
                  plan.buffers.dq);
    if (sums_drab(params)) {
      const LaunchConfig per_row = {std::min<int64_t>(plan.drab_rows, 1 << 16), 256};
      launch_kernel(round_drab<Element>, per_row, launch, "drab of the backward",
                    static_cast<const float*>(plan.buffers.drab.data), params.drab, plan.drab_rows);
    }
    if (params.relative_bias)
      round_table_sums(params, plan.buffers.sums, /*rest_of_scale=*/1, launch);
  }

  // The sums of dQ of a form for short sequences, and the bytes of the workspace.
  struct ShortDq {
    float* sums;
    int64_t bytes;
  };
  template <typename Form>
  static ShortDq take_short_dq(const BackwardParams& params, const CudaLaunch& launch,
                               void* memory) {
    const BatchParams& batch = params.batch;
    if (batch.max_seqlen_k <= Form::kKeys) return {nullptr, 0};
    Workspace workspace(memory);
    const int64_t tiles = WorkList::max_tiles(batch.total_q, batch.batch, Form::kRows);
    const int64_t parts = tiles * Form::ClusterDq::places(blocks_of_sequence(params, launch));
    float* sums = workspace.take<float>(parts * params.heads * (Form::kRows * kHeadDim));
    return {sums, workspace.used()};
  }

  template <typename Form>
  static void run_short(const BackwardParams& params, const CudaLaunch& launch) {
    BackwardBuffers buffers = {};
    buffers.heads_per_work_tile = 1;
    buffers.drab = params.drab;
    buffers.dq = take_short_dq<Form>(params, launch, launch.workspace).sums;
    const dim3 blocks(params.batch.batch, params.heads,
                      Form::kIsClusterOfSequence ? blocks_of_sequence(params, launch) : 1);
    launch_attention<Form>(run_backward<Form>, launch, blocks, "backward", params, buffers);
  }

  template <typename Form>
  static void run_kernel(const BackwardParams& params, const CudaLaunch& launch,
                         const BackwardBuffers& buffers) {
    const int64_t work_tiles = int64_t{buffers.list.capacity} * buffers.list.work_per_tile;
    launch_attention<Form>(run_backward<Form>, launch, persistent_blocks<Form>(launch, work_tiles),
                           "backward", params, buffers);
  }
};

template <int kHeadDim, DType kDType>
BackwardKernel backward() {
  using Launcher = BackwardLauncher<kHeadDim, kDType>;
  return {Launcher::workspace_bytes, Launcher::run, false};
}

}  // namespace hstu::sm80
