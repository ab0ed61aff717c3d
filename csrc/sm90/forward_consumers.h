// The consumers of the forward: warpgroups that multiply, and store what they have added up.
#pragma once

#include "../common/activation.h"
#include "../common/launch.h"
#include "bias.h"
#include "forward_traits.h"
#include "stores.h"

namespace hstu::sm90 {

template <typename Traits>
struct ForwardConsumers : Traits {
  using Traits::kClusterSize;
  using Traits::kConsumers;
  using Traits::kHasBias;
  using Traits::kHeadDim;
  using Traits::kIsClusterSplit;
  using Traits::kIsPaged;
  using Traits::kIsSplitKV;
  using Traits::kKeys;
  using Traits::kNoKey;
  using Traits::kRows;
  using typename Traits::BiasState;
  using typename Traits::Element;
  using typename Traits::KeyTile;
  using typename Traits::KVState;
  using typename Traits::OutMma;
  using typename Traits::QState;
  using typename Traits::ScoreMma;
  using typename Traits::SharedMemory;
  using typename Traits::WorkState;
  using typename Traits::WorkTile;

  using Scores =
      decltype(partition_fragment_C(ScoreMma{}, Shape<Int<kWarpgroupRows>, Int<kKeys>>{}));
  using Out = decltype(partition_fragment_C(OutMma{}, Shape<Int<kWarpgroupRows>, Int<kHeadDim>>{}));

  // All tiles of all items are one sequence of steps: S of a tile is started, then P V of the tile
  // before it, which runs beside the activation of S. The sequence is broken where the warpgroup's
  // rows see fewer keys than the others'; and after each share of an item, since what ends one, if
  // it stood among the steps, would make the compiler move activations behind P V.
  static HSTU_DEVICE void run(const ForwardParams& params, const SplitKV& split_kv,
                              SharedMemory& smem, int warpgroup) {
    const WarpSchedulerBarrier<kConsumers> scheduler_barrier{warpgroup};
    scheduler_barrier.init();
    WorkState work_state;
    QState q_state;
    KVState k_state;
    BiasState bias_state;
    Scores scores;
    Out out;
    GMMA::ScaleOut out_scale = GMMA::ScaleOut::Zero;
    Tensor weights = make_tensor_like<Element>(scores);

    const auto work_at = [&](WorkState state) -> const WorkTile& {
      return smem.work_tiles[state.index()];
    };
    // S = Q K^T + bias, started
    const auto start_scores = [&] {
      start_gemm(ScoreMma{},
                 rows_tensor<kWarpgroupRows, kHeadDim>(smem.q[q_state.index()][warpgroup]),
                 rows_tensor<kKeys, kHeadDim>(smem.k[k_state.index()]), scores,
                 kHasBias ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero);
    };
    // O += P V, started
    const auto start_out = [&](KVState state) {
      start_gemm_registers(OutMma{}, weights,
                           transposed_tensor<kKeys, kHeadDim>(smem.v[state.index()]), out,
                           out_scale);
      out_scale = GMMA::ScaleOut::One;
    };
    const auto wait_for_work = [&] {
      smem.pipeline_work.consumer_wait(work_state);
      const WorkTile& work_tile = work_at(work_state);
      if (work_tile.head < 0 || (kIsClusterSplit && work_tile.tile_from(0) == kNoKey)) return false;
      smem.pipeline_q.consumer_wait(q_state);
      return true;
    };
    const auto add_bias = [&] {
      if constexpr (kHasBias) {
        smem.pipeline_bias.consumer_wait(bias_state);
        load_bias<kKeys>(smem.bias[bias_state.index()] + warpgroup * (kWarpgroupRows * kKeys),
                         scores);
        smem.pipeline_bias.consumer_release_by_warp(bias_state);
        bias_state.advance();
      }
    };
    // P = silu(alpha * S), before the mask
    KeyTile tile;
    const auto silu_scores = [&] {
      tile = read_by_warp(smem.key_tiles[k_state.index()]);
      smem.pipeline_k.consumer_release_by_warp(k_state);
      apply_silu(params, scores);
      // NOTE: a branch, behind which the compiler does not move the activation: to wait for P V.
      if (tile.is_last_of(warpgroup)) smem.pipeline_q.consumer_release_by_warp(q_state);
    };
    // P = M * P, rounded
    const auto round_and_mask = [&] {
      round_to(scores, weights);
      if (tile.is_partial()) {
        apply_mask(find_visible(params, work_at(work_state), warpgroup, tile), weights);
      }
    };
    const auto epilogue = [&](WorkState state) {
      if constexpr (!kIsClusterSplit) {
        if (kIsSplitKV && work_at(state).other_splits > 0) {
          combine_splits(params, split_kv, work_at(state), warpgroup, out);
        } else {
          store_out(params, work_at(state), warpgroup, out);
        }
      }
      smem.pipeline_work.consumer_release(state);
      out_scale = GMMA::ScaleOut::Zero;
    };

    // The tiles of an item behind the last one that the warpgroup's rows see
    const auto drain_tiles = [&] {
      while (!tile.is_last()) {
        scheduler_barrier.sync();
        scheduler_barrier.arrive();
        consumer_wait(smem.pipeline_k, k_state, smem.pipeline_v, k_state);
        tile = read_by_warp(smem.key_tiles[k_state.index()]);
        smem.pipeline_k.consumer_release_by_warp(k_state);
        smem.pipeline_v.consumer_release_by_warp(k_state);
        if constexpr (kHasBias) {
          smem.pipeline_bias.consumer_wait(bias_state);
          smem.pipeline_bias.consumer_release_by_warp(bias_state);
          bias_state.advance();
        }
        k_state.advance();
      }
    };

    while (wait_for_work()) {
      smem.pipeline_k.consumer_wait(k_state);
      add_bias();
      scheduler_barrier.sync();
      start_scores();
      scheduler_barrier.arrive();
      wait_for_wgmma<0>(scores);
      silu_scores();
      round_and_mask();

      for (;;) {
        const bool ends_work_tile = tile.is_last_of(warpgroup);
        k_state.advance();
        if (ends_work_tile) {
          work_state.advance();
          q_state.advance();
          if (kIsSplitKV || !tile.is_last() || !wait_for_work()) break;
        }
        consumer_wait(smem.pipeline_k, k_state, smem.pipeline_v, k_state.prev());
        add_bias();
        scheduler_barrier.sync();
        start_scores();
        start_out(k_state.prev());
        scheduler_barrier.arrive();
        wait_for_wgmma<1>(scores);
        silu_scores();
        wait_for_wgmma<0>(out);
        smem.pipeline_v.consumer_release_by_warp(k_state.prev());
        round_and_mask();
        if (ends_work_tile) epilogue(work_state.prev());
      }

      // P V of the last tile
      smem.pipeline_v.consumer_wait(k_state.prev());
      start_out(k_state.prev());
      wait_for_wgmma<0>(out);
      smem.pipeline_v.consumer_release_by_warp(k_state.prev());
      drain_tiles();
      epilogue(work_state.prev());
    }
    if constexpr (kIsClusterSplit) {
      if (work_state.count == 0) clear(out);  // the block had no tile
      reduce_over_cluster(params, smem, warpgroup, out);
    }
  }

  // Which of 64 keys one row sees: lane n of a warp finds it for row n % 16 of the warp's, and the
  // first or second 64 keys of the tile.
  static HSTU_DEVICE uint64_t find_visible(const ForwardParams& params, const WorkTile& work_tile,
                                           int warpgroup, KeyTile tile) {
    static_assert(kKeys <= 128, "two lanes find what a row sees");
    const Sequence& sequence = work_tile.tile.sequence;
    const int lane = reload_thread_idx() % 32;
    const int row = first_row(work_tile, warpgroup) + lane % 16;
    if (row >= sequence.q_len) return 0;
    const Mask mask(params.mask, sequence, work_tile.head);
    const int padded_key = tile.first_key() + lane / 16 * 64;
    if constexpr (!kIsPaged) return mask.row_bits(row, padded_key);
    const PaddedKeys<kKeys> padded(sequence);
    return padded.without_gap(mask.row_bits(row, padded.key(padded_key)), padded_key);
  }

  // P = silu(alpha * S)
  static HSTU_DEVICE void apply_silu(const ForwardParams& params, Scores& scores) {
    const float half_alpha = 0.5f * static_cast<float>(params.alpha);
#pragma unroll
    for (int n = 0; n < size(scores); ++n) {
      const float x = half_alpha * scores(n);
      scores(n) = silu_of_half(x, tanh_approx(x));
    }
  }

  // Zeroes what the mask hides. Four lanes share a row, and each gets the bits of it.
  template <typename Weights>
  static HSTU_DEVICE void apply_mask(uint64_t visible, Weights& weights) {
    const int lane = reload_thread_idx() % 32;
    Tensor words = recast<uint32_t>(weights);  // for each 8 keys one of row m = 0, one of m = 1
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int first = 0; first < kKeys; first += 64) {
        const int owner = first / 4 + m * 8 + lane / 4;
        const uint64_t bits = __shfl_sync(0xffffffff, visible, owner) >> lane % 4 * 2;
#pragma unroll
        for (int key = 0; key < 64 && first + key < kKeys; key += 8) {
          const uint32_t low = bits >> key & 1 ? 0x0000ffff : 0;
          const uint32_t high = bits >> (key + 1) & 1 ? 0xffff0000 : 0;
          words((first + key) / 4 + m) &= low | high;
        }
      }
    }
  }

  // The first of the 16 rows of the thread's warp.
  static HSTU_DEVICE int first_row(const WorkTile& work_tile, int warpgroup) {
    const int warp = reload_thread_idx() / 32 % 4;
    return work_tile.tile.index * kRows + warpgroup * kWarpgroupRows + warp * 16;
  }

  static HSTU_DEVICE float scale_of(const ForwardParams& params, const Sequence& sequence,
                                    int row) {
    if (!params.attn_scale) return static_cast<float>(params.scale);
    const bool is_own = params.attn_scale_per_row && row < sequence.q_len;
    return params.attn_scale[is_own ? sequence.q_begin + row : 0];
  }

  // Of a thread's two rows
  struct RowScales {
    float scale[2];

    HSTU_DEVICE RowScales(const ForwardParams& params, const WorkTile& work_tile, int warpgroup) {
      const int row = first_row(work_tile, warpgroup) + reload_thread_idx() % 32 / 4;
      for (int m = 0; m < 2; ++m) scale[m] = scale_of(params, work_tile.tile.sequence, row + 8 * m);
    }
  };

  // O = scale * sum over the cluster's blocks, rounded once
  static HSTU_DEVICE void reduce_over_cluster(const ForwardParams& params, SharedMemory& smem,
                                              int warpgroup, const Out& out) {
    static_assert(kRows * kHeadDim * sizeof(float) <= sizeof(smem.k) + sizeof(smem.v),
                  "the sums take the place of K and V");
    asm volatile("bar.sync %0, %1;" ::"n"(static_cast<int>(NamedBarrier::kConsumers)),
                 "n"(kConsumers * kWarpgroup)
                 : "memory");  // K and V have been read
    float* const sums = reinterpret_cast<float*>(smem.k[0]) + warpgroup * kWarpgroupRows * kHeadDim;
    const WorkTile& work_tile = smem.work_tiles[0];
    const Sequence& sequence = work_tile.tile.sequence;
    const int first = first_row(work_tile, warpgroup) + reload_thread_idx() % 32 / 4;
    reduce_sums_over_cluster<kClusterSize>(out, sums, [&](int column, int m, float x, float y) {
      const int row = first + 8 * m;
      if (work_tile.head < 0 || row >= sequence.q_len || column >= params.out.head_dim) return;
      const float scale = scale_of(params, sequence, row);
      Element* to = static_cast<Element*>(params.out.data) +
                    (sequence.q_begin + row) * params.out.row_stride +
                    work_tile.head * params.out.head_stride + column;
      const cutlass::NumericArrayConverter<Element, float, 2> convert;
      *reinterpret_cast<cutlass::Array<Element, 2>*>(to) = convert({scale * x, scale * y});
    });
  }

  // Where an item's keys are shared: leaves the sum over this share, and the last warpgroup to come
  // stores O = scale * the sum over all of them.
  static HSTU_DEVICE void combine_splits(const ForwardParams& params, const SplitKV& split_kv,
                                         const WorkTile& work_tile, int warpgroup, Out& out) {
    wait_for_previous_kernel();  // which has zeroed what is counted
    const Sequence& sequence = work_tile.tile.sequence;
    const int64_t tile =
        first_tile(sequence.q_begin, work_tile.tile.sequence_index, kRows) + work_tile.tile.index;
    const int64_t slot = (tile * params.heads + work_tile.head) * kConsumers + warpgroup;
    constexpr int kSize = kWarpgroupRows * kHeadDim;
    float* const sums = split_kv.partial_out + slot * split_kv.num_splits * kSize;
    // Of two shares, the second is most often there already: blocks that take several begin early.
    if (split_kv.num_splits == 2 && work_tile.split.begin == 0 &&
        have_arrived(split_kv.arrived + slot, work_tile.other_splits, warpgroup)) {
      add_partial(sums + kSize, out);
      store_out(params, work_tile, warpgroup, out);
      return;
    }
    store_partial(out, sums + work_tile.split.begin / split_kv.keys_per_split * kSize);
    if (!is_last_arrival(split_kv.arrived + slot, work_tile.other_splits, warpgroup)) return;
    uint32_t seen = 0;  // a bit for each share in which its rows see keys
#pragma unroll 1
    for (int n = 0; n < split_kv.num_splits; ++n) {
      seen |= uint32_t{work_tile.sees(split_kv.keys_of(n))} << n;
    }
    const RowScales scales(params, work_tile, warpgroup);
#pragma unroll 1
    for (int column = 0; column < kHeadDim; column += kStoredColumns) {
      auto sum = make_stored_columns();
      sum_partials(sums, seen, split_kv.num_splits, kSize, column, sum);
      store_columns(params, work_tile, warpgroup, scales, column, sum);
    }
  }

  // O = scale * O
  static HSTU_DEVICE void store_out(const ForwardParams& params, const WorkTile& work_tile,
                                    int warpgroup, const Out& out) {
    const RowScales scales(params, work_tile, warpgroup);
#pragma unroll
    for (int column = 0; column < kHeadDim; column += kStoredColumns) {
      auto sum = make_stored_columns();
#pragma unroll
      for (int n = 0; n < size(sum); ++n) sum(n) = out(column / 2 + n);
      store_columns(params, work_tile, warpgroup, scales, column, sum);
      compiler_barrier();
    }
  }

  // Of a warpgroup's rows at a time. With two ways to store them, there are registers for a few.
  static constexpr int kStoredColumns = kIsSplitKV ? 32 : kHeadDim;
  static HSTU_DEVICE auto make_stored_columns() {
    return make_tensor<float>(Int<kStoredColumns / 2>{});
  }
  // Scaled, and rounded once.
  template <typename Sum>
  static HSTU_DEVICE void store_columns(const ForwardParams& params, const WorkTile& work_tile,
                                        int warpgroup, const RowScales& scales, int column,
                                        Sum& sum) {
#pragma unroll
    for (int n = 0; n < size(sum); ++n) sum(n) *= scales.scale[n / 2 % 2];
    const Sequence& sequence = work_tile.tile.sequence;
    const int first = work_tile.tile.index * kRows + warpgroup * kWarpgroupRows;
    store_sum<Element, kStoredColumns>(sum, params.out, work_tile.head, sequence.q_begin + first,
                                       sequence.q_len - first, column);
  }
};

}  // namespace hstu::sm90
