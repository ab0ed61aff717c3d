// The fused backward: scores recomputed, dQ, dK and dV in one pass.
//
// A work item is a tile of keys of one head, whose dK and dV stay in registers. S and dP are found
// transposed, keys by rows, so that P^T and dS^T are where the products for dV and dK need them; dS
// goes through shared memory for dQ = dS K, whose fp32 sums a TMA reduction adds up in device
// memory. A second kernel scales and rounds them.
//
// S of the next tile of rows is started before dQ of this one, which waits for both warpgroups' dS:
// so they need not go in step.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "../common/launch.h"
#include "backward_producers.h"
#include "backward_scores.h"
#include "tensors.h"

namespace hstu::sm90 {

template <int kHeadDim_, typename Element_, bool kIsDeterministic_>
struct Backward : BackwardBlock<kHeadDim_, Element_, kIsDeterministic_> {
  using Block = BackwardBlock<kHeadDim_, Element_, kIsDeterministic_>;
  using typename Block::DqPlace;
  using typename Block::DsPlace;
  using typename Block::Element;
  using typename Block::Item;
  using typename Block::ItemPlace;
  using typename Block::KeyPlace;
  using typename Block::MaskPlace;
  using typename Block::RowPlace;
  using typename Block::RowTile;
  using typename Block::SharedMemory;
  using Dq = typename Block::Dq;
  using Block::kConsumers;
  using Block::kHeadDim;
  using Block::kKeys;
  using Block::kRows;
  using Block::kScoreRows;
  using Block::kSharing;
  using Block::kSplitsColumns;
  static constexpr int kKeyColumns = kSplitsColumns ? kHeadDim / 2 : kHeadDim;  // of dK and dV

  using ScoreMma = SharedMma<Element, kScoreRows, kHeadDim>;  // keys by rows
  using KeyMma =                                              // keys by columns
      std::conditional_t<kSplitsColumns, ColumnsByColumnsMma<Element, kKeyColumns, kRows>,
                         RegisterMma<Element, kKeyColumns, kRows>>;
  using DqMma = RowsByColumnsMma<Element, Dq::kColumns, kKeys>;  // rows by columns

  static HSTU_DEVICE void run(const BackwardParams& params, const BackwardMaps& maps,
                              const BackwardBuffers& buffers, SharedMemory& shared) {
    if (threadIdx.x == 0) {
      Block::init(shared);
      prefetch_map(maps.q);
      prefetch_map(maps.k);
      prefetch_map(maps.v);
      prefetch_map(maps.dout);
    }
    __syncthreads();
    wait_for_previous_kernel();

    // NOTE: by a shuffle, so that the compiler knows it to be the same in all lanes.
    const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<Block::kRegisters.producer>();
      BackwardProducers<Block>::run(params, maps, buffers, shared);
    } else {
      cutlass::arch::warpgroup_reg_alloc<Block::kRegisters.consumer>();
      consume(params, shared, warpgroup - 1);
    }
  }

  // The factor that all rows share; for what each row has of its own, see scale_rows().
  static HSTU_DEVICE float uniform_scale(const BackwardParams& params) {
    const bool is_uniform = params.attn_scale && !params.attn_scale_per_row;
    return is_uniform ? params.attn_scale[0] : static_cast<float>(params.scale);
  }

 private:
  using Scores =
      decltype(partition_fragment_C(ScoreMma{}, Shape<Int<kWarpgroupRows>, Int<kScoreRows>>{}));
  using KeySum =
      decltype(partition_fragment_C(KeyMma{}, Shape<Int<kWarpgroupRows>, Int<kKeyColumns>>{}));
  using DqPart =
      decltype(partition_fragment_C(DqMma{}, Shape<Int<kWarpgroupRows>, Int<Dq::kColumns>>{}));
  using Weights = decltype(make_tensor_like<Element>(Scores{}));

  static HSTU_DEVICE void consume(const BackwardParams& params, SharedMemory& shared,
                                  int warpgroup) {
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
      // S^T = K Q^T
      Scores scores;
      RowTile tile = wait_for_rows(params, item, warpgroup, row_place, shared);
      start_scores(shared.k, shared.q[row_place.stage()], warpgroup, scores);
      wait_for_products<0>(scores);
      for (;;) {
        Element* const q = shared.q[row_place.stage()];
        Element* const dout = shared.dout[row_place.stage()];
        const int mask_stage = Block::kProducersLook ? mask_place.stage() : row_place.stage();
        const uint64_t* const visible =
            shared.visible[mask_stage][key_group(warpgroup)] + first_row(warpgroup);
        // dP^T = V dO^T
        Scores gradients;
        shared.dout_handover.wait_full(row_place);
        if (params.attn_scale_per_row) scale_rows(params, item, tile, dout);
        start_scores(shared.v, dout, warpgroup, gradients);
        // P = M * silu(alpha * S); what is left in S is its derivative
        Weights weights;
        activate(static_cast<float>(params.alpha), scores, weights);
        if (tile.is_partial()) hide<kScoreRows>(visible, weights);
        // dV += P^T dO
        if constexpr (!kSplitsColumns) {
          start_gemm_registers(KeyMma{}, weights, transposed_tensor<kRows, kHeadDim>(dout), dv,
                               scale);
        }
        // dS = M * dP * silu'(alpha * S)
        Weights dscores;
        wait_for_products<kSplitsColumns ? 0 : 1>(gradients);
        multiply(scores, gradients, dscores);
        if (tile.is_partial()) {
          hide<kScoreRows>(visible, dscores);
          if constexpr (Block::kProducersLook) {
            shared.mask_handover.release(mask_place);
            mask_place.advance();
          }
        }
        // dK += dS^T Q
        if constexpr (!kSplitsColumns) {
          start_gemm_registers(KeyMma{}, dscores, transposed_tensor<kRows, kHeadDim>(q), dk, scale);
        }
        const DsPlace ds_place{row_place.count};
        Element* const ds = shared.ds[ds_place.stage()];
        const int own = warpgroup * (kScoreRows * kWarpgroupRows);
        shared.ds_handover.wait_empty(ds_place);
        store_transposed<kScoreRows>(dscores, ds + own);
        if constexpr (kSplitsColumns) store_transposed<kScoreRows>(weights, shared.p + own);
        cutlass::arch::fence_view_async_shared();
        shared.ds_handover.fill_by_warp(ds_place);
        // dV += P^T dO and dK += dS^T Q, of half of the columns
        if constexpr (kSplitsColumns) {
          shared.ds_handover.wait_full(ds_place);
          start_key_gemm(shared.p, dout, warpgroup, dv, scale);
          start_key_gemm(ds, q, warpgroup, dk, scale);
        }
        scale = GMMA::ScaleOut::One;
        wait_for_products<0>(dk);
        warpgroup_fence_operand(dv);
        if constexpr (!kSplitsColumns) {
          shared.q_handover.release_by_warp(row_place);
          shared.dout_handover.release_by_warp(row_place);
        }
        row_place.advance();

        // S of the next tile, and dQ = dS K of this one
        const bool is_last = tile.is_last();
        if (!is_last) {
          tile = wait_for_rows(params, item, warpgroup, row_place, shared);
          start_scores(shared.k, shared.q[row_place.stage()], warpgroup, scores);
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
      const float factor = uniform_scale(params);
      store_keys(params.dk, item, warpgroup, dk, static_cast<float>(params.alpha) * factor);
      store_keys(params.dv, item, warpgroup, dv, factor);
      shared.item_handover.release(item_place);
    }
  }

  // keys rows^T, of the warpgroup's keys and rows, started
  static HSTU_DEVICE void start_scores(Element* keys, Element* rows, int warpgroup,
                                       Scores& scores) {
    const auto own_keys =
        local_tile(rows_tensor<kKeys, kHeadDim>(keys), Shape<Int<kWarpgroupRows>, Int<kHeadDim>>{},
                   make_coord(key_group(warpgroup), _0{}));
    const auto own_rows =
        local_tile(rows_tensor<kRows, kHeadDim>(rows), Shape<Int<kScoreRows>, Int<kHeadDim>>{},
                   make_coord(kSplitsColumns ? warpgroup : 0, _0{}));
    start_gemm(ScoreMma{}, own_keys, own_rows, scores, GMMA::ScaleOut::Zero);
  }

  // sum = scale * sum + weights^T rows, of the warpgroup's columns, started
  static HSTU_DEVICE void start_key_gemm(Element* weights, Element* rows, int warpgroup,
                                         KeySum& sum, GMMA::ScaleOut scale) {
    const auto columns =
        local_tile(transposed_tensor<kRows, kHeadDim>(rows), Shape<Int<kKeyColumns>, Int<kRows>>{},
                   make_coord(warpgroup, _0{}));
    start_gemm(KeyMma{}, transposed_tensor<kRows, kKeys>(weights), columns, sum, scale);
  }

  // A part of dS K, started
  static HSTU_DEVICE void start_dq(Element* ds, Element* k, int part, DqPart& dq) {
    const auto columns = local_tile(transposed_tensor<kKeys, kHeadDim>(k),
                                    Shape<Int<Dq::kColumns>, Int<kKeys>>{}, make_coord(part, _0{}));
    start_gemm(DqMma{}, rows_tensor<kRows, kKeys>(ds), columns, dq, GMMA::ScaleOut::Zero);
  }

  // Leaves a part of dQ to the thread that adds it.
  // NOTE: where columns are split, in place of those columns of the rows, which both warpgroups
  // have read: S and dP before they handed over dS, and dV and dK by this warpgroup alone.
  static HSTU_DEVICE void hand_over(const DqPart& dq, int part, DqPlace place,
                                    SharedMemory& shared) {
    // NOTE: with one buffer, that which the tile before was in.
    if constexpr (Block::kDqBuffers == 1) shared.dq_handover.wait_empty(DqPlace{place.count + 1});
    if constexpr (Block::kDqBuffers == 2) shared.dq_handover.wait_empty(place);
    const int thread = thread_anew() % kWarpgroup;
#pragma unroll
    for (int piece = 0; piece < Dq::kPieces; ++piece) {
      float* const own = Block::dq_piece(shared, place, piece) + thread * 4;
#pragma unroll
      for (int n = 0; n < Dq::kPieceValues; n += 4) {
        const int first = piece * Dq::kPieceValues + n;
        *reinterpret_cast<float4*>(own + Dq::offset(part, n)) = {dq(first), dq(first + 1),
                                                                 dq(first + 2), dq(first + 3)};
      }
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
    return kSplitsColumns ? warpgroup * kScoreRows : 0;
  }
  static HSTU_DEVICE int key_group(int warpgroup) { return kSplitsColumns ? 0 : warpgroup; }

  static HSTU_DEVICE void sync_warpgroup(int warpgroup) {
    asm volatile(
        "bar.sync %0, %1;" ::"r"(static_cast<int>(NamedBarrier::kFirstOfWarpgroup) + warpgroup),
        "n"(kWarpgroup)
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
    asm volatile("bar.sync %0, %1;" ::"n"(static_cast<int>(NamedBarrier::kConsumers)),
                 "n"(kConsumers * kWarpgroup)
                 : "memory");
  }

  static HSTU_DEVICE void store_keys(const PackedTensor& tensor, const Item& item, int warpgroup,
                                     KeySum& sum, float factor) {
#pragma unroll
    for (int n = 0; n < size(sum); ++n) sum(n) *= factor;
    const Sequence& sequence = item.work.sequence;
    const int first = item.work.tile * kKeys + key_group(warpgroup) * kWarpgroupRows;
    store_sum<Element, kKeyColumns>(sum, tensor, item.head, sequence.k_begin + first,
                                    sequence.k_len - first,
                                    kSplitsColumns ? warpgroup * kKeyColumns : 0);
  }
};

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    run_backward(const __grid_constant__ BackwardParams params,
                 const __grid_constant__ BackwardMaps maps,
                 const __grid_constant__ BackwardBuffers buffers) {
  extern __shared__ __align__(1024) char shared[];
  Kernel::run(params, maps, buffers, *reinterpret_cast<typename Kernel::SharedMemory*>(shared));
}

// dQ = alpha * scale * sum, rounded once. A block takes one tile of rows of one head.
template <typename Kernel>
__global__ void __launch_bounds__(Kernel::Dq::kWarpgroups* kWarpgroup)
    finish_dq(const __grid_constant__ BackwardParams params, const float* sums) {
  using Dq = typename Kernel::Dq;
  wait_for_previous_kernel();
  const int number = blockIdx.x / params.heads;
  const int head = blockIdx.x % params.heads;
  WorkTile work;
  if (!find_row_tile(params.batch, number, Kernel::kRows, work)) return;

  const int part = threadIdx.x / kWarpgroup;
  const int thread = threadIdx.x % kWarpgroup;
  const float factor = static_cast<float>(params.alpha) * Kernel::uniform_scale(params);
  Tensor dq = partition_fragment_C(typename Kernel::DqMma{},
                                   Shape<Int<kWarpgroupRows>, Int<Dq::kColumns>>{});
#pragma unroll
  for (int piece = 0; piece < Dq::kPieces; ++piece) {
    const float* from =
        sums + int64_t{blockIdx.x} * Dq::kSize + piece * Dq::kPieceSize + thread * 4;
#pragma unroll
    for (int n = 0; n < Dq::kPieceValues; n += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + Dq::offset(part, n));
      const int first = piece * Dq::kPieceValues + n;
      dq(first) = four.x * factor;
      dq(first + 1) = four.y * factor;
      dq(first + 2) = four.z * factor;
      dq(first + 3) = four.w * factor;
    }
  }
  const int first = work.tile * Kernel::kRows;
  store_sum<typename Kernel::Element, Dq::kColumns>(
      dq, params.dq, head, work.sequence.q_begin + first, work.sequence.q_len - first,
      part * Dq::kColumns);
}

}  // namespace hstu::sm90
