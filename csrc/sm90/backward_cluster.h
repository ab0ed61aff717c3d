// The consumers of the backward for head dims above 128, in a cluster of two blocks.
//
// In a step, the cluster processes 64 rows and the work tile's 128 keys. Block r has keys r (the 64
// keys from 64 r on) and computes columns r (one half of the head dim) of dK, dV and dQ:
//
//                       warpgroup 0 of block r          warpgroup 1 of block r
//   one wgmma product   S:  keys r x 64 rows            dP: keys r x 64 rows
//   exchange_halves()   S and dP: keys r x rows 0-31    S and dP: keys r x rows 32-63
//   store_p_and_ds()    P and dS of these, to the shared memory of both blocks
//   dK, dV              keys r x columns r              keys 1 - r x columns r
//   dQ                  64 rows x 1st half of columns r 64 rows x 2nd half of columns r
//
// At head dim 192, warpgroup 0 has two thirds of the columns of dQ, because a wgmma operand begins
// with a panel of 32 columns.
//
// One product of 64 x 64 per warpgroup reads less shared memory than two of 64 x 32 would.
#pragma once

#include "../common/ptx.h"
#include "backward_consumers.h"

namespace hstu::sm90 {

template <typename Traits>
struct BackwardClusterConsumers : BackwardConsumers<Traits> {
  using Base = BackwardConsumers<Traits>;
  using typename Base::BiasWeights;
  using typename Base::ConsumerBarrierState;
  using typename Base::DoutState;
  using typename Base::DqPart;
  using typename Base::DqState;
  using typename Base::DsState;
  using typename Base::Element;
  using typename Base::KVState;
  using typename Base::Product;
  using typename Base::QState;
  using typename Base::RowTile;
  using typename Base::Scores;
  using typename Base::SharedMemory;
  using typename Base::Weights;
  using typename Base::WorkState;
  using typename Base::WorkTile;
  using DqMma = typename Base::DqMma;
  using Dq = typename Traits::Dq;
  // The part of dQ of a warpgroup.
  template <int kOwn>
  struct DqOf {
    static constexpr int kParts = kOwn == 0 ? Dq::kPartsOfBlock - 1 : 1;
    static constexpr int kFirst = kOwn == 0 ? 0 : Dq::kPartsOfBlock - 1;  // of the block's parts
    static constexpr int kColumns = kParts * Dq::kColumns;
    using Mma = RowsByColumnsMma<Element, kColumns, Traits::kBlockKeys>;
    using Part = decltype(partition_fragment_C(Mma{}, Shape<Int<kWarpgroupRows>, Int<kColumns>>{}));
  };
  using Base::kStartsScoresEarly;
  using Traits::kBlockKeys;
  using Traits::kColumns;
  using Traits::kHasBias;
  using Traits::kHeadDim;
  using Traits::kRows;
  using Traits::kScoreRows;

  using KeyMma = ColumnsByColumnsMma<Element, kColumns, kRows>;  // 64 keys by kColumns

  static HSTU_DEVICE void run(const BackwardParams& params, const BackwardBuffers& buffers,
                              SharedMemory& smem, int warpgroup) {
    if (warpgroup == 0) {
      consume<0>(params, buffers, smem);
    } else {
      consume<1>(params, buffers, smem);
    }
  }

 private:
  using KeySum =
      decltype(partition_fragment_C(KeyMma{}, Shape<Int<kWarpgroupRows>, Int<kColumns>>{}));
  static constexpr int kTileSize = kRows * kBlockKeys;  // elements of a block's P and dS

  template <int kOwn>
  static HSTU_DEVICE void consume(const BackwardParams& params, const BackwardBuffers& buffers,
                                  SharedMemory& smem) {
    constexpr bool kFindsScores = kOwn == 0;
    const float ds_factor = Traits::stores_ds(params) ? Base::full_factor(params) : 1.0f;
    const int rank = Traits::rank();
    const int key_group = rank ^ kOwn;
    QState q_state;
    DqState dq_state;
    ConsumerBarrierState barrier_state;
    for (WorkState work_state;; work_state.advance()) {
      smem.pipeline_work.consumer_wait(work_state);
      const WorkTile& work_tile = smem.work_tiles[work_state.index()];
      if (work_tile.head < 0) return;
      const KVState kv_state{work_state.count};
      smem.pipeline_kv.consumer_wait(kv_state);
      KeySum dk, dv;
      GMMA::ScaleOut scale = GMMA::ScaleOut::Zero;
      Product product;
      BiasWeights bias;
      RowTile tile = Base::wait_for_rows(params, work_tile, kOwn, q_state, smem);
      if constexpr (kStartsScoresEarly) {
        Base::load_bias(params, kOwn, q_state, smem, bias);
        if constexpr (kFindsScores) start_scores(smem, q_state, product);
        wait_for_wgmma<0>(product);
      }
      for (;;) {
        Element* const q = smem.q[q_state.index()];
        const DoutState dout_state{q_state.count};
        Element* const dout = smem.dout[dout_state.index()];
        const uint64_t* const visible = smem.visible[q_state.index()][0] + kOwn * kScoreRows;
        // S^T = K Q^T + bias^T and dP^T = V dO^T
        if constexpr (kFindsScores && !kStartsScoresEarly) start_scores(smem, q_state, product);
        smem.pipeline_dout.consumer_wait(dout_state);
        if (params.attn_scale_per_row) {
          Base::scale_rows(params, work_tile, tile, dout);
          sync_block_consumers(smem, barrier_state);
        }
        if constexpr (!kFindsScores) {
          Base::start_product(smem.v, dout, 0, product, GMMA::ScaleOut::Zero);
        }
        wait_for_wgmma<0>(product);
        const DsState ds_state{q_state.count};
        // NOTE: there is one buffer for both stages of pipeline_ds, so this waits until the
        // previous tile has been consumed.
        smem.pipeline_ds.producer_acquire(DsState{ds_state.count + 1});
        Scores scores, gradients;
        if constexpr (kFindsScores) {
          exchange_halves<kOwn>(product, smem, barrier_state, scores, gradients);
        } else {
          exchange_halves<kOwn>(product, smem, barrier_state, gradients, scores);
        }
        if constexpr (!kStartsScoresEarly) Base::load_bias(params, kOwn, q_state, smem, bias);
        if constexpr (kHasBias) add(bias, scores);
        // P = M * silu(alpha * S) and dS = M * dP * silu'(alpha * S)
        Weights weights, dscores;
        silu_and_derivative(static_cast<float>(params.alpha), scores, weights, scores);
        multiply(scores, gradients, ds_factor, dscores);
        if (tile.is_partial()) {
          apply_mask_transposed<kScoreRows>(visible, weights);
          apply_mask_transposed<kScoreRows>(visible, dscores);
        }
        sync_block_consumers(smem, barrier_state);  // both warpgroups have read their half
        store_p_and_ds(weights, dscores, kOwn, ds_state, smem);
        const bool is_last = tile.is_last();
        const RowTile done = tile;
        if (kStartsScoresEarly && !is_last) {
          Base::load_bias(params, kOwn, QState{q_state.count + 1}, smem, bias);
        }
        q_state.advance();

        // dV += P^T dO, dK += dS^T Q and dQ = dS K: products with this block's P and dS start
        // first, products with the other block's P and dS when these have arrived.
        Element* const ds = smem.ds[0];
        typename DqOf<kOwn>::Part dq;
        const auto start_keys = [&] {
          start_key_product(smem.p + key_group * kTileSize, dout, rank, dv, scale);
          start_key_product(ds + key_group * kTileSize, q, rank, dk, scale);
        };
        smem.pipeline_ds.consumer_wait(ds_state);
        if constexpr (kFindsScores) start_keys();
        start_dq<kOwn>(ds + rank * kTileSize, smem.k, rank * kColumns, dq, GMMA::ScaleOut::Zero);
        if constexpr (kFindsScores) {
          wait_for_wgmma<2>(dv);
          smem.pipeline_dout.consumer_release_by_warp(dout_state);
        }
        smem.pipeline_other_ds.consumer_wait(ds_state);
        if constexpr (!kFindsScores) start_keys();
        start_dq<kOwn>(ds + (rank ^ 1) * kTileSize, smem.other_k, 0, dq, GMMA::ScaleOut::One);
        if constexpr (!kFindsScores) {
          wait_for_wgmma<2>(dv);
          smem.pipeline_dout.consumer_release_by_warp(dout_state);
        }
        scale = GMMA::ScaleOut::One;

        if constexpr (kStartsScoresEarly) {
          if (!is_last) tile = Base::wait_for_rows(params, work_tile, kOwn, q_state, smem);
          if constexpr (kFindsScores) {
            if (!is_last) {
              start_scores(smem, q_state, product);
              warpgroup_wait<1>();
            }
          }
        }
        if (!kStartsScoresEarly || !kFindsScores || is_last) warpgroup_wait<0>();
        warpgroup_fence_operand(dq);
        warpgroup_fence_operand(dk);
        consumer_release_in_cluster(smem.pipeline_ds, ds_state);
        sync_block_consumers(smem, barrier_state);  // all have read Q, which dQ overwrites
        Base::store_dq(params, buffers, work_tile, work_state, done, dq, DqOf<kOwn>::kFirst,
                       dq_state, smem);
        dq_state.advance();
        if (is_last) break;
        if constexpr (!kStartsScoresEarly) {
          tile = Base::wait_for_rows(params, work_tile, kOwn, q_state, smem);
        }
      }

      wait_for_wgmma<0>(product);  // no wgmma is in flight: this only tells the compiler so
      smem.pipeline_kv.consumer_release_by_warp(kv_state);
      Base::store_keys(params.dk, work_tile, key_group, dk, Base::factor_of_ds(params));
      Base::store_keys(params.dv, work_tile, key_group, dv, Base::uniform_scale(params));
      smem.pipeline_work.consumer_release(work_state);
    }
  }

  // Starts S^T = K Q^T, without the bias.
  static HSTU_DEVICE void start_scores(SharedMemory& smem, QState state, Product& product) {
    Base::start_product(smem.k, smem.q[state.index()], 0, product, GMMA::ScaleOut::Zero);
  }

  // Starts sum = scale * sum + weights^T rows, for 64 keys and the block's columns.
  static HSTU_DEVICE void start_key_product(Element* weights, Element* rows, int rank, KeySum& sum,
                                            GMMA::ScaleOut scale) {
    const auto columns = local_tile(transposed_tensor<kRows, kHeadDim, Traits::kIsNarrow>(rows),
                                    Shape<Int<kColumns>, Int<kRows>>{}, make_coord(rank, _0{}));
    start_gemm(KeyMma{}, transposed_tensor<kRows, kBlockKeys>(weights), columns, sum, scale);
  }

  // Starts dQ = scale * dQ + dS K for 64 keys. The block's columns of `k` begin at `first_column`.
  template <int kOwn>
  static HSTU_DEVICE void start_dq(Element* ds, Element* k, int first_column,
                                   typename DqOf<kOwn>::Part& dq, GMMA::ScaleOut scale) {
    using Own = DqOf<kOwn>;
    // NOTE: panels of columns follow each other in memory.
    Element* const own = k + (first_column + Own::kFirst * Dq::kColumns) * kBlockKeys;
    const auto columns = transposed_tensor<kBlockKeys, Own::kColumns, Traits::kIsNarrow>(own);
    start_gemm(typename Own::Mma{}, rows_tensor<kRows, kBlockKeys>(ds), columns, dq, scale);
  }

  // One warpgroup has S, the other dP, each for all rows of the step. A warpgroup keeps half kOwn
  // of its rows and receives the same half of the other warpgroup's product, through the shared
  // memory that will hold the block's P and dS.
  template <int kOwn>
  static HSTU_DEVICE void exchange_halves(const Product& product, SharedMemory& smem,
                                          ConsumerBarrierState& barrier_state, Scores& kept,
                                          Scores& got) {
    constexpr int kOther = 1 - kOwn;
    constexpr int kCount = decltype(size(kept))::value;
    const int own_tile = Traits::rank() * kTileSize;
    const auto inbox = [&](int warpgroup) {
      Element* const tile = warpgroup == 0 ? smem.p : smem.ds[0];
      return reinterpret_cast<float*>(tile + own_tile) + reload_thread_idx() % kWarpgroup * 4;
    };
    float* const to = inbox(kOther);
#pragma unroll
    for (int n = 0; n < kCount; n += 4) {
      const int m = kOther * kCount + n;
      *reinterpret_cast<float4*>(to + n * kWarpgroup) = {product(m), product(m + 1), product(m + 2),
                                                         product(m + 3)};
    }
    sync_block_consumers(smem, barrier_state);
    const float* const from = inbox(kOwn);
#pragma unroll
    for (int n = 0; n < kCount; n += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + n * kWarpgroup);
      got(n) = four.x;
      got(n + 1) = four.y;
      got(n + 2) = four.z;
      got(n + 3) = four.w;
    }
#pragma unroll
    for (int n = 0; n < kCount; ++n) kept(n) = product(kOwn * kCount + n);
  }

  // A barrier of all consumers of the block.
  // NOTE: this is an mbarrier, because the two warpgroups run different code, and all threads of a
  // named barrier would have to wait in the same instruction. Each thread arrives, because
  // racecheck attributes to an arrival only what the arriving thread wrote before it.
  static HSTU_DEVICE void sync_block_consumers(SharedMemory& smem, ConsumerBarrierState& state) {
    smem.consumer_barrier.full[state.index()].arrive();
    smem.consumer_barrier.consumer_wait(state);
    state.advance();
  }

  // Stores P and dS of a warpgroup's rows in the shared memory of both blocks.
  static HSTU_DEVICE void store_p_and_ds(const Weights& weights, const Weights& dscores,
                                         int warpgroup, DsState state, SharedMemory& smem) {
    constexpr int kSize = kScoreRows * kWarpgroupRows;
    const int own = Traits::rank() * kTileSize + warpgroup * kSize;
    store_transposed<kScoreRows>(weights, smem.p + own);
    store_transposed<kScoreRows>(dscores, smem.ds[0] + own);
    cutlass::arch::fence_view_async_shared();  // before wgmma and the copy to the other block
    smem.pipeline_ds.producer_commit_by_warp(state);
    sync_warpgroup(warpgroup);  // all threads have stored
    if (reload_thread_idx() % kWarpgroup == 0) {
      constexpr int kBytes = kSize * sizeof(Element);
      auto& full = smem.pipeline_other_ds.full[state.index()];
      copy_to_other_block<kBytes>(smem.p + own, full);
      copy_to_other_block<kBytes>(smem.ds[0] + own, full);
      full.arrive_and_expect_tx(2 * kBytes);  // the other block sends as many bytes
    }
  }

  // Copies kBytes bytes to the same address in the other block and signals the barrier there.
  template <int kBytes>
  static HSTU_DEVICE void copy_to_other_block(const Element* from,
                                              cutlass::arch::ClusterTransactionBarrier& barrier) {
    const uint32_t other = Traits::rank() ^ 1;
    const uint32_t source = cast_smem_ptr_to_uint(from);
    const uint32_t own_barrier = cast_smem_ptr_to_uint(&barrier);
    ptx::bulk_copy_to_cluster<kBytes>(source, set_block_rank(source, other),
                                      set_block_rank(own_barrier, other));
  }

  // Tells the producers in both blocks that a warp has read P and dS.
  static HSTU_DEVICE void consumer_release_in_cluster(const Pipeline<DsState::kStages>& pipeline,
                                                      DsState state) {
    __syncwarp();
    if (!arrives_for_warp()) return;
    for (uint32_t rank = 0; rank < 2; ++rank) pipeline.empty[state.index()].arrive(rank);
  }
};

}  // namespace hstu::sm90
