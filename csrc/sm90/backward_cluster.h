// The consumers of the backward in a cluster of two blocks.
//
// A block finds P and dS of 64 of the item's 128 keys, and half of the columns of all results. In a
// step, one warpgroup finds S, the other dP: products of 64 by 64, which read less of shared memory
// than two of half of the rows would. They give each other half of the rows. P and dS of its half a
// warpgroup leaves to both blocks; then it has dK and dV of 64 keys, the first warpgroup of its
// block's, the second of the other block's, and half of the block's columns of dQ.
#pragma once

#include "backward_consumers.h"

namespace hstu::sm90 {

template <typename Block>
struct BackwardClusterConsumers : BackwardConsumers<Block> {
  using Base = BackwardConsumers<Block>;
  using typename Base::DoutPlace;
  using typename Base::DqPart;
  using typename Base::DqPlace;
  using typename Base::DsPlace;
  using typename Base::Element;
  using typename Base::Item;
  using typename Base::ItemPlace;
  using typename Base::KeyPlace;
  using typename Base::MeetingPlace;
  using typename Base::Product;
  using typename Base::RowPlace;
  using typename Base::RowTile;
  using typename Base::Scores;
  using typename Base::SharedMemory;
  using typename Base::Weights;
  using DqMma = typename Base::DqMma;
  using Dq = typename Block::Dq;
  using Block::kBlockKeys;
  using Block::kColumns;
  using Block::kHasBias;
  using Block::kHeadDim;
  using Block::kRows;
  using Block::kScoreRows;

  using KeyMma = ColumnsByColumnsMma<Element, kColumns, kRows>;  // keys by columns

  static HSTU_DEVICE void run(const BackwardParams& params, SharedMemory& shared, int warpgroup) {
    if (warpgroup == 0) {
      consume<0>(params, shared);
    } else {
      consume<1>(params, shared);
    }
  }

 private:
  using KeySum =
      decltype(partition_fragment_C(KeyMma{}, Shape<Int<kWarpgroupRows>, Int<kColumns>>{}));
  static constexpr int kTileSize = kRows * kBlockKeys;  // of a block's P and dS

  template <int kOwn>
  static HSTU_DEVICE void consume(const BackwardParams& params, SharedMemory& shared) {
    constexpr bool kFindsScores = kOwn == 0;
    const float ds_factor = Block::stores_ds(params) ? Base::full_factor(params) : 1.0f;
    const int rank = Block::rank();
    const int key_group = rank ^ kOwn;
    RowPlace row_place;
    DqPlace dq_place;
    MeetingPlace meeting_place;
    for (ItemPlace item_place;; item_place.advance()) {
      shared.item_handover.wait_full(item_place);
      const Item& item = shared.items[item_place.stage()];
      if (item.head < 0) return;
      const KeyPlace key_place{item_place.count};
      shared.key_handover.wait_full(key_place);
      KeySum dk, dv;
      GMMA::ScaleOut scale = GMMA::ScaleOut::Zero;
      Product product;
      Weights bias;
      RowTile tile = Base::wait_for_rows(params, item, kOwn, row_place, shared);
      Base::load_bias(kOwn, row_place, shared, bias);
      if constexpr (kFindsScores) start_scores(shared, row_place, product);
      wait_for_products<0>(product);
      for (;;) {
        Element* const q = shared.q[row_place.stage()];
        const DoutPlace dout_place{row_place.count};
        Element* const dout = shared.dout[dout_place.stage()];
        const uint64_t* const visible = shared.visible[row_place.stage()][0] + kOwn * kScoreRows;
        // S^T = K Q^T + bias^T and dP^T = V dO^T
        shared.dout_handover.wait_full(dout_place);
        if (params.attn_scale_per_row) {
          Base::scale_rows(params, item, tile, dout);
          meet(shared, meeting_place);
        }
        if constexpr (!kFindsScores) {
          Base::start_product(shared.v, dout, 0, product, GMMA::ScaleOut::Zero);
        }
        wait_for_products<0>(product);
        const DsPlace ds_place{row_place.count};
        // NOTE: with one buffer, that which the tile before was in.
        shared.ds_handover.wait_empty(DsPlace{ds_place.count + 1});
        Scores scores, gradients;
        if constexpr (kFindsScores) {
          exchange<kOwn>(product, shared, meeting_place, scores, gradients);
        } else {
          exchange<kOwn>(product, shared, meeting_place, gradients, scores);
        }
        if constexpr (kHasBias) add(bias, scores);
        // P = M * silu(alpha * S) and dS = M * dP * silu'(alpha * S)
        Weights weights, dscores;
        activate(static_cast<float>(params.alpha), scores, weights);
        multiply(scores, gradients, ds_factor, dscores);
        if (tile.is_partial()) {
          hide<kScoreRows>(visible, weights);
          hide<kScoreRows>(visible, dscores);
        }
        meet(shared, meeting_place);  // what they exchanged has been read
        share(weights, dscores, kOwn, ds_place, shared);
        const bool is_last = tile.is_last();
        if (!is_last) Base::load_bias(kOwn, RowPlace{row_place.count + 1}, shared, bias);
        row_place.advance();

        // dV += P^T dO, dK += dS^T Q and dQ = dS K, first with what the block has itself
        Element* const ds = shared.ds[0];
        DqPart dq;
        const auto start_keys = [&] {
          start_key_product(shared.p + key_group * kTileSize, dout, rank, dv, scale);
          start_key_product(ds + key_group * kTileSize, q, rank, dk, scale);
        };
        shared.ds_handover.wait_full(ds_place);
        if constexpr (kFindsScores) start_keys();
        Base::start_dq(ds + rank * kTileSize, shared.k, rank * Dq::kWarpgroups + kOwn, dq);
        if constexpr (kFindsScores) {
          wait_for_products<2>(dv);
          shared.dout_handover.release_by_warp(dout_place);
        }
        shared.other_ds_handover.wait_full(ds_place);
        if constexpr (!kFindsScores) start_keys();
        start_dq_of_other_keys(ds + (rank ^ 1) * kTileSize, shared.other_k, kOwn, dq);
        if constexpr (!kFindsScores) {
          wait_for_products<2>(dv);
          shared.dout_handover.release_by_warp(dout_place);
        }
        scale = GMMA::ScaleOut::One;

        if (!is_last) tile = Base::wait_for_rows(params, item, kOwn, row_place, shared);
        if constexpr (kFindsScores) {
          if (!is_last) {
            start_scores(shared, row_place, product);
            warpgroup_wait<1>();
          }
        }
        if (!kFindsScores || is_last) warpgroup_wait<0>();
        warpgroup_fence_operand(dq);
        warpgroup_fence_operand(dk);
        release(shared.ds_handover, ds_place);
        meet(shared, meeting_place);  // Q has been read, whose place dQ takes
        Base::hand_over(dq, kOwn, dq_place, shared);
        dq_place.advance();
        if (is_last) break;
      }

      wait_for_products<0>(product);  // of none, as the compiler does not see
      shared.key_handover.release_by_warp(key_place);
      Base::store_keys(params.dk, item, key_group, dk, Base::factor_of_ds(params));
      Base::store_keys(params.dv, item, key_group, dv, Base::uniform_scale(params));
      shared.item_handover.release(item_place);
    }
  }

  // S^T without the bias, started
  static HSTU_DEVICE void start_scores(SharedMemory& shared, RowPlace place, Product& product) {
    Base::start_product(shared.k, shared.q[place.stage()], 0, product, GMMA::ScaleOut::Zero);
  }

  // sum = scale * sum + weights^T rows, of 64 keys and the block's columns, started
  static HSTU_DEVICE void start_key_product(Element* weights, Element* rows, int rank, KeySum& sum,
                                            GMMA::ScaleOut scale) {
    const auto columns = local_tile(transposed_tensor<kRows, kHeadDim>(rows),
                                    Shape<Int<kColumns>, Int<kRows>>{}, make_coord(rank, _0{}));
    start_gemm(KeyMma{}, transposed_tensor<kRows, kBlockKeys>(weights), columns, sum, scale);
  }

  // dQ += dS K of the other block's keys, started
  static HSTU_DEVICE void start_dq_of_other_keys(Element* ds, Element* other_k, int part,
                                                 DqPart& dq) {
    const auto columns =
        local_tile(transposed_tensor<kBlockKeys, kColumns>(other_k),
                   Shape<Int<Dq::kColumns>, Int<kBlockKeys>>{}, make_coord(part, _0{}));
    start_gemm(DqMma{}, rows_tensor<kRows, kBlockKeys>(ds), columns, dq, GMMA::ScaleOut::One);
  }

  // Of a product that a warpgroup has and one that the other has, each keeps its half of the rows,
  // half kOwn, and gets the same half of the other's: where the block's P and dS will be.
  template <int kOwn>
  static HSTU_DEVICE void exchange(const Product& product, SharedMemory& shared,
                                   MeetingPlace& meeting_place, Scores& kept, Scores& got) {
    constexpr int kOther = 1 - kOwn;
    constexpr int kCount = decltype(size(kept))::value;
    const int own_tile = Block::rank() * kTileSize;
    const auto inbox = [&](int warpgroup) {
      Element* const tile = warpgroup == 0 ? shared.p : shared.ds[0];
      return reinterpret_cast<float*>(tile + own_tile) + thread_anew() % kWarpgroup * 4;
    };
    float* const to = inbox(kOther);
#pragma unroll
    for (int n = 0; n < kCount; n += 4) {
      const int m = kOther * kCount + n;
      *reinterpret_cast<float4*>(to + n * kWarpgroup) = {product(m), product(m + 1), product(m + 2),
                                                         product(m + 3)};
    }
    meet(shared, meeting_place);
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

  // All consumers of the block.
  // NOTE: no named barrier, at which all would have to wait by the same instruction. Each thread
  // arrives, since racecheck does not see what a warp's other threads wrote before one arrived.
  static HSTU_DEVICE void meet(SharedMemory& shared, MeetingPlace& place) {
    shared.meeting.full[place.stage()].arrive();
    shared.meeting.wait_full(place);
    place.advance();
  }

  // Leaves P and dS of a warpgroup's rows to all that multiply by them, in both blocks.
  static HSTU_DEVICE void share(const Weights& weights, const Weights& dscores, int warpgroup,
                                DsPlace place, SharedMemory& shared) {
    constexpr int kSize = kScoreRows * kWarpgroupRows;
    const int own = Block::rank() * kTileSize + warpgroup * kSize;
    store_transposed<kScoreRows>(weights, shared.p + own);
    store_transposed<kScoreRows>(dscores, shared.ds[0] + own);
    cutlass::arch::fence_view_async_shared();
    shared.ds_handover.fill_by_warp(place);
    Base::sync_warpgroup(warpgroup);
    if (thread_anew() % kWarpgroup == 0) {
      constexpr int kBytes = kSize * sizeof(Element);
      auto& full = shared.other_ds_handover.full[place.stage()];
      copy_to_other_block<kBytes>(shared.p + own, full);
      copy_to_other_block<kBytes>(shared.ds[0] + own, full);
      full.arrive_and_expect_tx(2 * kBytes);  // as many come from there
    }
  }

  // To the same place in its shared memory; its barrier is told.
  template <int kBytes>
  static HSTU_DEVICE void copy_to_other_block(const Element* from,
                                              cutlass::arch::ClusterTransactionBarrier& barrier) {
    const uint32_t other = Block::rank() ^ 1;
    const uint32_t source = cast_smem_ptr_to_uint(from);
    const uint32_t told = cast_smem_ptr_to_uint(&barrier);
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(set_block_rank(source, other)),
        "r"(source), "n"(kBytes), "r"(set_block_rank(told, other))
        : "memory");
  }

  // Tells both blocks that a warp has read what they left.
  static HSTU_DEVICE void release(const Handover<DsPlace::kStages>& handover, DsPlace place) {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    for (uint32_t rank = 0; rank < 2; ++rank) handover.empty[place.stage()].arrive(rank);
  }
};

}  // namespace hstu::sm90
