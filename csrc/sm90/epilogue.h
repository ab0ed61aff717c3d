// The epilogue of the forward: O = scale * (sum of the splits' O), rounded once and stored.
#pragma once

#include "../common/launch.h"
#include "forward_traits.h"
#include "split_reduction.h"
#include "stores.h"

namespace hstu::sm90 {

template <typename Traits>
class Epilogue {
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using WorkTile = typename Traits::WorkTile;
  static constexpr int kHeadDim = Traits::kHeadDim;

 public:
  // Stores the O of a warpgroup's rows, or its partial O if other splits see keys, too.
  template <typename Out>
  static HSTU_DEVICE void store(const ForwardParams& params, const SchedulerMetadata& metadata,
                                const WorkTile& work_tile, int warpgroup, Out& out) {
    if (Traits::kIsSplitByList && work_tile.other_splits > 0) {
      reduce_over_splits(params, metadata, work_tile, warpgroup, out);
    } else {
      store_out(params, work_tile, warpgroup, out);
    }
  }

  // Multiplies O of e4m3 by the factors of its rows.
  template <typename Out>
  static HSTU_DEVICE void scale_rows(const WorkTile& work_tile, int warpgroup, Out& out) {
    const RowFactors* const rows = work_tile.row_factors + Traits::row_of_thread(warpgroup);
    const float factors[] = {rows[0].out, rows[8].out};
#pragma unroll
    for (int n = 0; n < size(out); ++n) out(n) *= factors[n / 2 % 2];
  }

  // Adds the partial O of the blocks of a cluster, and stores O.
  template <typename Out>
  static HSTU_DEVICE void reduce_over_cluster(const ForwardParams& params, SharedMemory& smem,
                                              int warpgroup, const Out& out) {
    static_assert(Traits::kRows * kHeadDim * sizeof(float) <= sizeof(smem.k) + sizeof(smem.v),
                  "the partial O replace K and V");
    sync_consumers<Traits::kConsumers>();  // K and V have been read
    float* const sums = reinterpret_cast<float*>(smem.k[0]) + warpgroup * kWarpgroupRows * kHeadDim;
    const WorkTile& work_tile = smem.work_tiles[0];
    const Sequence& sequence = work_tile.tile.sequence;
    const int first = first_row_of_thread(work_tile, warpgroup);
    const auto store = [&](int column, int m, float x, float y) {
      const int row = first + 8 * m;
      if (work_tile.is_end() || row >= sequence.q_len || column >= params.out.head_dim) return;
      const float scale = scale_of(params, sequence, row);
      visit_out_element(params, [&](auto element) {
        using OutElement = decltype(element);
        auto* const to = static_cast<OutElement*>(params.out.data) +
                         (sequence.q_begin + row) * params.out.row_stride +
                         work_tile.head * params.out.head_stride + column;
        const cutlass::NumericArrayConverter<OutElement, float, 2> convert;
        *reinterpret_cast<cutlass::Array<OutElement, 2>*>(to) = convert({scale * x, scale * y});
      });
    };
    reduce_sums_over_cluster<Traits::kClusterSize>(out, sums, store);
  }

 private:
  // The first of the thread's two rows, which are 8 apart.
  static HSTU_DEVICE int first_row_of_thread(const WorkTile& work_tile, int warpgroup) {
    return work_tile.first_row_of_warp(warpgroup) + reload_thread_idx() % 32 / 4;
  }

  static HSTU_DEVICE float scale_of(const ForwardParams& params, const Sequence& sequence,
                                    int row) {
    if (!params.attn_scale) return static_cast<float>(params.scale);
    const bool is_own = params.attn_scale_per_row && row < sequence.q_len;
    return params.attn_scale[is_own ? sequence.q_begin + row : 0];
  }

  // The scales of a thread's two rows.
  struct RowScales {
    float scale[2];

    HSTU_DEVICE RowScales(const ForwardParams& params, const WorkTile& work_tile, int warpgroup) {
      const int row = first_row_of_thread(work_tile, warpgroup);
      for (int m = 0; m < 2; ++m) {
        scale[m] = scale_of(params, work_tile.tile.sequence, row + 8 * m);
        if constexpr (Traits::kIsFp8) {
          scale[m] *= work_tile.row_factors[Traits::row_of_thread(warpgroup) + 8 * m].out;
        }
      }
    }
  };

  // Stores the partial O of a split. The last split to arrive adds the partial O of all splits, in
  // the order of keys, and stores O.
  template <typename Out>
  static HSTU_DEVICE void reduce_over_splits(const ForwardParams& params,
                                             const SchedulerMetadata& metadata,
                                             const WorkTile& work_tile, int warpgroup, Out& out) {
    wait_for_previous_kernel();  // prepare_scheduler() zeroes `arrived`
    const SplitKVPlan& split_kv = metadata.split_kv;
    const Sequence& sequence = work_tile.tile.sequence;
    const int64_t tile =
        first_tile(sequence.q_begin, work_tile.tile.sequence_index, Traits::kRows) +
        work_tile.tile.index;
    const int64_t slot = (tile * params.heads + work_tile.head) * Traits::kConsumers + warpgroup;
    constexpr int kSize = kWarpgroupRows * kHeadDim;
    float* const partials = metadata.partial_out + slot * split_kv.num_splits * kSize;
    int* const arrived = metadata.arrived + slot;
    const int others = work_tile.other_splits;
    // Shortcut: if the second of two splits has arrived, the first adds the second's partial O to
    // its registers. This is frequent, because blocks with several short splits begin them early.
    if (split_kv.num_splits == 2 && work_tile.split.begin == 0 &&
        have_arrived(arrived, others, warpgroup)) {
      add_partial(partials + kSize, out);
      store_out(params, work_tile, warpgroup, out);
      return;
    }
    store_partial(out, partials + work_tile.split.begin / split_kv.keys_per_split * kSize);
    if (!is_last_arrival(arrived, others, warpgroup)) return;
    uint32_t filled = 0;  // bit n: rows see keys of split n
#pragma unroll 1
    for (int n = 0; n < split_kv.num_splits; ++n) {
      filled |= uint32_t{work_tile.sees(split_kv.keys_of(n))} << n;
    }
    const RowScales scales(params, work_tile, warpgroup);
#pragma unroll 1
    for (int column = 0; column < kHeadDim; column += kStoredColumns) {
      auto sum = make_stored_columns();
      sum_partials(partials, filled, split_kv.num_splits, kSize, column, sum);
      store_columns(params, work_tile, warpgroup, scales, column, sum);
    }
  }

  template <typename Out>
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

  // Columns of O that are converted and stored at once: 32 in split-KV, whose two store paths leave
  // registers for no more, and in e4m3, which has a store path for each output dtype.
  static constexpr int kStoredColumns = Traits::kIsSplitByList || Traits::kIsFp8 ? 32 : kHeadDim;
  static HSTU_DEVICE auto make_stored_columns() {
    return make_tensor<float>(Int<kStoredColumns / 2>{});
  }
  // Scales, rounds and stores columns.
  template <typename Sum>
  static HSTU_DEVICE void store_columns(const ForwardParams& params, const WorkTile& work_tile,
                                        int warpgroup, const RowScales& scales, int column,
                                        Sum& sum) {
#pragma unroll
    for (int n = 0; n < size(sum); ++n) sum(n) *= scales.scale[n / 2 % 2];
    const Sequence& sequence = work_tile.tile.sequence;
    const int first = work_tile.tile.index * Traits::kRows + warpgroup * kWarpgroupRows;
    visit_out_element(params, [&](auto element) {
      store_sum<decltype(element), kStoredColumns>(sum, params.out, work_tile.head,
                                                   sequence.q_begin + first, sequence.q_len - first,
                                                   column);
    });
  }

  // Calls visit() with an element of the type of `out`.
  template <typename Visit>
  static HSTU_DEVICE void visit_out_element(const ForwardParams& params, Visit visit) {
    if constexpr (!Traits::kIsFp8) {
      visit(Element{});
    } else if (params.out_dtype == DType::kFloat16) {
      visit(cutlass::half_t{});
    } else {
      visit(cutlass::bfloat16_t{});
    }
  }
};

}  // namespace hstu::sm90
