// The consumer warpgroups of the backward, which issue the wgmmas. backward_cluster.h has the
// consumers of a cluster, whose order of products differs.
#pragma once

#include "backward_scores.h"
#include "backward_traits.h"

namespace hstu::sm90 {

template <typename Traits>
struct BackwardConsumers : Traits {
  using typename Traits::BiasState;
  using typename Traits::ConsumerBarrierState;
  using typename Traits::DoutState;
  using typename Traits::DqState;
  using typename Traits::DsState;
  using typename Traits::Element;
  using typename Traits::KVState;
  using typename Traits::MaskState;
  using typename Traits::QState;
  using typename Traits::RowTile;
  using typename Traits::SharedMemory;
  using typename Traits::WorkState;
  using typename Traits::WorkTile;
  using Dq = typename Traits::Dq;
  using Traits::kBlockKeys;
  using Traits::kColumns;
  using Traits::kConsumers;
  using Traits::kDqPartition;
  using Traits::kHasBias;
  using Traits::kHeadDim;
  using Traits::kIsCluster;
  using Traits::kKeys;
  using Traits::kRows;
  using Traits::kScoreRows;

  using ScoreMma = SmemMma<Element, kRows, kHeadDim>;    // S^T and dP^T: 64 keys by rows
  using KeyMma = RegisterMma<Element, kColumns, kRows>;  // dK and dV: 64 keys by columns
  using DqMma = RowsByColumnsMma<Element, Dq::kColumns, kBlockKeys>;  // dQ: rows by columns

  // Loads the bias of a tile while the wgmmas of the previous tile run. Up to head dim 64, the
  // wgmmas are too short to hide the loads; with a time bias, there are too few registers.
  static constexpr bool kLoadsBiasEarly = kHeadDim > 64 && !Traits::kHasTimeBias;

  // With a relative bias, there are too few registers for S, dP, dK and dV: dP reuses the
  // accumulator of S, and only silu'(alpha * S) is kept, rounded to fp16.
  static constexpr bool kReusesScores =
      (Traits::kHasRelativeBias && kHeadDim == 128) || (Traits::kHasTimeBias && kHeadDim == 64);

  // Issues S of the next row tile before dQ of this one, so that the warpgroups need not run in
  // lockstep, although dQ waits for dS of both. Above head dim 64, a relative bias leaves too few
  // registers.
  // NOTE: where registers do not suffice, ptxas serializes the wgmmas: it waits after each of them.
  static constexpr bool kStartsScoresEarly = !(Traits::kHasRelativeBias && kHeadDim > 64);

  static HSTU_DEVICE void run(const BackwardParams& params, const BackwardBuffers& buffers,
                              SharedMemory& smem, int warpgroup) {
    const float ds_factor = Traits::stores_ds(params) ? full_factor(params) : 1.0f;
    QState q_state;
    MaskState mask_state;
    DqState dq_state;
    for (WorkState work_state;; work_state.advance()) {
      smem.pipeline_work.consumer_wait(work_state);
      const WorkTile& work_tile = smem.work_tiles[work_state.index()];
      if (work_tile.head < 0) return;
      const KVState kv_state{work_state.count};
      smem.pipeline_kv.consumer_wait(kv_state);
      KeySum dk, dv;
      GMMA::ScaleOut scale = GMMA::ScaleOut::Zero;
      // S^T = K Q^T + bias^T
      Product scores;
      BiasWeights bias;
      RowTile tile = wait_for_rows(params, work_tile, warpgroup, q_state, smem);
      load_bias(params, warpgroup, q_state, smem, bias);
      if (kStartsScoresEarly) {
        start_scores(bias, smem, q_state, warpgroup, scores);
        wait_for_wgmma<0>(scores);
      }
      for (;;) {
        if (!kStartsScoresEarly) {
          start_scores(bias, smem, q_state, warpgroup, scores);
          wait_for_wgmma<0>(scores);
        }
        Element* const q = smem.q[q_state.index()];
        Element* const dout = smem.dout[q_state.index()];
        const int mask_stage = Traits::kProducerFindsMask ? mask_state.index() : q_state.index();
        const uint64_t* const visible = smem.visible[mask_stage][warpgroup];
        // dP^T = V dO^T
        Product own_gradients;
        Product& gradients = select<kReusesScores ? 0 : 1>(scores, own_gradients);
        smem.pipeline_dout.consumer_wait(q_state);
        if (params.attn_scale_per_row) {
          scale_rows(params, work_tile, tile, dout);
          sync_consumers<kConsumers>();  // the products read rows that all consumers have scaled
        }
        if (!kReusesScores) {
          start_product(smem.v, dout, warpgroup, gradients, GMMA::ScaleOut::Zero);
        }
        // P = M * silu(alpha * S), and S becomes silu'(alpha * S)
        Weights weights;
        PackedDerivatives packed;
        auto& derivatives = select<kReusesScores ? 1 : 0>(scores, packed);
        silu_and_derivative(static_cast<float>(params.alpha), scores, weights, derivatives);
        if (tile.is_partial()) apply_mask_transposed<kRows>(visible, weights);
        if constexpr (kReusesScores) {
          // NOTE: without the fences, the compiler moves some of the activation behind the product.
          Tensor weight_words = recast<uint32_t>(weights);
          Tensor derivative_words = recast<uint32_t>(packed);
          warpgroup_fence_operand(weight_words);
          warpgroup_fence_operand(derivative_words);
          start_product(smem.v, dout, warpgroup, gradients, GMMA::ScaleOut::Zero);
        }
        // dV += P^T dO
        start_gemm_registers(KeyMma{}, weights, transposed_tensor<kRows, kHeadDim>(dout), dv,
                             scale);
        // dS = M * dP * silu'(alpha * S)
        Weights dscores;
        wait_for_wgmma<1>(gradients);
        multiply(derivatives, gradients, ds_factor, dscores);
        if (tile.is_partial()) {
          apply_mask_transposed<kRows>(visible, dscores);
          if constexpr (Traits::kProducerFindsMask) {
            smem.pipeline_mask.consumer_release(mask_state);
            mask_state.advance();
          }
        }
        // dK += dS^T Q
        start_gemm_registers(KeyMma{}, dscores, transposed_tensor<kRows, kHeadDim>(q), dk, scale);
        scale = GMMA::ScaleOut::One;
        const DsState ds_state{q_state.count};
        Element* const ds = Traits::ds_tile(smem, ds_state);
        smem.pipeline_ds.producer_acquire(ds_state);
        store_transposed<kRows>(dscores, ds + warpgroup * (kRows * kWarpgroupRows));
        cutlass::arch::fence_view_async_shared();  // before wgmma reads dS
        smem.pipeline_ds.producer_commit_by_warp(ds_state);
        const bool is_last = tile.is_last();
        const RowTile done = tile;
        if (kLoadsBiasEarly && !is_last) {
          load_bias(params, warpgroup, QState{q_state.count + 1}, smem, bias);
        }
        wait_for_wgmma<0>(dk);
        warpgroup_fence_operand(dv);
        smem.pipeline_q.consumer_release_by_warp(q_state);
        smem.pipeline_dout.consumer_release_by_warp(q_state);
        q_state.advance();

        // S of the next tile, and dQ = dS K of this one
        const auto wait_for_next = [&] {
          tile = wait_for_rows(params, work_tile, warpgroup, q_state, smem);
          if (!kLoadsBiasEarly) load_bias(params, warpgroup, q_state, smem, bias);
        };
        if (kStartsScoresEarly && !is_last) {
          wait_for_next();
          start_scores(bias, smem, q_state, warpgroup, scores);
        }
        const bool alternates_steps = kDqPartition == DqPartition::kAlternateSteps;
        const int part = alternates_steps ? 0 : warpgroup;
        if (!alternates_steps || static_cast<int>(ds_state.count % 2) == warpgroup) {
          smem.pipeline_ds.consumer_wait(ds_state);
          DqPart dq;
          start_dq(ds, smem.k, part, dq);
          wait_for_wgmma<0>(dq);
          if (kStartsScoresEarly) warpgroup_fence_operand(scores);
          smem.pipeline_ds.consumer_release_by_warp(ds_state);
          store_dq(params, buffers, work_tile, work_state, done, dq, part, dq_state, smem);
        } else if (kStartsScoresEarly) {
          wait_for_wgmma<0>(scores);
        }
        if (!kStartsScoresEarly && !is_last) wait_for_next();
        dq_state.advance();
        if (is_last) break;
      }

      smem.pipeline_kv.consumer_release_by_warp(kv_state);
      store_keys(params.dk, work_tile, warpgroup, dk, factor_of_ds(params));
      store_keys(params.dv, work_tile, warpgroup, dv, uniform_scale(params));
      smem.pipeline_work.consumer_release(work_state);
    }
  }

  // The factor by which products of dS must still be multiplied.
  static HSTU_DEVICE float factor_of_ds(const BackwardParams& params) {
    return Traits::stores_ds(params) ? 1.0f : full_factor(params);
  }

 protected:
  using Product =
      decltype(partition_fragment_C(ScoreMma{}, Shape<Int<kWarpgroupRows>, Int<kRows>>{}));
  using Scores = decltype(partition_fragment_C(SmemMma<Element, kScoreRows, kHeadDim>{},
                                               Shape<Int<kWarpgroupRows>, Int<kScoreRows>>{}));
  using KeySum =
      decltype(partition_fragment_C(KeyMma{}, Shape<Int<kWarpgroupRows>, Int<kColumns>>{}));
  using DqPart =
      decltype(partition_fragment_C(DqMma{}, Shape<Int<kWarpgroupRows>, Int<Dq::kColumns>>{}));
  using Weights = decltype(make_tensor_like<Element>(Scores{}));
  using PackedDerivatives = decltype(make_tensor_like<cutlass::half_t>(Scores{}));
  using BiasWeights = decltype(make_tensor_like<typename Traits::BiasElement>(Scores{}));

  // Returns one of two tensors.
  template <int kIndex, typename First, typename Second>
  static HSTU_DEVICE auto& select(First& first, Second& second) {
    if constexpr (kIndex == 0) {
      return first;
    } else {
      return second;
    }
  }

  // The scale of all rows. If each row has its own scale, scale_rows() applies it relative to
  // params.scale.
  static HSTU_DEVICE float uniform_scale(const BackwardParams& params) {
    const bool is_uniform = params.attn_scale && !params.attn_scale_per_row;
    return is_uniform ? params.attn_scale[0] : static_cast<float>(params.scale);
  }
  static HSTU_DEVICE float full_factor(const BackwardParams& params) {
    return static_cast<float>(params.alpha) * uniform_scale(params);
  }

  // Starts S^T = K Q^T + bias^T.
  static HSTU_DEVICE void start_scores(const BiasWeights& bias, SharedMemory& smem, QState state,
                                       int warpgroup, Product& scores) {
    if constexpr (kHasBias) widen(bias, scores);
    start_product(smem.k, smem.q[state.index()], warpgroup, scores,
                  kHasBias ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero);
  }

  // Starts product = scale * product + keys rows^T, for 64 keys.
  static HSTU_DEVICE void start_product(Element* keys, Element* rows, int key_group,
                                        Product& product, GMMA::ScaleOut scale) {
    const auto own_keys =
        local_tile(rows_tensor<kBlockKeys, kHeadDim, Traits::kIsNarrow>(keys),
                   Shape<Int<kWarpgroupRows>, Int<kHeadDim>>{}, make_coord(key_group, _0{}));
    start_gemm(ScoreMma{}, own_keys, rows_tensor<kRows, kHeadDim, Traits::kIsNarrow>(rows), product,
               scale);
  }

  // Starts part `part` of dQ = dS K, for the block's keys.
  static HSTU_DEVICE void start_dq(Element* ds, Element* k, int part, DqPart& dq) {
    const auto columns =
        local_tile(transposed_tensor<kBlockKeys, kHeadDim>(k),
                   Shape<Int<Dq::kColumns>, Int<kBlockKeys>>{}, make_coord(part, _0{}));
    start_gemm(DqMma{}, rows_tensor<kRows, kBlockKeys>(ds), columns, dq, GMMA::ScaleOut::Zero);
  }

  // Waits for the tile of rows at `state` and loads its bias.
  static HSTU_DEVICE void load_bias(const BackwardParams& params, int warpgroup, QState state,
                                    SharedMemory& smem, BiasWeights& bias) {
    if constexpr (Traits::kHasRelativeBias && !Traits::kHasTimeBias) {
      smem.pipeline_q.consumer_wait(state);
      compiler_barrier();  // keeps the plain loads behind the wait
      load_with_position<false>(warpgroup, state, smem, bias);
    } else if constexpr (kHasBias) {
      const BiasState bias_state{state.count};
      if constexpr (Traits::kHasRelativeBias) {
        smem.pipeline_bias.consumer_wait(bias_state);
        if (params.relative_bias.position.data) smem.pipeline_q.consumer_wait(state);
        compiler_barrier();  // keeps the plain loads behind the waits
        // NOTE: each case is a basic block, in which all loads are issued before the first is
        // waited for.
        if (!params.relative_bias.position.data) {
          load_times(warpgroup, state, smem, bias);
        } else {
          load_with_position<true>(warpgroup, state, smem, bias);
        }
      } else {
        smem.pipeline_q.consumer_wait(state);
        load_transposed<kScoreRows>(
            smem.bias[bias_state.index()] + warpgroup * (kScoreRows * kWarpgroupRows), bias);
      }
      smem.pipeline_bias.consumer_release_by_warp(bias_state);
    }
  }

  // bias = the weights by time of the tile of rows at `state`: one for each block of 8 x 8 scores,
  // or one for each score.
  static HSTU_DEVICE void load_times(int warpgroup, QState state, SharedMemory& smem,
                                     BiasWeights& bias) {
    constexpr int kBlocks = kScoreRows / 8;
    const BiasState bias_state{state.count};
    const int thread = reload_thread_idx() % kWarpgroup;
    const int chunk = key_group(warpgroup) * 8 + thread / 32 * 2;
    const int row_block = first_row(warpgroup) / 8;
    const auto& blocks = smem.relative_bias[0].times[bias_state.index()].blocks;
    uint32_t weights[2][kBlocks / 2];
#pragma unroll
    for (int n = 0; n < 2; ++n) ptx::ld_shared(blocks[chunk + n] + row_block, weights[n]);
    const uint32_t* const patches =
        reinterpret_cast<const uint32_t*>(smem.bias[bias_state.index()]) +
        (chunk * 8 + row_block) * 32 + thread % 32;
    Tensor words = recast<uint32_t>(bias);
#pragma unroll
    for (int n = 0; n < size(words); ++n) {
      const int block = n / 2;
      const uint32_t both = __byte_perm(weights[n % 2][block / 2], 0, block % 2 ? 0x3232 : 0x1010);
      words(n) = ptx::ld_shared_if_ones(both, patches + (n % 2 * 8 + block) * 32);
    }
  }

  // bias = the weights by position, from the window at `state`, plus the weights by time.
  template <bool kHasTime>
  static HSTU_DEVICE void load_with_position(int warpgroup, QState state, SharedMemory& smem,
                                             BiasWeights& bias) {
    const int thread = reload_thread_idx() % kWarpgroup;
    const int lane = thread % 32;
    const int key = key_group(warpgroup) * kWarpgroupRows + thread / 32 * 16 + lane / 4;
    constexpr int kPairs = kScoreRows / 8;
    float2 positions[kPairs + 1];
    smem.relative_bias[0].position[state.index()].template load<kPairs>(
        first_row(warpgroup) + lane % 4 * 2, key, positions);
    if constexpr (kHasTime) load_times(warpgroup, state, smem, bias);
    Tensor words = recast<uint32_t>(bias);
#pragma unroll
    for (int n = 0; n < size(words); ++n) {
      // Words 2 m and 2 m + 1 have the same pair of rows, for the lane's first and second key. The
      // second key is 8 further, so its weights are those of the first key 8 rows before.
      float2 weights = positions[n / 2 + 1 - n % 2];
      if constexpr (kHasTime) {
        weights.x += high_half<cutlass::half_t>(words(n));
        weights.y += low_half<cutlass::half_t>(words(n));
      }
      words(n) =
          ptx::cvt_satfinite_f16x2(weights.y, weights.x);  // the first row has the larger distance
    }
  }

  // Stores a part of dQ in shared memory for the thread that adds it to the sum in device memory,
  // or, if the block completes the sum, to dQ.
  template <typename Part>
  static HSTU_DEVICE void store_dq(const BackwardParams& params, const BackwardBuffers& buffers,
                                   const WorkTile& work_tile, WorkState work_state, RowTile tile,
                                   Part& dq, int part, DqState state, SharedMemory& smem) {
    // NOTE: with one buffer for both stages, this waits until the previous tile of dQ has been
    // added.
    if constexpr (Traits::kDqBuffers == 1) {
      smem.pipeline_dq.producer_acquire(DqState{state.count + 1});
    }
    if constexpr (Traits::kDqBuffers == 2) smem.pipeline_dq.producer_acquire(state);
    if (Traits::kStoresDq && !tile.has_later()) {
      complete_dq(params, buffers, work_tile, work_state, tile, dq, part, smem);
    } else {
      const int thread = reload_thread_idx() % kWarpgroup;
      float* const own = Traits::dq_tile(smem, state) + part * Dq::kPartSize + thread * 4;
#pragma unroll
      for (int n = 0; n < size(dq); n += 4) {
        *reinterpret_cast<float4*>(own + n * kWarpgroup) = {dq(n), dq(n + 1), dq(n + 2), dq(n + 3)};
      }
      cutlass::arch::fence_view_async_shared();  // before TMA reads dQ
    }
    smem.pipeline_dq.full[state.index()].arrive();
  }

  // Adds the sum of earlier tiles of keys to a part of dQ, rounds the result and stores it.
  template <typename Part>
  static HSTU_DEVICE void complete_dq(const BackwardParams& params, const BackwardBuffers& buffers,
                                      const WorkTile& work_tile, WorkState work_state, RowTile tile,
                                      Part& dq, int part, SharedMemory& smem) {
    const int first_row = tile.first_row();
    const int own_part = Traits::rank() * Dq::kPartsOfBlock + part;
    if (tile.has_earlier()) {
      const int64_t row_tile = work_tile.first_row_tile + first_row / kRows;
      const float* const sum = buffers.dq + (row_tile * params.heads + work_tile.head) * Dq::kSize +
                               own_part * Dq::kPartSize + reload_thread_idx() % kWarpgroup * 4;
      // NOTE: the phase cannot change before this, because pipeline_dq has not been told yet.
      smem.dq_sums_arrived.wait((work_state.count - 1) % 2);
      compiler_barrier();
#pragma unroll
      for (int n = 0; n < size(dq); n += 4) {
        const float4 x = __ldcg(reinterpret_cast<const float4*>(sum + n * kWarpgroup));
        dq(n) += x.x, dq(n + 1) += x.y, dq(n + 2) += x.z, dq(n + 3) += x.w;
      }
    }
    const float factor = factor_of_ds(params);
#pragma unroll
    for (int n = 0; n < size(dq); ++n) dq(n) *= factor;
    const Sequence& sequence = work_tile.tile.sequence;
    constexpr int kDqColumns = decltype(size(dq))::value * 2;  // of 64 rows, by 128 threads
    store_sum<typename Traits::Out, kDqColumns>(
        dq, params.dq, work_tile.head, sequence.q_begin + first_row, sequence.q_len - first_row,
        own_part * Dq::kColumns);
  }

  // Waits for the tile of rows at `state`.
  static HSTU_DEVICE RowTile wait_for_rows(const BackwardParams& params, const WorkTile& work_tile,
                                           int warpgroup, QState state, SharedMemory& smem) {
    smem.pipeline_q.consumer_wait(state);
    const RowTile tile = read_by_warp(smem.row_tiles[state.index()]);
    if constexpr (!Traits::kProducerFindsMask) {
      if (tile.is_partial()) {
        const int group = key_group(warpgroup);
        Traits::template find_row_bits<kScoreRows, kWarpgroup>(
            params, work_tile, tile.first_row() + first_row(warpgroup), group,
            smem.visible[state.index()][Traits::kSharesKeys ? warpgroup : group] +
                first_row(warpgroup));
        sync_warpgroup(warpgroup);  // each thread reads bits of many rows
      }
    }
    return tile;
  }

  // The first row and the group of 64 keys of the warpgroup's part of a tile of scores.
  static HSTU_DEVICE int first_row(int warpgroup) {
    return kIsCluster ? warpgroup * kScoreRows : 0;
  }
  static HSTU_DEVICE int key_group(int warpgroup) {
    return kIsCluster || Traits::kSharesKeys ? 0 : warpgroup;
  }

  // Multiplies each row of dO in shared memory by the scale of the row, which scales dV, dP and all
  // that is computed from dP.
  // NOTE: the factor is relative to params.scale, by which results are multiplied after the main
  // loop: scaled by both, dO might underflow in fp16.
  static HSTU_DEVICE void scale_rows(const BackwardParams& params, const WorkTile& work_tile,
                                     RowTile tile, Element* dout) {
    constexpr int kThreadsOfRow = kConsumers * kWarpgroup / kRows;
    constexpr int kPanel = sm90::kPanel<kHeadDim, sizeof(Element), Traits::kIsNarrow>;
    const int thread = reload_thread_idx() - kWarpgroup;
    const int own = thread / kThreadsOfRow;
    const Sequence& sequence = work_tile.tile.sequence;
    const int row = tile.first_row() + own;
    const float factor = row < sequence.q_len ? params.attn_scale[sequence.q_begin + row] /
                                                    static_cast<float>(params.scale)
                                              : 0.0f;
#pragma unroll 1
    for (int column = thread % kThreadsOfRow; column < kHeadDim; column += kThreadsOfRow) {
      Element& x = dout[column / kPanel * (kRows * kPanel) + own * kPanel + column % kPanel];
      x = static_cast<Element>(static_cast<float>(x) * factor);
    }
    cutlass::arch::fence_view_async_shared();  // before wgmma reads dO
  }

  // Stores dK or dV: kColumns columns of the 64 keys of group `key_group` of the work tile.
  static HSTU_DEVICE void store_keys(const PackedTensor& tensor, const WorkTile& work_tile,
                                     int key_group, KeySum& sum, float factor,
                                     int column = Traits::rank() * kColumns) {
#pragma unroll
    for (int n = 0; n < size(sum); ++n) sum(n) *= factor;
    const Sequence& sequence = work_tile.tile.sequence;
    const int first = work_tile.tile.index * kKeys + key_group * kWarpgroupRows;
    store_sum<typename Traits::Out, kColumns>(sum, tensor, work_tile.head, sequence.k_begin + first,
                                              sequence.k_len - first, column);
  }
};

}  // namespace hstu::sm90
