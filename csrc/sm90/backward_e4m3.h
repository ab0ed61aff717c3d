// The consumers of the backward in e4m3, with the scales of backward_e4m3_factors.h.
//
// wgmma reads 8-bit operands only K-major, so the products that sum over rows or keys read
// transposed copies of q, k and dO, whose rows are in the order in which accumulators of S^T have
// them (key_at() in quantize/quantize.h). dS goes to shared memory with its keys in that order.
#pragma once

#include "backward_consumers.h"
#include "promotion.h"

namespace hstu::sm90 {

template <typename Traits>
struct BackwardE4m3Consumers : BackwardConsumers<Traits> {
  using Base = BackwardConsumers<Traits>;
  using Traits::kBlockKeys;
  using Traits::kColumns;
  using Traits::kHeadDim;
  using Traits::kRows;
  using Traits::kSharesKeys;
  using typename Base::KeyMma;
  using typename Base::KeySum;
  using typename Base::Product;
  using typename Traits::DqState;
  using typename Traits::DsState;
  using typename Traits::Element;
  using typename Traits::KVState;
  using typename Traits::QState;
  using typename Traits::RowTile;
  using typename Traits::SharedMemory;
  using typename Traits::WorkState;
  using typename Traits::WorkTile;
  static_assert(Traits::kDqPartition == DqPartition::kColumnHalves || kSharesKeys);

  static constexpr int kPromotedTiles = kPromotedRows / kRows;

  static HSTU_DEVICE void run(const BackwardParams& params, const BackwardBuffers& buffers,
                              SharedMemory& smem, int warpgroup) {
    QState q_state;
    DqState dq_state;
    using KeyPromotion = Promotion<KeySum, kPromotedTiles, Traits::kTotals>;
    float* const totals =
        buffers.totals +
        (static_cast<int>(blockIdx.x) * Traits::kConsumers + warpgroup) * 2 * Traits::kGlobalTotals;
    KeyPromotion dk_promotion{smem.totals[warpgroup][0], totals};
    KeyPromotion dv_promotion{smem.totals[warpgroup][1], totals + Traits::kGlobalTotals};
    for (WorkState work_state;; work_state.advance()) {
      smem.pipeline_work.consumer_wait(work_state);
      const WorkTile& work_tile = smem.work_tiles[work_state.index()];
      if (work_tile.head < 0) return;
      const KVState kv_state{work_state.count};
      smem.pipeline_kv.consumer_wait(kv_state);
      const float half_score = work_tile.half_score, weight = work_tile.weight;
      KeySum dk, dv;
      GMMA::ScaleOut scale = GMMA::ScaleOut::Zero;
      Product scores;
      const int key_group = Base::key_group(warpgroup);
      RowTile tile = Base::wait_for_rows(params, work_tile, warpgroup, q_state, smem);
      Base::start_product(smem.k, smem.q[q_state.index()], key_group, scores, GMMA::ScaleOut::Zero);
      wait_for_wgmma<0>(scores);
      for (;;) {
        const int stage = q_state.index();
        const uint64_t* const visible = smem.visible[stage][warpgroup];
        smem.pipeline_dout.consumer_wait(q_state);
        Product gradients;
        Base::start_product(smem.v, smem.dout[stage], key_group, gradients, GMMA::ScaleOut::Zero);
        Fragment weights;
        activate(half_score, weight, scores, weights);
        if (tile.is_partial()) mask(visible, weights);
        add_to_keys(weights, smem.dout_columns[stage], warpgroup, dv, scale);
        wait_for_wgmma<1>(gradients);
        Fragment dscores;
        multiply(scores, gradients, dscores);
        if (tile.is_partial()) mask(visible, dscores);
        add_to_keys(dscores, smem.q_columns[stage], warpgroup, dk, scale);
        scale = GMMA::ScaleOut::One;
        const DsState ds_state{q_state.count};
        Element* const ds = Traits::ds_tile(smem, ds_state);
        smem.pipeline_ds.producer_acquire(ds_state);
        store_dscores(dscores, warpgroup, ds);
        cutlass::arch::fence_view_async_shared();  // before wgmma reads dS
        smem.pipeline_ds.producer_commit_by_warp(ds_state);
        const bool is_last = tile.is_last();
        wait_for_wgmma<0>(dk);
        warpgroup_fence_operand(dv);
        smem.pipeline_q.consumer_release_by_warp(q_state);
        smem.pipeline_dout.consumer_release_by_warp(q_state);
        q_state.advance();
        if (!is_last) {
          tile = Base::wait_for_rows(params, work_tile, warpgroup, q_state, smem);
          Base::start_product(smem.k, smem.q[q_state.index()], key_group, scores,
                              GMMA::ScaleOut::Zero);
          const bool is_due = dk_promotion.add_if_due(dk);
          dv_promotion.add_if_due(dv);
          if (is_due) scale = GMMA::ScaleOut::Zero;
        }
        smem.pipeline_ds.consumer_wait(ds_state);
#pragma unroll
        for (int piece = 0; piece < kDqPieces; ++piece) {
          DqPiece dq;
          start_dq(ds, smem.k_columns, warpgroup * kDqPieces + piece, dq);
          wait_for_wgmma<0>(dq);
          if (piece == 0) warpgroup_fence_operand(scores);
          if (piece == kDqPieces - 1) smem.pipeline_ds.consumer_release_by_warp(ds_state);
          if (piece == 0) acquire_dq(dq_state, smem);
          store_dq(dq, warpgroup * kDqPieces + piece, dq_state, smem);
        }
        cutlass::arch::fence_view_async_shared();  // before TMA reads dQ
        smem.pipeline_dq.full[dq_state.index()].arrive();
        dq_state.advance();
        if (is_last) break;
      }
      smem.pipeline_kv.consumer_release_by_warp(kv_state);
      dk_promotion.finish(dk);
      dv_promotion.finish(dv);
      const int column = kSharesKeys ? warpgroup * kColumns : 0;
      Base::store_keys(params.dk, work_tile, key_group, dk,
                       work_tile.dk * Base::full_factor(params), column);
      Base::store_keys(params.dv, work_tile, key_group, dv,
                       work_tile.dv * Base::uniform_scale(params), column);
      smem.pipeline_work.consumer_release(work_state);
    }
  }

 private:
  // A warpgroup computes its columns of dQ in pieces of at most 64: beside dK, dV and the next S it
  // has no registers for more.
  static constexpr int kDqPieces = Traits::Dq::kColumns / 64;
  static constexpr int kPieceColumns = Traits::Dq::kColumns / kDqPieces;
  using DqPieceMma = RowsByColumnsMma<Element, kPieceColumns, kBlockKeys>;
  using DqPiece = decltype(partition_fragment_C(DqPieceMma{},
                                                Shape<Int<kWarpgroupRows>, Int<kPieceColumns>>{}));

  // 64 keys by kRows rows: word 2 n + m has rows 16 n + {0, 1, 8, 9} + 2 (lane % 4) of key m of the
  // two keys of a lane.
  using Fragment = Tensor<ArrayEngine<Element, kRows / 2>, Layout<Int<kRows / 2>>>;

  // P = weight * silu(2 * half_score * S), and S becomes silu' / (512 * D).
  static HSTU_DEVICE void activate(float half_score, float weight, Product& scores,
                                   Fragment& weights) {
    constexpr float kShift = 1.0f / (512 * kHeadDim);
    Tensor words = recast<uint32_t>(weights);
#pragma unroll
    for (int n = 0; n < size(words); ++n) {
      const int first = n / 2 * 8 + n % 2 * 2;
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& s = scores(first + i / 2 * 4 + i % 2);
        const float x = half_score * s;
        const float t = ptx::tanh_approx(x);
        const float y = silu_of_half(x, t);
        p[i] = weight * y;
        // silu' = (1 + t) / 2 + y * (1 - t) / 2, times kShift
        const float half = 0.5f * kShift * t;
        s = fmaf(y, 0.5f * kShift - half, 0.5f * kShift + half);
      }
      words(n) = ptx::cvt_e4m3x4(p[0], p[1], p[2], p[3]);
    }
  }

  static HSTU_DEVICE void multiply(const Product& derivatives, const Product& gradients,
                                   Fragment& dscores) {
    Tensor words = recast<uint32_t>(dscores);
    const auto product = [&](int n) { return derivatives(n) * gradients(n); };
#pragma unroll
    for (int n = 0; n < size(words); ++n) {
      const int first = n / 2 * 8 + n % 2 * 2;
      words(n) = ptx::cvt_e4m3x4(product(first), product(first + 1), product(first + 4),
                                 product(first + 5));
    }
  }

  static HSTU_DEVICE void mask(const uint64_t* visible, Fragment& fragment) {
    const int thread = reload_thread_idx() % kWarpgroup;
    const int lane = thread % 32;
    const int key = thread / 32 * 16 + lane / 4;
    Tensor words = recast<uint32_t>(fragment);
#pragma unroll
    for (int n = 0; n < size(words); n += 2) {
      const uint64_t* const rows = visible + n * 8 + lane % 4 * 2;
      const uint64_t bits[] = {rows[0], rows[1], rows[8], rows[9]};
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        uint32_t bytes = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (bits[i] >> (key + 8 * m) & 1) bytes |= 0xffu << 8 * i;
        }
        words(n + m) &= bytes;
      }
    }
  }

  // Starts sum = scale * sum + fragment * rows, for the warpgroup's columns of the rows.
  static HSTU_DEVICE void add_to_keys(Fragment& fragment, Element* columns, int warpgroup,
                                      KeySum& sum, GMMA::ScaleOut scale) {
    const auto own =
        local_tile(rows_tensor<kHeadDim, kRows>(columns), Shape<Int<kColumns>, Int<kRows>>{},
                   make_coord(kSharesKeys ? warpgroup : 0, _0{}));
    start_gemm_registers(KeyMma{}, fragment, own, sum, scale);
  }

  // Stores dS as kRows rows of kBlockKeys bytes, the transpose of the fragment. Two lanes with
  // neighboring keys exchange words, after which each lane has two of the four rows, four keys to a
  // word. With kSharesKeys, each warpgroup stores half of the rows.
  static HSTU_DEVICE void store_dscores(const Fragment& dscores, int warpgroup, Element* to) {
    static_assert(kBlockKeys == 64 || kBlockKeys == 128, "the swizzle of 64 or 128 bytes");
    const int thread = reload_thread_idx() % kWarpgroup;
    const int lane = thread % 32;
    const bool is_odd = lane / 4 & 1;
    const int row = lane % 4 * 2 + is_odd;
    const int chunk = Base::key_group(warpgroup) * 4 + thread / 32;  // of 16 bytes
    const int place = chunk ^ (kBlockKeys == 64 ? row / 2 : row);
    char* const own = reinterpret_cast<char*>(to) + row * kBlockKeys + place * 16 + lane / 8 * 4;
    const Tensor words = recast<const uint32_t>(dscores);
#pragma unroll
    for (int n = 0; n < size(words); n += 2) {
      if (kSharesKeys && n * 2 / size(words) != warpgroup) continue;
      const uint32_t even_rows = __byte_perm(words(n), words(n + 1), 0x6420);
      const uint32_t odd_rows = __byte_perm(words(n), words(n + 1), 0x7531);
      const uint32_t kept = is_odd ? odd_rows : even_rows;
      const uint32_t other = __shfl_xor_sync(0xffffffff, is_odd ? even_rows : odd_rows, 4);
      const uint32_t low = is_odd ? other : kept, high = is_odd ? kept : other;
      char* const at = own + n * 8 * kBlockKeys;
      *reinterpret_cast<uint32_t*>(at) = __byte_perm(low, high, 0x6240);
      *reinterpret_cast<uint32_t*>(at + 8 * kBlockKeys) = __byte_perm(low, high, 0x7351);
    }
  }

  // Waits until there is room for dQ of a tile.
  // NOTE: with one buffer for both stages, this waits until the previous tile of dQ has been added.
  static HSTU_DEVICE void acquire_dq(DqState state, SharedMemory& smem) {
    smem.pipeline_dq.producer_acquire(DqState{state.count + (Traits::kDqBuffers == 1)});
  }

  // Stores a piece of dQ in groups of eight values of each thread: [groups, threads, 8].
  static HSTU_DEVICE void store_dq(const DqPiece& dq, int piece, DqState state,
                                   SharedMemory& smem) {
    const int thread = reload_thread_idx() % kWarpgroup;
    auto* const own = Traits::dq_tile(smem, state) + piece * (kRows * kPieceColumns) + thread * 8;
    const Tensor result = rounded<typename Traits::DqElement>(dq);
    const Tensor words = recast<const uint32_t>(result);
#pragma unroll
    for (int n = 0; n < size(words); n += 4) {
      *reinterpret_cast<uint4*>(own + 2 * n * kWarpgroup) = {words(n), words(n + 1), words(n + 2),
                                                             words(n + 3)};
    }
  }

  // Starts a piece of dQ = dS K.
  static HSTU_DEVICE void start_dq(Element* ds, Element* k_columns, int piece, DqPiece& dq) {
    const auto columns =
        local_tile(rows_tensor<kHeadDim, kBlockKeys>(k_columns),
                   Shape<Int<kPieceColumns>, Int<kBlockKeys>>{}, make_coord(piece, _0{}));
    start_gemm(DqPieceMma{}, rows_tensor<kRows, kBlockKeys>(ds), columns, dq, GMMA::ScaleOut::Zero);
  }
};

}  // namespace hstu::sm90
