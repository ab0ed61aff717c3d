// The consumers of the backward in e4m3, with the scales of backward_e4m3_factors.h.
//
// wgmma reads 8-bit operands only K-major, so the products that sum over rows or keys read
// transposed copies of q, k and dO, whose rows are in the order in which accumulators of S^T have
// them (key_at() in quantize/quantize.h). dS goes to shared memory with its keys in that order.
#pragma once

#include "backward_consumers.h"

namespace hstu::sm90 {

template <typename Traits>
struct BackwardE4m3Consumers : BackwardConsumers<Traits> {
  using Base = BackwardConsumers<Traits>;
  using Traits::kBlockKeys;
  using Traits::kHeadDim;
  using Traits::kRows;
  using typename Base::DqPart;
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
  static_assert(Traits::kDqPartition == DqPartition::kColumnHalves);

  static HSTU_DEVICE void run(const BackwardParams& params, SharedMemory& smem, int warpgroup) {
    QState q_state;
    DqState dq_state;
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
      RowTile tile = Base::wait_for_rows(params, work_tile, warpgroup, q_state, smem);
      Base::start_product(smem.k, smem.q[q_state.index()], warpgroup, scores, GMMA::ScaleOut::Zero);
      wait_for_wgmma<0>(scores);
      for (;;) {
        const int stage = q_state.index();
        const uint64_t* const visible = smem.visible[stage][warpgroup];
        smem.pipeline_dout.consumer_wait(q_state);
        Product gradients;
        Base::start_product(smem.v, smem.dout[stage], warpgroup, gradients, GMMA::ScaleOut::Zero);
        Fragment weights;
        activate(half_score, weight, scores, weights);
        if (tile.is_partial()) mask(visible, weights);
        start_gemm_registers(KeyMma{}, weights,
                             rows_tensor<kHeadDim, kRows>(smem.dout_columns[stage]), dv, scale);
        wait_for_wgmma<1>(gradients);
        Fragment dscores;
        multiply(scores, gradients, dscores);
        if (tile.is_partial()) mask(visible, dscores);
        start_gemm_registers(KeyMma{}, dscores, rows_tensor<kHeadDim, kRows>(smem.q_columns[stage]),
                             dk, scale);
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
          Base::start_product(smem.k, smem.q[q_state.index()], warpgroup, scores,
                              GMMA::ScaleOut::Zero);
        }
        smem.pipeline_ds.consumer_wait(ds_state);
        DqPart dq;
        start_dq(ds, smem.k_columns, warpgroup, dq);
        wait_for_wgmma<0>(dq);
        warpgroup_fence_operand(scores);
        smem.pipeline_ds.consumer_release_by_warp(ds_state);
        store_dq(dq, warpgroup, dq_state, smem);
        dq_state.advance();
        if (is_last) break;
      }
      smem.pipeline_kv.consumer_release_by_warp(kv_state);
      Base::store_keys(params.dk, work_tile, warpgroup, dk,
                       work_tile.dk * Base::full_factor(params));
      Base::store_keys(params.dv, work_tile, warpgroup, dv,
                       work_tile.dv * Base::uniform_scale(params));
      smem.pipeline_work.consumer_release(work_state);
    }
  }

 private:
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

  // Stores the transpose: kRows rows of kBlockKeys bytes. Two lanes with neighboring keys exchange
  // words, so that each has the four keys of a word in two of four rows.
  static HSTU_DEVICE void store_dscores(const Fragment& dscores, int warpgroup, Element* to) {
    const int thread = reload_thread_idx() % kWarpgroup;
    const int lane = thread % 32;
    const bool is_odd = lane / 4 & 1;
    const int row = lane % 4 * 2 + is_odd;
    const int chunk = warpgroup * 4 + thread / 32;  // of 16 bytes
    char* const own =
        reinterpret_cast<char*>(to) + row * kBlockKeys + ((chunk ^ row) * 16) + lane / 8 * 4;
    const Tensor words = recast<const uint32_t>(dscores);
#pragma unroll
    for (int n = 0; n < size(words); n += 2) {
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

  // Stores a part of dQ, eight values of each thread after another.
  static HSTU_DEVICE void store_dq(const DqPart& dq, int part, DqState state, SharedMemory& smem) {
    smem.pipeline_dq.producer_acquire(state);
    const int thread = reload_thread_idx() % kWarpgroup;
    auto* const own = Traits::dq_tile(smem, state) + part * Traits::Dq::kPartSize + thread * 8;
    const Tensor result = rounded<typename Traits::DqElement>(dq);
    const Tensor words = recast<const uint32_t>(result);
#pragma unroll
    for (int n = 0; n < size(words); n += 4) {
      *reinterpret_cast<uint4*>(own + 2 * n * kWarpgroup) = {words(n), words(n + 1), words(n + 2),
                                                             words(n + 3)};
    }
    cutlass::arch::fence_view_async_shared();  // before TMA reads dQ
    smem.pipeline_dq.full[state.index()].arrive();
  }

  static HSTU_DEVICE void start_dq(Element* ds, Element* k_columns, int part, DqPart& dq) {
    const auto columns =
        local_tile(rows_tensor<kHeadDim, kBlockKeys>(k_columns),
                   Shape<Int<Traits::Dq::kColumns>, Int<kBlockKeys>>{}, make_coord(part, _0{}));
    start_gemm(typename Base::DqMma{}, rows_tensor<kRows, kBlockKeys>(ds), columns, dq,
               GMMA::ScaleOut::Zero);
  }
};

}  // namespace hstu::sm90
