// The consumers of the forward: warpgroups that multiply, and store what they have added up.
#pragma once

#include "../common/activation.h"
#include "../common/launch.h"
#include "bias.h"
#include "forward_block.h"
#include "stores.h"

namespace hstu::sm90 {

template <typename Block>
struct ForwardConsumers : Block {
  using Block::kConsumers;
  using Block::kHasBias;
  using Block::kHeadDim;
  using Block::kIsPaged;
  using Block::kIsShared;
  using Block::kIsSplit;
  using Block::kKeys;
  using Block::kNoKey;
  using Block::kRows;
  using Block::kSplits;
  using typename Block::BiasPlace;
  using typename Block::Element;
  using typename Block::Item;
  using typename Block::ItemPlace;
  using typename Block::KeyPlace;
  using typename Block::KeyTile;
  using typename Block::OutMma;
  using typename Block::QueryPlace;
  using typename Block::ScoreMma;
  using typename Block::SharedMemory;

  using Scores =
      decltype(partition_fragment_C(ScoreMma{}, Shape<Int<kWarpgroupRows>, Int<kKeys>>{}));
  using Out = decltype(partition_fragment_C(OutMma{}, Shape<Int<kWarpgroupRows>, Int<kHeadDim>>{}));

  // All tiles of all items are one sequence of steps: S of a tile is started, then P V of the tile
  // before it, which runs beside the activation of S. The sequence is broken where the warpgroup's
  // rows see fewer keys than the others'; and after each share of an item, since what ends one, if
  // it stood among the steps, would make the compiler move activations behind P V.
  static HSTU_DEVICE void run(const ForwardParams& params, const KeyShares& shares,
                              SharedMemory& shared, int warpgroup) {
    const Turns<kConsumers> turns{warpgroup};
    turns.begin();
    ItemPlace item_place;
    QueryPlace q_place;
    KeyPlace k_place;
    BiasPlace bias_place;
    Scores scores;
    Out out;
    GMMA::ScaleOut out_scale = GMMA::ScaleOut::Zero;
    Tensor weights = make_tensor_like<Element>(scores);

    const auto item_of = [&](ItemPlace place) -> const Item& {
      return shared.items[place.stage()];
    };
    // S = Q K^T + bias, started
    const auto start_scores = [&] {
      start_gemm(ScoreMma{},
                 rows_tensor<kWarpgroupRows, kHeadDim>(shared.q[q_place.stage()][warpgroup]),
                 rows_tensor<kKeys, kHeadDim>(shared.k[k_place.stage()]), scores,
                 kHasBias ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero);
    };
    // O += P V, started
    const auto start_out = [&](KeyPlace place) {
      start_gemm_registers(OutMma{}, weights,
                           transposed_tensor<kKeys, kHeadDim>(shared.v[place.stage()]), out,
                           out_scale);
      out_scale = GMMA::ScaleOut::One;
    };
    const auto has_item = [&] {
      shared.item_handover.wait_full(item_place);
      const Item& item = item_of(item_place);
      if (item.head < 0 || (kIsSplit && item.tile_from(0) == kNoKey)) return false;
      shared.q_handover.wait_full(q_place);
      return true;
    };
    const auto add_bias = [&] {
      if constexpr (kHasBias) {
        shared.bias_handover.wait_full(bias_place);
        load_bias<kKeys>(shared.bias[bias_place.stage()] + warpgroup * (kWarpgroupRows * kKeys),
                         scores);
        shared.bias_handover.release_by_warp(bias_place);
        bias_place.advance();
      }
    };
    // P = silu(alpha * S), before the mask
    KeyTile tile;
    const auto activate_scores = [&] {
      tile = read_by_warp(shared.key_tiles[k_place.stage()]);
      shared.k_handover.release_by_warp(k_place);
      activate(params, scores);
      // NOTE: a branch, behind which the compiler does not move the activation: to wait for P V.
      if (tile.is_last_of(warpgroup)) shared.q_handover.release_by_warp(q_place);
    };
    // P = M * P, rounded
    const auto finish_weights = [&] {
      round_to(scores, weights);
      if (tile.is_partial()) {
        hide(find_visible(params, item_of(item_place), warpgroup, tile), weights);
      }
    };
    const auto end_item = [&](ItemPlace place) {
      if constexpr (!kIsSplit) {
        if (kIsShared && item_of(place).other_shares > 0) {
          add_shares(params, shares, item_of(place), warpgroup, out);
        } else {
          store_out(params, item_of(place), warpgroup, out);
        }
      }
      shared.item_handover.release(place);
      out_scale = GMMA::ScaleOut::Zero;
    };

    // The tiles of an item behind the last one that the warpgroup's rows see
    const auto let_tiles_pass = [&] {
      while (!tile.is_last()) {
        turns.take();
        turns.pass();
        wait_full(shared.k_handover, k_place, shared.v_handover, k_place);
        tile = read_by_warp(shared.key_tiles[k_place.stage()]);
        shared.k_handover.release_by_warp(k_place);
        shared.v_handover.release_by_warp(k_place);
        if constexpr (kHasBias) {
          shared.bias_handover.wait_full(bias_place);
          shared.bias_handover.release_by_warp(bias_place);
          bias_place.advance();
        }
        k_place.advance();
      }
    };

    while (has_item()) {
      shared.k_handover.wait_full(k_place);
      add_bias();
      turns.take();
      start_scores();
      turns.pass();
      wait_for_products<0>(scores);
      activate_scores();
      finish_weights();

      for (;;) {
        const bool ends_item = tile.is_last_of(warpgroup);
        k_place.advance();
        if (ends_item) {
          item_place.advance();
          q_place.advance();
          if (kIsShared || !tile.is_last() || !has_item()) break;
        }
        wait_full(shared.k_handover, k_place, shared.v_handover, k_place.before());
        add_bias();
        turns.take();
        start_scores();
        start_out(k_place.before());
        turns.pass();
        wait_for_products<1>(scores);
        activate_scores();
        wait_for_products<0>(out);
        shared.v_handover.release_by_warp(k_place.before());
        finish_weights();
        if (ends_item) end_item(item_place.before());
      }

      // P V of the last tile
      shared.v_handover.wait_full(k_place.before());
      start_out(k_place.before());
      wait_for_products<0>(out);
      shared.v_handover.release_by_warp(k_place.before());
      let_tiles_pass();
      end_item(item_place.before());
    }
    if constexpr (kIsSplit) {
      if (item_place.count == 0) clear(out);  // the block had no tile
      add_up(params, shared, warpgroup, out);
    }
  }

  // Which of 64 keys one row sees: lane n of a warp finds it for row n % 16 of the warp's, and the
  // first or second 64 keys of the tile.
  static HSTU_DEVICE uint64_t find_visible(const ForwardParams& params, const Item& item,
                                           int warpgroup, KeyTile tile) {
    static_assert(kKeys <= 128, "two lanes find what a row sees");
    const Sequence& sequence = item.work.sequence;
    const int lane = thread_anew() % 32;
    const int row = first_row(item, warpgroup) + lane % 16;
    if (row >= sequence.q_len) return 0;
    const Mask mask(params.mask, sequence, item.head);
    const int column = tile.first_key() + lane / 16 * 64;
    if constexpr (!kIsPaged) return mask.row_bits(row, column);
    const PagedColumns<kKeys> paged(sequence);
    return paged.without_gap(mask.row_bits(row, paged.key(column)), column);
  }

  // P = silu(alpha * S)
  static HSTU_DEVICE void activate(const ForwardParams& params, Scores& scores) {
    const float half_alpha = 0.5f * static_cast<float>(params.alpha);
#pragma unroll
    for (int n = 0; n < size(scores); ++n) {
      const float x = half_alpha * scores(n);
      scores(n) = silu_of_half(x, tanh_approx(x));
    }
  }

  // Zeroes what the mask hides. Four lanes share a row, and each gets the bits of it.
  template <typename Weights>
  static HSTU_DEVICE void hide(uint64_t visible, Weights& weights) {
    const int lane = thread_anew() % 32;
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
  static HSTU_DEVICE int first_row(const Item& item, int warpgroup) {
    const int warp = thread_anew() / 32 % 4;
    return item.work.tile * kRows + warpgroup * kWarpgroupRows + warp * 16;
  }

  static HSTU_DEVICE float scale_of(const ForwardParams& params, const Sequence& sequence,
                                    int row) {
    if (!params.attn_scale) return static_cast<float>(params.scale);
    const bool is_own = params.attn_scale_per_row && row < sequence.q_len;
    return params.attn_scale[is_own ? sequence.q_begin + row : 0];
  }

  // Of a thread's two rows
  struct RowScales {
    float of[2];

    HSTU_DEVICE RowScales(const ForwardParams& params, const Item& item, int warpgroup) {
      const int row = first_row(item, warpgroup) + thread_anew() % 32 / 4;
      for (int m = 0; m < 2; ++m) of[m] = scale_of(params, item.work.sequence, row + 8 * m);
    }
  };

  // O = scale * sum over the cluster's blocks, rounded once
  static HSTU_DEVICE void add_up(const ForwardParams& params, SharedMemory& shared, int warpgroup,
                                 const Out& out) {
    static_assert(kRows * kHeadDim * sizeof(float) <= sizeof(shared.k) + sizeof(shared.v),
                  "the sums take the place of K and V");
    asm volatile("bar.sync %0, %1;" ::"n"(static_cast<int>(NamedBarrier::kConsumers)),
                 "n"(kConsumers * kWarpgroup)
                 : "memory");  // K and V have been read
    float* const sums =
        reinterpret_cast<float*>(shared.k[0]) + warpgroup * kWarpgroupRows * kHeadDim;
    const Item& item = shared.items[0];
    const Sequence& sequence = item.work.sequence;
    const int first = first_row(item, warpgroup) + thread_anew() % 32 / 4;
    add_up_cluster<kSplits>(out, sums, [&](int column, int m, float x, float y) {
      const int row = first + 8 * m;
      if (item.head < 0 || row >= sequence.q_len || column >= params.out.head_dim) return;
      const float scale = scale_of(params, sequence, row);
      Element* to = static_cast<Element*>(params.out.data) +
                    (sequence.q_begin + row) * params.out.row_stride +
                    item.head * params.out.head_stride + column;
      const cutlass::NumericArrayConverter<Element, float, 2> convert;
      *reinterpret_cast<cutlass::Array<Element, 2>*>(to) = convert({scale * x, scale * y});
    });
  }

  // Where an item's keys are shared: leaves the sum over this share, and the last warpgroup to come
  // stores O = scale * the sum over all of them.
  static HSTU_DEVICE void add_shares(const ForwardParams& params, const KeyShares& shares,
                                     const Item& item, int warpgroup, Out& out) {
    wait_for_previous_kernel();  // which has zeroed what is counted
    const Sequence& sequence = item.work.sequence;
    const int64_t tile =
        first_tile(sequence.q_begin, item.work.sequence_number, kRows) + item.work.tile;
    const int64_t place = (tile * params.heads + item.head) * kConsumers + warpgroup;
    constexpr int kSize = kWarpgroupRows * kHeadDim;
    float* const sums = shares.sums + place * shares.count * kSize;
    // Of two shares, the second is most often there already: blocks that take several begin early.
    if (shares.count == 2 && item.share.begin == 0 &&
        have_arrived(shares.arrived + place, item.other_shares, warpgroup)) {
      add_left_sum(sums + kSize, out);
      store_out(params, item, warpgroup, out);
      return;
    }
    leave_sum(out, sums + item.share.begin / shares.keys * kSize);
    if (!arrives_last(shares.arrived + place, item.other_shares, warpgroup)) return;
    uint32_t seen = 0;  // a bit for each share in which its rows see keys
#pragma unroll 1
    for (int n = 0; n < shares.count; ++n) seen |= uint32_t{item.sees(shares.of(n))} << n;
    const RowScales scales(params, item, warpgroup);
#pragma unroll 1
    for (int column = 0; column < kHeadDim; column += kStoredColumns) {
      auto sum = make_stored_columns();
      add_sums(sums, seen, shares.count, kSize, column, sum);
      store_columns(params, item, warpgroup, scales, column, sum);
    }
  }

  // O = scale * O
  static HSTU_DEVICE void store_out(const ForwardParams& params, const Item& item, int warpgroup,
                                    const Out& out) {
    const RowScales scales(params, item, warpgroup);
#pragma unroll
    for (int column = 0; column < kHeadDim; column += kStoredColumns) {
      auto sum = make_stored_columns();
#pragma unroll
      for (int n = 0; n < size(sum); ++n) sum(n) = out(column / 2 + n);
      store_columns(params, item, warpgroup, scales, column, sum);
      forget_registers();
    }
  }

  // Of a warpgroup's rows at a time. With two ways to store them, there are registers for a few.
  static constexpr int kStoredColumns = kIsShared ? 32 : kHeadDim;
  static HSTU_DEVICE auto make_stored_columns() {
    return make_tensor<float>(Int<kStoredColumns / 2>{});
  }
  // Scaled, and rounded once.
  template <typename Sum>
  static HSTU_DEVICE void store_columns(const ForwardParams& params, const Item& item,
                                        int warpgroup, const RowScales& scales, int column,
                                        Sum& sum) {
#pragma unroll
    for (int n = 0; n < size(sum); ++n) sum(n) *= scales.of[n / 2 % 2];
    const Sequence& sequence = item.work.sequence;
    const int first = item.work.tile * kRows + warpgroup * kWarpgroupRows;
    store_sum<Element, kStoredColumns>(sum, params.out, item.head, sequence.q_begin + first,
                                       sequence.q_len - first, column);
  }
};

}  // namespace hstu::sm90
