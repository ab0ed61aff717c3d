// The fused forward: O = (M * silu(alpha * (Q K^T + bias)) * scale) V.
//
// A work item is a tile of rows of one head. Its Q stays in shared memory; K and V tiles come
// through a ring of two stages, so that one barrier a tile is enough. Scores and P never leave the
// registers.
#pragma once

#include "../common/activation.h"
#include "../common/work_list.h"
#include "scores.h"
#include "tile_config.h"

namespace hstu::sm80 {

template <int kHeadDim, typename Element, Memory kMemory, bool kHasBias>
struct Forward {
  static constexpr ForwardTiles kTiles = forward_tiles<kHeadDim, kMemory>();
  static constexpr int kRows = kTiles.rows;
  static constexpr int kKeys = kTiles.keys;
  static constexpr int kThreads = kTiles.warps * 32;
  static constexpr int kBlocksPerSm = kTiles.blocks_per_sm;
  static constexpr int kStages = 2;

  using ForwardMma = Mma<Element, kTiles.warps, 1>;
  using Tile = ScoreTile<kRows, kKeys, ForwardMma>;

  struct SharedMemory {
    alignas(128) Element q[kRows * kHeadDim];  // O in the end: each warp's own rows take their place
    alignas(128) Element k[kStages][kKeys * kHeadDim];
    alignas(128) Element v[kStages][kKeys * kHeadDim];
    // NOTE: what is needed once in a while is read from here, to leave the registers to the sums.
    Sequence sequence;
    WorkTile tile;
    int item;
  };

  static HSTU_DEVICE void run(const ForwardParams& params, const WorkList& list,
                              SharedMemory& shared) {
    const int items = *list.count * params.heads;
    for (;;) {
      __syncthreads();  // the previous item's O has left shared memory
      if (threadIdx.x == 0) {
        shared.item = atomicAdd(list.next, 1);
        if (shared.item < items) {
          shared.tile = list.tiles[shared.item / params.heads];
          shared.sequence = load_sequence(params.batch, shared.tile.sequence);
        }
      }
      __syncthreads();
      if (shared.item >= items) return;
      row_tile(params, shared.item % params.heads, shared.tile.tile * kRows, shared);
    }
  }

 private:
  static HSTU_DEVICE void row_tile(const ForwardParams& params, int head, int r0,
                                   SharedMemory& shared) {
    const Sequence& sequence = shared.sequence;
    const ForwardMma mma;

    const auto copy_keys = [&](int k0, int stage) {
      const int keys = sequence.k_len - k0;
      const int64_t row = sequence.k_begin + k0;
      copy_rows_async<kKeys, kHeadDim, kThreads>(rows_of<const Element>(params.k, row, head),
                                                 params.k.row_stride, keys, params.k.head_dim,
                                                 shared.k[stage]);
      copy_rows_async<kKeys, kHeadDim, kThreads>(rows_of<const Element>(params.v, row, head),
                                                 params.v.row_stride, keys, params.v.head_dim,
                                                 shared.v[stage]);
      commit_copies();
    };
    const auto classify = [&](int n) {
      const int k0 = n * kKeys;
      if (k0 >= sequence.k_len) return TileKind::kEmpty;
      const int r1 = min(r0 + kRows, sequence.q_len);
      const int k1 = min(k0 + kKeys, sequence.k_len);
      return Mask(params.mask, sequence, head).classify(r0, r1, k0, k1);
    };
    TileWalk walk(0, (sequence.k_len + kKeys - 1) / kKeys, classify);

    Tensor out = partition_fragment_C(mma, Shape<Int<kRows>, Int<kHeadDim>>{});
    clear(out);

    bool more = walk.advance();
    if (more) {
      const Element* q = rows_of<const Element>(params.q, sequence.q_begin + r0, head);
      copy_rows_async<kRows, kHeadDim, kThreads>(q, params.q.row_stride, sequence.q_len - r0,
                                                 params.q.head_dim, shared.q);
      copy_keys(walk.tile() * kKeys, 0);
    }
    const auto shared_q = rows_tensor<kRows, kHeadDim>(shared.q);
    const float half_alpha = 0.5f * static_cast<float>(params.alpha);
    for (int stage = 0; more; stage ^= 1) {
      const int k0 = walk.tile() * kKeys;
      const bool is_partial = walk.is_partial();

      // S = Q K^T + bias
      Tensor scores = partition_fragment_C(mma, Shape<Int<kRows>, Int<kKeys>>{});
      if constexpr (kHasBias) {
        BiasView(params.rab, shared.tile.sequence, head, params.heads)
            .template load<Element>(Tile{}, sequence, r0, k0, scores);
      } else {
        clear(scores);
      }
      wait_for_copies();
      __syncthreads();  // the tile is there, and the other stage has been read
      more = walk.advance();
      if (more) copy_keys(walk.tile() * kKeys, stage ^ 1);
      gemm<Operand::kRows, Operand::kRows>(mma, scores, shared_q,
                                           rows_tensor<kKeys, kHeadDim>(shared.k[stage]));

      // P = M * silu(alpha * S)
#pragma unroll
      for (int n = 0; n < size(scores); ++n) {
        const float x = half_alpha * scores(n);
        scores(n) = silu_of_half(x, tanh_approx(x));
      }
      if (is_partial) {
        auto matrix = as_matrix(scores);
        Tile{}.for_each_hidden(Mask(params.mask, sequence, head), sequence.q_len, r0, k0,
                               [&](int m, int n) { matrix(m, n) = 0.0f; });
      }

      // O += P V
      const auto weights = rounded<Element>(scores);
      gemm_registers<Operand::kTransposed>(mma, out, as_left_operand(weights),
                                           transposed_tensor<kKeys, kHeadDim>(shared.v[stage]));
    }
    store_out(params, mma, r0, head, out, shared);
  }

  // O = scale * O, rounded once
  template <typename Out>
  static HSTU_DEVICE void store_out(const ForwardParams& params, ForwardMma mma, int r0, int head,
                                    Out& out, SharedMemory& shared) {
    const Sequence& sequence = shared.sequence;
    const ScoreTile<kRows, kHeadDim, ForwardMma> tile;
    auto matrix = as_matrix(out);
    float scale = static_cast<float>(params.scale);
    if (params.attn_scale) scale = params.attn_scale[0];
#pragma unroll
    for (int m = 0; m < size<0>(matrix); ++m) {
      const int row = r0 + tile.first_row + tile.row_offset(m);
      if (params.attn_scale_per_row && row < sequence.q_len) {
        scale = params.attn_scale[sequence.q_begin + row];
      }
#pragma unroll
      for (int n = 0; n < size<1>(matrix); ++n) matrix(m, n) *= scale;
    }
    to_shared<Element, kRows, kHeadDim>(mma, out, shared.q);
    __syncthreads();
    store_rows<kRows, kHeadDim, kThreads>(
        shared.q, rows_of<Element>(params.out, sequence.q_begin + r0, head), params.out.row_stride,
        sequence.q_len - r0, params.v.head_dim);
  }
};

template <int kHeadDim, typename Element, Memory kMemory, bool kHasBias>
__global__ void __launch_bounds__(Forward<kHeadDim, Element, kMemory, kHasBias>::kThreads,
                                  Forward<kHeadDim, Element, kMemory, kHasBias>::kBlocksPerSm)
    run_forward(const __grid_constant__ ForwardParams params, const WorkList list) {
  using Kernel = Forward<kHeadDim, Element, kMemory, kHasBias>;
  extern __shared__ __align__(128) char shared[];
  Kernel::run(params, list, *reinterpret_cast<typename Kernel::SharedMemory*>(shared));
}

}  // namespace hstu::sm80
