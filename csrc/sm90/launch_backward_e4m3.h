// Host side of the backward in e4m3: quantizes its inputs to the workspace, makes the tensor maps
// and launches prepare_scheduler(), the kernel and the conversion of dQ.
#pragma once

#include "../common/attention_launch.h"
#include "../common/static_switch.h"
#include "../quantize/quantize.h"
#include "../scheduler/attention_list.h"
#include "backward.h"
#include "kernels.h"

namespace hstu::sm90 {

template <int kHeadDim, DType kDType>
struct E4m3BackwardLauncher {
  template <bool kIsDeterministic>
  using Kernel =
      Backward<kHeadDim, cutlass::float_e4m3_t, NoScoreBias, kIsDeterministic, ElementOf<kDType>>;
  using Form = Kernel<false>;

  static int64_t workspace_bytes(const BackwardParams& params, const CudaLaunch& launch) {
    return Plan(params, launch, nullptr).workspace.used();
  }

  static void run(const BackwardParams& params, const CudaLaunch& launch) {
    const Plan plan(params, launch, launch.workspace);
    quantize_qkv(plan.dout_and_v, launch.stream);
    quantize_qkv(plan.q_and_k, launch.stream);  // reads the scales of dout's rows
    const E4m3BackwardMaps maps = make_maps(params, plan);
    PrepareParams prepared = prepare_params(params);
    prepared.list = plan.buffers.list;
    prepared.tile_rows = Form::kRows;
    prepared.tile_keys = Form::kKeys;
    prepared.dq_writers = plan.buffers.dq_writers;
    prepared.zeros = static_cast<char*>(launch.workspace) + plan.zeros_begin;
    prepared.zero_bytes = plan.zeros_end - plan.zeros_begin;
    set_backward_chunks(prepared, params, launch);
    prepare_scheduler(prepared, launch);
    const int64_t work_tiles =
        int64_t{plan.buffers.list.capacity} * plan.buffers.list.work_per_tile;
    bool_switch(launch.deterministic, [&](auto is_deterministic) {
      using Chosen = Kernel<is_deterministic>;
      launch_attention<Chosen>(run_backward<Chosen>, launch,
                               persistent_blocks<Chosen>(launch, work_tiles), "backward", params,
                               maps, plan.buffers);
    });
    const LaunchConfig per_tile = {plan.dq_tiles, Form::Dq::kParts * kWarpgroup, 0, true};
    launch_kernel(convert_e4m3_dq<Form>, per_tile, launch, "dq of the backward", params,
                  plan.descales, plan.buffers.dq);
  }

 private:
  struct Plan {
    Workspace workspace;
    BackwardBuffers buffers = {};
    QuantizeParams q_and_k;
    QuantizeParams dout_and_v;
    E4m3Descales descales;
    int64_t dq_tiles;
    int64_t zeros_begin;
    int64_t zeros_end;

    Plan(const BackwardParams& params, const CudaLaunch& launch, void* memory) : workspace(memory) {
      const BatchParams& batch = params.batch;
      buffers.list = workspace.take_list(batch.total_k, batch.batch, Form::kKeys);
      buffers.list.work_per_tile = params.heads;
      buffers.list.summaries =
          workspace.take_summaries(params.mask, batch, params.heads, Form::kRows);
      const int64_t row_tiles = WorkList::max_tiles(batch.total_q, batch.batch, Form::kRows);
      dq_tiles = row_tiles * params.heads;
      const bool is_ordered = launch.deterministic;
      buffers.dq_writers = is_ordered ? workspace.take<TileSpans>(row_tiles) : nullptr;
      zeros_begin = workspace.used();
      buffers.dq = reinterpret_cast<float*>(
          workspace.take<typename Form::DqElement>(dq_tiles * Form::Dq::kSize));
      buffers.dq_semaphore = is_ordered ? workspace.take<int>(dq_tiles) : nullptr;
      zeros_end = workspace.used();
      buffers.totals = workspace.take<float>(resident_blocks<Form>(launch) * Form::kConsumers * 2 *
                                             Form::kGlobalTotals);
      take_quantized(params);
    }

   private:
    void take_quantized(const BackwardParams& params) {
      const BatchParams& batch = params.batch;
      const int64_t heads = params.heads;
      const int64_t q_blocks = max_blocks(batch.total_q, batch.batch);
      const int64_t k_blocks = max_blocks(batch.total_k, batch.batch);
      const auto take_columns = [&](const PackedTensor& tensor, int64_t blocks) {
        return workspace.take<uint8_t>(blocks * heads * tensor.head_dim * Fp8Params::kBlock);
      };
      const auto take_rows = [&](const PackedTensor& tensor, int64_t count) {
        return workspace.take<uint8_t>(count * heads *
                                       round_up(tensor.head_dim, kQuantizedHeadDimUnit));
      };
      const auto take = [&](const PackedTensor& rows, const PackedTensor& keys, bool is_q_and_k) {
        QuantizeParams to;
        to.q = rows;
        to.k = to.v = keys;
        to.heads = params.heads;
        to.dtype = params.dtype;
        to.batch = batch;
        to.mode = QuantMode::kHead;
        to.for_backward = true;
        to.silu_q = params.silu && is_q_and_k;
        to.silu_kv = params.silu;
        to.q8 = take_rows(to.q, batch.total_q);
        to.k8 = take_rows(to.k, batch.total_k);
        to.q_columns = take_columns(to.q, q_blocks);
        if (is_q_and_k) to.k_columns = take_columns(to.k, k_blocks);
        to.q_descale = workspace.take<float>(heads * batch.total_q);
        to.k_descale = workspace.take<float>(heads * k_blocks);
        to.workspace = workspace.take<char>(quantize_workspace_bytes(to));
        return to;
      };
      q_and_k = take(params.q, params.k, true);
      dout_and_v = take(params.dout, params.v, false);
      dout_and_v.q_row_scale = workspace.take<float>(heads * batch.total_q);
      q_and_k.q_column_scale = dout_and_v.q_row_scale;
      descales = {q_and_k.q_descale,
                  q_and_k.k_descale,
                  dout_and_v.k_descale,
                  dout_and_v.q_descale,
                  dout_and_v.q_row_scale,
                  batch.total_q,
                  k_blocks};
    }
  };

  // NOTE: this needs the CUDA context of the thread, which the launch of a kernel creates.
  static E4m3BackwardMaps make_maps(const BackwardParams& params, const Plan& plan) {
    const int heads = params.heads;
    const auto map_rows = [&](uint8_t* data, const PackedTensor& from, int box_rows) {
      const int head_dim = round_up(from.head_dim, kQuantizedHeadDimUnit);
      const PackedTensor tensor = {data, int64_t{heads} * head_dim, head_dim, head_dim};
      return make_ragged_map<kHeadDim>(tensor, heads, box_rows, DType::kFloat8E4M3);
    };
    const auto map_columns = [&](uint8_t* data, const PackedTensor& from, int64_t total,
                                 int count) {
      const PackedTensor tensor = {data, 0, 0, from.head_dim};
      return make_value_block_map<kHeadDim>(tensor, heads, max_blocks(total, params.batch.batch),
                                            count);
    };
    const QuantizeParams &q_and_k = plan.q_and_k, &dout_and_v = plan.dout_and_v;
    const int64_t total_q = params.batch.total_q, total_k = params.batch.total_k;
    E4m3BackwardMaps maps = {};
    maps.q = map_rows(q_and_k.q8, params.q, Form::kRows);
    maps.k = map_rows(q_and_k.k8, params.k, Form::kKeys);
    maps.dout = map_rows(dout_and_v.q8, params.dout, Form::kRows);
    maps.v = map_rows(dout_and_v.k8, params.v, Form::kKeys);
    maps.k_columns = map_columns(q_and_k.k_columns, params.k, total_k, Form::kKeys);
    maps.q_columns = map_columns(q_and_k.q_columns, params.q, total_q, Form::kRows);
    maps.dout_columns = map_columns(dout_and_v.q_columns, params.dout, total_q, Form::kRows);
    maps.descales = plan.descales;
    return maps;
  }
};

template <int kHeadDim, DType kDType>
BackwardKernel backward_e4m3() {
  using Launcher = E4m3BackwardLauncher<kHeadDim, kDType>;
  return {Launcher::workspace_bytes, Launcher::run, true};
}

}  // namespace hstu::sm90
