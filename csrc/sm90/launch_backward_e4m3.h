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
    for (const QuantizeParams& quantize : plan.quantized) quantize_qkv(quantize, launch.stream);
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
                               plan.maps, plan.buffers);
    });
    const LaunchConfig per_tile = {plan.dq_tiles, Form::Dq::kParts * kWarpgroup, 0, true};
    launch_kernel(convert_e4m3_dq<Form>, per_tile, launch, "dq of the backward", params,
                  plan.maps.descales, plan.buffers.dq);
  }

 private:
  struct Plan {
    Workspace workspace;
    BackwardBuffers buffers = {};
    E4m3BackwardMaps maps = {};
    QuantizeParams quantized[2];  // q and k; dout and v
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
      take_quantized(params, memory != nullptr);
    }

    void take_quantized(const BackwardParams& params, bool makes_maps) {
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
      const PackedTensor* const tensors[][2] = {{&params.q, &params.k}, {&params.dout, &params.v}};
      for (int n = 0; n < 2; ++n) {
        QuantizeParams& to = quantized[n];
        to.q = *tensors[n][0];
        to.k = *tensors[n][1];
        to.v = to.k;
        to.heads = params.heads;
        to.dtype = params.dtype;
        to.batch = batch;
        to.mode = QuantMode::kHead;
        to.for_backward = true;
        to.q8 = take_rows(to.q, batch.total_q);
        to.k8 = take_rows(to.k, batch.total_k);
        to.q_columns = take_columns(to.q, q_blocks);
        if (n == 0) to.k_columns = take_columns(to.k, k_blocks);
        to.q_descale = workspace.take<float>(heads * batch.total_q);
        to.k_descale = workspace.take<float>(heads * k_blocks);
        to.workspace = nullptr;
        to.workspace = workspace.take<char>(quantize_workspace_bytes(to));
      }
      if (!makes_maps) return;
      const auto map_rows = [&](uint8_t* data, const PackedTensor& from, int box_rows) {
        const int64_t head_dim = round_up(from.head_dim, kQuantizedHeadDimUnit);
        const PackedTensor tensor = {data, heads * head_dim, head_dim, static_cast<int>(head_dim)};
        return make_ragged_map<kHeadDim>(tensor, params.heads, box_rows, DType::kFloat8E4M3);
      };
      maps.q = map_rows(quantized[0].q8, params.q, Form::kRows);
      maps.k = map_rows(quantized[0].k8, params.k, Form::kKeys);
      maps.dout = map_rows(quantized[1].q8, params.dout, Form::kRows);
      maps.v = map_rows(quantized[1].k8, params.v, Form::kKeys);
      const auto map_columns = [&](uint8_t* data, const PackedTensor& from, int64_t blocks,
                                   int count) {
        const PackedTensor tensor = {data, 0, 0, from.head_dim};
        return make_value_block_map<kHeadDim>(tensor, params.heads, blocks, count);
      };
      maps.k_columns = map_columns(quantized[0].k_columns, params.k, k_blocks, Form::kKeys);
      maps.q_columns = map_columns(quantized[0].q_columns, params.q, q_blocks, Form::kRows);
      maps.dout_columns = map_columns(quantized[1].q_columns, params.dout, q_blocks, Form::kRows);
      maps.descales = {quantized[0].q_descale, quantized[0].k_descale, quantized[1].k_descale,
                       quantized[1].q_descale, batch.total_q,          k_blocks};
    }
  };
};

template <int kHeadDim, DType kDType>
BackwardKernel backward_e4m3() {
  using Launcher = E4m3BackwardLauncher<kHeadDim, kDType>;
  return {Launcher::workspace_bytes, Launcher::run, true};
}

}  // namespace hstu::sm90
