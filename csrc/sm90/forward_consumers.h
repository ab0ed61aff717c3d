// The consumer warpgroups of the forward: they issue the products and apply the activation and the
// mask. S and P never leave the registers.
#pragma once

#include "epilogue.h"
#include "forward_traits.h"
#include "masking.h"
#include "promotion.h"
#include "weights.h"

namespace hstu::sm90 {

// The state of a thread of a consumer warpgroup.
template <typename Traits>
struct ForwardConsumer {
  using Bias = typename Traits::Bias;
  using KeyTile = typename Traits::KeyTile;
  using KVState = typename Traits::KVState;
  using OutMma = typename Traits::OutMma;
  using ScoreMma = typename Traits::ScoreMma;
  using WorkState = typename Traits::WorkState;
  using WorkTile = typename Traits::WorkTile;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kKeys = Traits::kKeys;

  using Scores =
      decltype(partition_fragment_C(ScoreMma{}, Shape<Int<kWarpgroupRows>, Int<kKeys>>{}));
  using Out = decltype(partition_fragment_C(OutMma{}, Shape<Int<kWarpgroupRows>, Int<kHeadDim>>{}));
  using Weights = std::conditional_t<
      !Traits::kIsFp8, PlainWeights<Traits, Scores>,
      std::conditional_t<
          std::is_same_v<typename Traits::ScoreSum, float>, E4m3Weights<Traits, Scores>,
          std::conditional_t<Traits::kTransposesValues, PagedE4m3Weights<Traits, Scores>,
                             HalfE4m3Weights<Traits, Scores>>>>;
  using OutPromotion = std::conditional_t<
      Traits::kIsFp8, Promotion<Out, Traits::kPromotedTiles, Traits::kTiles.totals>, NoPromotion>;

  const ForwardParams& params;
  const SchedulerMetadata& metadata;
  typename Traits::SharedMemory& smem;
  const int warpgroup;
  const WarpSchedulerBarrier<Traits::kConsumers, Traits::kTakesTurns> scheduler_barrier{warpgroup};

  WorkState work_state;
  typename Traits::QState q_state;
  KVState k_state;
  typename Bias::template Consumer<Traits> bias{params};
  Scores scores;  // S, then P
  Out out;
  OutPromotion promotion{
      smem.totals + warpgroup * kWarpgroupRows * Traits::kTiles.totals.shared,
      metadata.totals +
          (static_cast<int>(blockIdx.x) * Traits::kConsumers + warpgroup) * Traits::kGlobalTotals};
  GMMA::ScaleOut out_scale = GMMA::ScaleOut::Zero;
  Weights weights;                   // P, rounded and masked
  KeyTile tile;                      // the key tile of `scores`
  const RowFactors* rows = nullptr;  // of the work tile of `scores`, from the thread's first row on

  HSTU_DEVICE ForwardConsumer(const ForwardParams& params, const SchedulerMetadata& metadata,
                              typename Traits::SharedMemory& smem, int warpgroup)
      : params(params), metadata(metadata), smem(smem), warpgroup(warpgroup) {}

  // The key tiles of all work tiles are one sequence of steps: S of a key tile is issued, then P V
  // of the key tile before it, which runs while S is activated. The sequence is interrupted where
  // the warpgroup's rows see fewer keys than rows of other warpgroups, and after each split: with
  // the epilogue of a split inside the loop, the compiler would move activations behind P V.
  HSTU_DEVICE void run() {
    scheduler_barrier.init();
    while (wait_for_work()) {
      smem.pipeline_k.consumer_wait(k_state);
      init_accumulator();
      if constexpr (Traits::kReleasesEarly) read_tile();
      scheduler_barrier.sync();
      start_scores();
      scheduler_barrier.arrive();
      const auto factors = load_factors();
      find_bias();
      wait_for_wgmma<0>(scores);
      silu_scores(factors);
      round_and_mask(find_visible_early());

      for (;;) {
        const bool ends_work_tile = tile.is_last_of(warpgroup);
        k_state.advance();
        if (ends_work_tile) {
          work_state.advance();
          q_state.advance();
          if (Traits::kIsSplitByList || !tile.is_last() || !wait_for_work()) break;
        }
        consumer_wait(smem.pipeline_k, k_state, smem.pipeline_v, k_state.prev());
        init_accumulator();
        if constexpr (Traits::kReleasesEarly) read_tile();
        scheduler_barrier.sync();
        start_scores();
        start_out(k_state.prev());
        scheduler_barrier.arrive();
        const auto factors = load_factors();
        find_bias();
        wait_for_wgmma<1>(scores);
        silu_scores(factors);
        const uint64_t visible = find_visible_early();
        wait_for_wgmma<0>(out);
        smem.pipeline_v.consumer_release_by_warp(k_state.prev());
        round_and_mask(visible);
        if (ends_work_tile) {
          epilogue(work_state.prev());
        } else if (promotion.add_if_due(out)) {
          out_scale = GMMA::ScaleOut::Zero;
        }
      }

      // P V of the last key tile that the warpgroup's rows see
      smem.pipeline_v.consumer_wait(k_state.prev());
      start_out(k_state.prev());
      wait_for_wgmma<0>(out);
      smem.pipeline_v.consumer_release_by_warp(k_state.prev());
      drain_tiles();
      epilogue(work_state.prev());
    }
    if constexpr (Traits::kIsSplitByCluster) {
      if (work_state.count == 0) {
        clear(out);  // this block has no visible key tile
      } else if constexpr (Traits::kIsFp8) {
        Epilogue<Traits>::scale_rows(smem.work_tiles[0], warpgroup, out);
      }
      Epilogue<Traits>::reduce_over_cluster(params, smem, warpgroup, out);
    }
  }

 private:
  static constexpr bool kMayBeUnaligned = Traits::kHasBiasTiles && Traits::Source::kIsPaged;

  HSTU_DEVICE const WorkTile& work_tile_at(WorkState state) const {
    return smem.work_tiles[state.index()];
  }

  HSTU_DEVICE auto& pipeline_q() const {
    return smem.pipeline_q[Traits::query_pipeline(warpgroup)];
  }

  // Waits for the next work tile and its Q. False if there is none.
  HSTU_DEVICE bool wait_for_work() {
    smem.pipeline_work.consumer_wait(work_state);
    const WorkTile& work_tile = work_tile_at(work_state);
    if (work_tile.is_end() || (Traits::kIsSplitByCluster && work_tile.is_empty())) return false;
    if constexpr (Traits::kHasTimeBias) bias.enter(work_tile, warpgroup);
    pipeline_q().consumer_wait(q_state);
    if constexpr (Traits::kIsFp8) rows = work_tile.row_factors + Traits::row_of_thread(warpgroup);
    return true;
  }

  // Initializes the accumulator of S for the next key tile: with the bias, if Q K^T accumulates
  // onto it.
  HSTU_DEVICE void init_accumulator() {
    if constexpr (kMayBeUnaligned) {
      const int first = read_by_warp(smem.key_tiles[k_state.index()]).first_key();
      const WorkTile& work_tile = work_tile_at(work_state);
      if (Bias::template is_unaligned<Traits>(work_tile, first)) {
        return bias.load_unaligned(params, work_tile, warpgroup, first, scores);
      }
    }
    bias.init_accumulator(smem, warpgroup, k_state, scores);
  }

  HSTU_DEVICE void read_tile() {
    // Here no wait for S stands between the wait for K and this plain load.
    if constexpr (Traits::kReleasesEarly) compiler_barrier();
    tile = read_by_warp(smem.key_tiles[k_state.index()]);
  }

  // Issues S = Q K^T, added to the accumulator if it has been initialized.
  HSTU_DEVICE void start_scores() {
    // NOTE: in 16 bits, offsets of descriptors gain nothing, and leave too few registers.
    if constexpr (Traits::kIsFp8) {
      constexpr int kQueryTiles = Traits::QState::kStages * Traits::kConsumers;
      start_gemm_of_tiles(ScoreMma{},
                          rows_tensors<kQueryTiles, kWarpgroupRows, kHeadDim>(smem.q[0][0]),
                          q_state.index() * Traits::kConsumers + warpgroup,
                          rows_tensors<KVState::kStages, kKeys, kHeadDim>(smem.k[0]),
                          k_state.index(), scores, Traits::kScaleOut);
    } else {
      start_gemm(ScoreMma{},
                 rows_tensor<kWarpgroupRows, kHeadDim>(smem.q[q_state.index()][warpgroup]),
                 rows_tensor<kKeys, kHeadDim>(smem.k[k_state.index()]), scores, Traits::kScaleOut);
    }
  }

  // Issues O += P V.
  HSTU_DEVICE void start_out(KVState state) {
    if constexpr (Traits::kIsFp8) {
      start_gemm_registers_of_tile(OutMma{}, weights.fragment,
                                   rows_tensors<KVState::kStages, kHeadDim, kKeys>(smem.v[0]),
                                   state.index(), out, out_scale);
    } else {
      start_gemm_registers(OutMma{}, weights.fragment,
                           transposed_tensor<kKeys, kHeadDim>(smem.v[state.index()]), out,
                           out_scale);
    }
    out_scale = GMMA::ScaleOut::One;
  }

  HSTU_DEVICE auto load_factors() const {
    if constexpr (Traits::kTransposesValues) {
      const typename Traits::FactorState state = {k_state.count};
      smem.pipeline_factors.consumer_wait(state);
      compiler_barrier();
      return weights.load_factors(smem, rows, state.index());
    } else {
      return weights.load_factors(smem, rows, k_state.index());
    }
  }

  // Computes the relative bias of the key tile while its products run, if it has weights by time.
  HSTU_DEVICE void find_bias() {
    if constexpr (Traits::kHasTimeBias) {
      read_tile();
      bias.find(smem, work_tile_at(work_state), warpgroup, k_state, q_state, tile.first_key());
    }
  }

  // P = silu(alpha * S), before the mask.
  template <typename Factors>
  HSTU_DEVICE void silu_scores(const Factors& factors) {
    if constexpr (!Traits::kHasTimeBias && !Traits::kReleasesEarly) read_tile();
    smem.pipeline_k.consumer_release_by_warp(k_state);
    if constexpr (Traits::kReleasesEarly)
      pipeline_q().consumer_release_by_warp_if(q_state, tile.is_last_of(warpgroup));
    if constexpr (Bias::kIsAddedAfter) bias.scale(smem, warpgroup, k_state, factors, scores);
    weights.activate(params, factors, scores);
    // NOTE: this branch keeps the compiler from moving the activation behind the wait for P V. With
    // kReleasesEarly, the branch of find_visible_early() does so.
    if (!Traits::kReleasesEarly && tile.is_last_of(warpgroup))
      pipeline_q().consumer_release_by_warp(q_state);
  }

  // Rounds P and applies the mask; `visible` is what find_visible_early() returned.
  HSTU_DEVICE void round_and_mask(uint64_t visible) {
    weights.round(scores);
    if (tile.is_partial()) weights.mask(kFindsVisibleEarly ? visible : find_visible());
  }

  // Finds the bits of the mask while P V still runs. At head dim 256, the branch on is_partial()
  // keeps the compiler from moving a third of the activation behind the wait for P V. At other head
  // dims nothing moves, and calls are slower this way. E4m3 with fp32 scores has too few registers.
  static constexpr bool kFindsVisibleEarly =
      kHeadDim == 256 && !(Traits::kIsFp8 && std::is_same_v<typename Traits::ScoreSum, float>);
  HSTU_DEVICE uint64_t find_visible_early() const {
    return kFindsVisibleEarly && tile.is_partial() ? find_visible() : 0;
  }

  // Returns which of 64 keys one row sees, as visible_to_lane() expects it.
  HSTU_DEVICE uint64_t find_visible() const {
    static_assert(kKeys <= 128, "two lanes find what a row sees");
    const WorkTile& work_tile = work_tile_at(work_state);
    const Sequence& sequence = work_tile.tile.sequence;
    const int lane = reload_thread_idx() % 32;
    const int row = work_tile.first_row_of_warp(warpgroup) + lane % 16;
    if (row >= sequence.q_len) return 0;
    const Mask mask(Traits::mask_params(params), sequence, work_tile.head);
    return Traits::Source::template visible_keys<kKeys>(mask, sequence, row,
                                                        tile.first_key() + lane / 16 * 64);
  }

  // Releases the remaining key tiles of the work tile, which only rows of other warpgroups see.
  HSTU_DEVICE void drain_tiles() {
    while (!tile.is_last()) {
      // Takes and passes the warpgroup's turn, for which the others wait (invariant 4).
      scheduler_barrier.sync();
      scheduler_barrier.arrive();
      consumer_wait(smem.pipeline_k, k_state, smem.pipeline_v, k_state);
      read_tile();
      smem.pipeline_k.consumer_release_by_warp(k_state);
      smem.pipeline_v.consumer_release_by_warp(k_state);
      skip_bias();
      k_state.advance();
    }
  }

  HSTU_DEVICE void skip_bias() {
    if constexpr (kMayBeUnaligned) {
      const WorkTile& work_tile = work_tile_at(work_state.prev());
      if (Bias::template is_unaligned<Traits>(work_tile, tile.first_key())) return;
    }
    bias.skip_tile(smem);
  }

  // Stores O of a work tile. In a cluster, reduce_over_cluster() stores O at the end instead.
  HSTU_DEVICE void epilogue(WorkState state) {
    promotion.finish(out);
    if constexpr (!Traits::kIsSplitByCluster) {
      Epilogue<Traits>::store(params, metadata, work_tile_at(state), warpgroup, out);
    }
    smem.pipeline_work.consumer_release(state);
    out_scale = GMMA::ScaleOut::Zero;
  }
};

}  // namespace hstu::sm90
