// The consumers of the backward: warpgroups that multiply. Those of a cluster do it in an order of
// their own, see backward_cluster.h.
#pragma once

#include "backward_block.h"
#include "backward_scores.h"

namespace hstu::sm90 {

template <typename Block>
struct BackwardConsumers : Block {
  using typename Block::BiasPlace;
  using typename Block::DoutPlace;
  using typename Block::DqPlace;
  using typename Block::DsPlace;
  using typename Block::Element;
  using typename Block::Item;
  using typename Block::ItemPlace;
  using typename Block::KeyPlace;
  using typename Block::MaskPlace;
  using typename Block::MeetingPlace;
  using typename Block::RowPlace;
  using typename Block::RowTile;
  using typename Block::SharedMemory;
  using Dq = typename Block::Dq;
  using Block::kBlockKeys;
  using Block::kColumns;
  using Block::kConsumers;
  using Block::kHasBias;
  using Block::kHeadDim;
  using Block::kIsCluster;
  using Block::kKeys;
  using Block::kRows;
  using Block::kScoreRows;
  using Block::kSharing;

  using ScoreMma = SharedMma<Element, kRows, kHeadDim>;               // keys by rows
  using KeyMma = RegisterMma<Element, kColumns, kRows>;               // keys by columns
  using DqMma = RowsByColumnsMma<Element, Dq::kColumns, kBlockKeys>;  // rows by columns

  // Beside the products of the tile before, which at head dim 64 are too short for it.
  static constexpr bool kLoadsBiasEarly = kHeadDim > 64;

  // S of the next tile of rows is started before dQ of this one, which waits for both warpgroups'
  // dS: so they need not go in step.
  static HSTU_DEVICE void run(const BackwardParams& params, SharedMemory& shared, int warpgroup) {
    const float ds_factor = Block::stores_ds(params) ? full_factor(params) : 1.0f;
    RowPlace row_place;
    MaskPlace mask_place;
    DqPlace dq_place;
    for (ItemPlace item_place;; item_place.advance()) {
      shared.item_handover.wait_full(item_place);
      const Item& item = shared.items[item_place.stage()];
      if (item.head < 0) return;
      const KeyPlace key_place{item_place.count};
      shared.key_handover.wait_full(key_place);
      KeySum dk, dv;
      GMMA::ScaleOut scale = GMMA::ScaleOut::Zero;
      // S^T = K Q^T + bias^T
      Product scores;
      Weights bias;
      RowTile tile = wait_for_rows(params, item, warpgroup, row_place, shared);
      load_bias(warpgroup, row_place, shared, bias);
      start_scores(bias, shared, row_place, warpgroup, scores);
      wait_for_products<0>(scores);
      for (;;) {
        Element* const q = shared.q[row_place.stage()];
        Element* const dout = shared.dout[row_place.stage()];
        const int mask_stage = Block::kProducersLook ? mask_place.stage() : row_place.stage();
        const uint64_t* const visible = shared.visible[mask_stage][warpgroup];
        // dP^T = V dO^T
        Product gradients;
        shared.dout_handover.wait_full(row_place);
        if (params.attn_scale_per_row) {
          scale_rows(params, item, tile, dout);
          sync_consumers();
        }
        start_product(shared.v, dout, warpgroup, gradients, GMMA::ScaleOut::Zero);
        // P = M * silu(alpha * S); what is left in S is its derivative
        Weights weights;
        activate(static_cast<float>(params.alpha), scores, weights);
        if (tile.is_partial()) hide<kRows>(visible, weights);
        // dV += P^T dO
        start_gemm_registers(KeyMma{}, weights, transposed_tensor<kRows, kHeadDim>(dout), dv,
                             scale);
        // dS = M * dP * silu'(alpha * S)
        Weights dscores;
        wait_for_products<1>(gradients);
        multiply(scores, gradients, ds_factor, dscores);
        if (tile.is_partial()) {
          hide<kRows>(visible, dscores);
          if constexpr (Block::kProducersLook) {
            shared.mask_handover.release(mask_place);
            mask_place.advance();
          }
        }
        // dK += dS^T Q
        start_gemm_registers(KeyMma{}, dscores, transposed_tensor<kRows, kHeadDim>(q), dk, scale);
        scale = GMMA::ScaleOut::One;
        const DsPlace ds_place{row_place.count};
        Element* const ds = Block::ds_tile(shared, ds_place);
        shared.ds_handover.wait_empty(ds_place);
        store_transposed<kRows>(dscores, ds + warpgroup * (kRows * kWarpgroupRows));
        cutlass::arch::fence_view_async_shared();
        shared.ds_handover.fill_by_warp(ds_place);
        const bool is_last = tile.is_last();
        if (kLoadsBiasEarly && !is_last) {
          load_bias(warpgroup, RowPlace{row_place.count + 1}, shared, bias);
        }
        wait_for_products<0>(dk);
        warpgroup_fence_operand(dv);
        shared.q_handover.release_by_warp(row_place);
        shared.dout_handover.release_by_warp(row_place);
        row_place.advance();

        // S of the next tile, and dQ = dS K of this one
        if (!is_last) {
          tile = wait_for_rows(params, item, warpgroup, row_place, shared);
          if (!kLoadsBiasEarly) load_bias(warpgroup, row_place, shared, bias);
          start_scores(bias, shared, row_place, warpgroup, scores);
        }
        const bool takes_steps = kSharing == Sharing::kKeysAndSteps;
        const int part = takes_steps ? 0 : warpgroup;
        if (!takes_steps || static_cast<int>(ds_place.count % 2) == warpgroup) {
          shared.ds_handover.wait_full(ds_place);
          DqPart dq;
          start_dq(ds, shared.k, part, dq);
          wait_for_products<0>(dq);
          warpgroup_fence_operand(scores);
          shared.ds_handover.release_by_warp(ds_place);
          hand_over(dq, part, dq_place, shared);
        } else {
          wait_for_products<0>(scores);
        }
        dq_place.advance();
        if (is_last) break;
      }

      shared.key_handover.release_by_warp(key_place);
      store_keys(params.dk, item, warpgroup, dk, factor_of_ds(params));
      store_keys(params.dv, item, warpgroup, dv, uniform_scale(params));
      shared.item_handover.release(item_place);
    }
  }

  // What the products of dS have yet to be multiplied by.
  static HSTU_DEVICE float factor_of_ds(const BackwardParams& params) {
    return Block::stores_ds(params) ? 1.0f : full_factor(params);
  }

 protected:
  using Product =
      decltype(partition_fragment_C(ScoreMma{}, Shape<Int<kWarpgroupRows>, Int<kRows>>{}));
  using Scores = decltype(partition_fragment_C(SharedMma<Element, kScoreRows, kHeadDim>{},
                                               Shape<Int<kWarpgroupRows>, Int<kScoreRows>>{}));
  using KeySum =
      decltype(partition_fragment_C(KeyMma{}, Shape<Int<kWarpgroupRows>, Int<kColumns>>{}));
  using DqPart =
      decltype(partition_fragment_C(DqMma{}, Shape<Int<kWarpgroupRows>, Int<Dq::kColumns>>{}));
  using Weights = decltype(make_tensor_like<Element>(Scores{}));

  // The factor that all rows share; for what each row has of its own, see scale_rows().
  static HSTU_DEVICE float uniform_scale(const BackwardParams& params) {
    const bool is_uniform = params.attn_scale && !params.attn_scale_per_row;
    return is_uniform ? params.attn_scale[0] : static_cast<float>(params.scale);
  }
  static HSTU_DEVICE float full_factor(const BackwardParams& params) {
    return static_cast<float>(params.alpha) * uniform_scale(params);
  }

  // S^T = K Q^T + bias^T, started
  static HSTU_DEVICE void start_scores(const Weights& bias, SharedMemory& shared, RowPlace place,
                                       int warpgroup, Product& scores) {
    if constexpr (kHasBias) widen(bias, scores);
    start_product(shared.k, shared.q[place.stage()], warpgroup, scores,
                  kHasBias ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero);
  }

  // product = scale * product + keys rows^T, of 64 keys, started
  static HSTU_DEVICE void start_product(Element* keys, Element* rows, int key_group,
                                        Product& product, GMMA::ScaleOut scale) {
    const auto own_keys =
        local_tile(rows_tensor<kBlockKeys, kHeadDim>(keys),
                   Shape<Int<kWarpgroupRows>, Int<kHeadDim>>{}, make_coord(key_group, _0{}));
    start_gemm(ScoreMma{}, own_keys, rows_tensor<kRows, kHeadDim>(rows), product, scale);
  }

  // A part of dS K, of the block's keys, started
  static HSTU_DEVICE void start_dq(Element* ds, Element* k, int part, DqPart& dq) {
    const auto columns =
        local_tile(transposed_tensor<kBlockKeys, kHeadDim>(k),
                   Shape<Int<Dq::kColumns>, Int<kBlockKeys>>{}, make_coord(part, _0{}));
    start_gemm(DqMma{}, rows_tensor<kRows, kBlockKeys>(ds), columns, dq, GMMA::ScaleOut::Zero);
  }

  // The bias of the tile of rows at `place`, once it is there.
  static HSTU_DEVICE void load_bias(int warpgroup, RowPlace place, SharedMemory& shared,
                                    Weights& bias) {
    if constexpr (kHasBias) {
      const BiasPlace bias_place{place.count};
      shared.q_handover.wait_full(place);
      load_transposed<kScoreRows>(
          shared.bias[bias_place.stage()] + warpgroup * (kScoreRows * kWarpgroupRows), bias);
      shared.bias_handover.release_by_warp(bias_place);
    }
  }

  // Leaves a part of dQ to the thread that adds it.
  static HSTU_DEVICE void hand_over(const DqPart& dq, int part, DqPlace place,
                                    SharedMemory& shared) {
    // NOTE: with one buffer, that which the tile before was in.
    if constexpr (Block::kDqBuffers == 1) shared.dq_handover.wait_empty(DqPlace{place.count + 1});
    if constexpr (Block::kDqBuffers == 2) shared.dq_handover.wait_empty(place);
    const int thread = thread_anew() % kWarpgroup;
    float* const own = Block::dq_tile(shared, place) + part * Dq::kPartSize + thread * 4;
#pragma unroll
    for (int n = 0; n < size(dq); n += 4) {
      *reinterpret_cast<float4*>(own + n * kWarpgroup) = {dq(n), dq(n + 1), dq(n + 2), dq(n + 3)};
    }
    cutlass::arch::fence_view_async_shared();
    shared.dq_handover.full[place.stage()].arrive();
  }

  // Waits for the tile of rows at `place`.
  static HSTU_DEVICE RowTile wait_for_rows(const BackwardParams& params, const Item& item,
                                           int warpgroup, RowPlace place, SharedMemory& shared) {
    shared.q_handover.wait_full(place);
    const RowTile tile = read_by_warp(shared.row_tiles[place.stage()]);
    if constexpr (!Block::kProducersLook) {
      if (tile.is_partial()) {
        Block::template look_at_rows<kScoreRows, kWarpgroup>(
            params, item, tile.first_row() + first_row(warpgroup), key_group(warpgroup),
            shared.visible[place.stage()][key_group(warpgroup)] + first_row(warpgroup));
        sync_warpgroup(warpgroup);
      }
    }
    return tile;
  }

  // The warpgroup's share of a tile of scores.
  static HSTU_DEVICE int first_row(int warpgroup) {
    return kIsCluster ? warpgroup * kScoreRows : 0;
  }
  static HSTU_DEVICE int key_group(int warpgroup) { return kIsCluster ? 0 : warpgroup; }

  static HSTU_DEVICE void sync_warpgroup(int warpgroup) {
    asm volatile(
        "bar.sync %0, %1;" ::"r"(static_cast<int>(NamedBarrier::kFirstOfWarpgroup) + warpgroup),
        "n"(kWarpgroup)
        : "memory");
  }

  static HSTU_DEVICE void sync_consumers() {
    asm volatile("bar.sync %0, %1;" ::"n"(static_cast<int>(NamedBarrier::kConsumers)),
                 "n"(kConsumers * kWarpgroup)
                 : "memory");
  }

  // Scales rows of dO in shared memory by what each has of its own, and so all that comes of them.
  // NOTE: relative to params.scale, by which results are multiplied in the end: the products of
  // both might be too small for fp16.
  static HSTU_DEVICE void scale_rows(const BackwardParams& params, const Item& item, RowTile tile,
                                     Element* dout) {
    constexpr int kThreadsOfRow = kConsumers * kWarpgroup / kRows;
    constexpr int kPanel = kHeadDim < 64 ? kHeadDim : 64;
    const int thread = thread_anew() - kWarpgroup;
    const int own = thread / kThreadsOfRow;
    const Sequence& sequence = item.work.sequence;
    const int row = tile.first_row() + own;
    const float factor = row < sequence.q_len ? params.attn_scale[sequence.q_begin + row] /
                                                    static_cast<float>(params.scale)
                                              : 0.0f;
#pragma unroll 1
    for (int column = thread % kThreadsOfRow; column < kHeadDim; column += kThreadsOfRow) {
      Element& x = dout[column / kPanel * (kRows * kPanel) + own * kPanel + column % kPanel];
      x = static_cast<Element>(static_cast<float>(x) * factor);
    }
    cutlass::arch::fence_view_async_shared();
  }

  // dK or dV of 64 keys, by their number in the item, and the block's columns.
  static HSTU_DEVICE void store_keys(const PackedTensor& tensor, const Item& item, int key_group,
                                     KeySum& sum, float factor) {
#pragma unroll
    for (int n = 0; n < size(sum); ++n) sum(n) *= factor;
    const Sequence& sequence = item.work.sequence;
    const int first = item.work.tile * kKeys + key_group * kWarpgroupRows;
    store_sum<Element, kColumns>(sum, tensor, item.head, sequence.k_begin + first,
                                 sequence.k_len - first, Block::rank() * kColumns);
  }
};

}  // namespace hstu::sm90
