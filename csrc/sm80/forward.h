// The fused forward: O = (M * silu(alpha * (Q K^T + bias)) * scale) V.
//
// A work tile is a tile of rows of one head. Its Q stays in shared memory. Tiles of K and V are
// double-buffered, so that one __syncthreads() per tile is enough. Scores and P never leave the
// registers.
#pragma once

#include "../common/activation.h"
#include "../common/launch.h"
#include "../common/zero.h"
#include "bias.h"
#include "relative_bias.h"
#include "tile_config.h"

namespace hstu::sm80 {

template <int kHeadDim, typename Element, Tiling kTiling, ScoreBias kBias,
          KeySource kSource = KeySource::kPacked>
struct Forward {
  static constexpr bool kHasDenseBias = kBias == ScoreBias::kDense;
  static constexpr bool kHasRelativeBias = kBias == ScoreBias::kRelative;
  static constexpr ForwardTiles kTiles =
      forward_tiles<kHeadDim, kTiling, kBias != ScoreBias::kNone>();
  static constexpr int kRows = kTiles.rows;
  static constexpr int kKeys = kTiles.keys;
  static constexpr int kThreads = kTiles.warps * 32;
  static constexpr int kBlocksPerSm = kTiles.blocks_per_sm;
  static constexpr bool kBeginsUnlisted = false;
  static constexpr bool kWaitsForMemory = false;
  static constexpr bool kFollowsQuantization = false;
  static constexpr bool kIsShort = is_for_short_sequences(kTiling);
  // Looks up the mask of a tile while the tile is copied.
  static constexpr bool kMasksEarly = kIsShort;
  static_assert(!kMasksEarly || kKeys <= 64, "a word has a bit for each key");
  // K and V are double-buffered, unless one tile has all keys.
  static constexpr int kStages = kIsShort && kTiling != Tiling::kUpTo512 ? 1 : 2;

  using Order = std::conditional_t<kHasRelativeBias, NaturalOrder, KeyOrder<32>>;
  using RowMma = Mma<Element, kTiles.warps, 1>;
  using Tile = ScoreTile<kRows, kKeys, RowMma, Order>;
  using Out = typename RowMma::template Sum<kRows, kHeadDim>;
  static constexpr bool kIsPaged = kSource == KeySource::kPaged;
  using KeyRows = std::conditional_t<kIsPaged, PagedRows<Element>, HeadRows<Element>>;
  using HeadBias = std::conditional_t<kHasRelativeBias, RelativeMatrix, BiasMatrix>;
  using Queue = std::conditional_t<kIsShort, SequenceQueue<kRows, /*kByKeys=*/false>, WorkQueue>;

  struct SharedMemory {
    // Q during the main loop, then O: each warp overwrites only its own rows.
    alignas(128) Element q[kRows * kHeadDim];
    alignas(128) Element k[kStages][kKeys * kHeadDim];
    alignas(128) Element v[kStages][kKeys * kHeadDim];
    KeyRows k_rows;
    KeyRows v_rows;
    HeadBias bias;
    TileMap map;
    typename Queue::SharedMemory queue;
  };
  static_assert(kBlocksPerSm * (sizeof(SharedMemory) + kReservedMemory) <= 228 * 1024,
                "the blocks that registers allow find room on compute capability 9.0");
  static_assert(kTiling != Tiling::kSmallMemory || sizeof(SharedMemory) <= kSmallMemory,
                "the small form fits on every GPU");

  static HSTU_DEVICE void run(const ForwardParams& params, const WorkList& list,
                              SharedMemory& smem) {
    Queue queue = make_queue(params, list, smem);
    while (queue.has_work()) {
      row_tile(params, list, queue, smem);
      queue.advance();
    }
    if constexpr (kIsShort) {
      // The blocks of the first head zero the rows between sequences.
      if (queue.index_in_tile() == 0 && threadIdx.x < 32) {
        zero_unowned_rows<RowsOf::kQueries>(params.batch, params.out, params.heads,
                                            blockIdx.x + gridDim.x * blockIdx.z,
                                            gridDim.x * gridDim.z);
      }
    } else if (!list.tiles) {  // no prepare_scheduler() has zeroed these rows
      constexpr int kWarps = kThreads / 32;
      const int warp = blockIdx.x * kWarps + static_cast<int>(threadIdx.x) / 32;
      zero_unowned_rows<RowsOf::kQueries>(params.batch, params.out, params.heads, warp,
                                          gridDim.x * kWarps);
    }
  }

 private:
  static HSTU_DEVICE Queue make_queue(const ForwardParams& params, const WorkList& list,
                                      SharedMemory& smem) {
    if constexpr (kIsShort) {
      return Queue(smem.queue, params.batch);
    } else {
      return Queue(list, smem.queue, params.batch, kRows);
    }
  }

  static HSTU_DEVICE void row_tile(const ForwardParams& params, const WorkList& list, Queue& queue,
                                   SharedMemory& smem) {
    // NOTE: `work` refers to shared memory, to leave the registers to the accumulators.
    const SequenceTile& work = queue.tile();
    const Sequence& sequence = work.sequence;
    const int head = queue.index_in_tile();
    const int r0 = work.index * kRows;

    const auto copy_keys = [&](const KeyRows& k_rows, const KeyRows& v_rows, int tile, int stage) {
      copy_rows_async<kKeys, kHeadDim, kThreads, Order, kTiles.reading.hides_thread>(
          k_rows, tile * kKeys, smem.k[stage]);
      copy_rows_async<kKeys, kHeadDim, kThreads, Order, kTiles.reading.hides_thread>(
          v_rows, tile * kKeys, smem.v[stage]);
      ptx::cp_async_commit();
    };
    const auto copy_q = [&] {
      const HeadRows<Element> q_rows(params.q, sequence.q_begin, sequence.q_len, head);
      copy_rows_async<kRows, kHeadDim, kThreads, NaturalOrder, kTiles.reading.hides_thread>(
          q_rows, r0, smem.q);
    };
    const int key_tiles = ceil_div(sequence.k_len, kKeys);
    // Short sequences copy the keys that most masks need first before any tile is classified.
    const int diagonal_tile = min((r0 + kRows - 1 + sequence.offset) / kKeys, key_tiles - 1);
    if constexpr (kIsShort) {
      copy_q();
      copy_keys({params.k, sequence.k_begin, sequence.k_len, head},
                {params.v, sequence.k_begin, sequence.k_len, head}, diagonal_tile, 0);
    }
    constexpr int kDescribingThread = kThreads > 32 ? 32 : 0;  // warp 0 fills the map
    if (threadIdx.x == kDescribingThread) {
      if constexpr (kIsPaged) {
        smem.k_rows = {params.paged, PagePart::kKeys,     params.k,
                       sequence,     work.sequence_index, head};
        smem.v_rows = {params.paged, PagePart::kValues,   params.v,
                       sequence,     work.sequence_index, head};
      } else {
        smem.k_rows = {params.k, sequence.k_begin, sequence.k_len, head};
        smem.v_rows = {params.v, sequence.k_begin, sequence.k_len, head};
      }
      if constexpr (kHasRelativeBias) {
        smem.bias = {params.relative_bias, sequence, work.sequence_index, head, params.heads};
      } else {
        smem.bias = {params.rab, work.sequence_index, head, params.heads};
      }
    }
    if (threadIdx.x == 0) smem.map.count = key_tiles;
    smem.map.fill(key_tiles, threadIdx.x, kThreads, [&](int n) {
      // A mask given row by row has no summaries without a list. A single tile of keys is not
      // classified, because that would be work before the block's first product.
      if (kIsShort && (key_tiles == 1 || is_given_by_row(params.mask))) return TileKind::kPartial;
      const TileKind kind = list.classify<kRows, kKeys>(params.mask, work, head, work.index, n);
      if constexpr (kHasRelativeBias) {
        return RelativeTile<Tile>::kind_with_bias(kind, sequence, r0, n * kKeys);
      }
      return kind;
    });
    __syncthreads();

    int tile = smem.map.last();
    if constexpr (!kIsShort) {
      if (tile >= 0) {
        copy_q();
        copy_keys(smem.k_rows, smem.v_rows, tile, 0);
      }
    } else if (tile != diagonal_tile) {
      ptx::cp_async_wait_all();
      if (tile >= 0) copy_keys(smem.k_rows, smem.v_rows, tile, 0);
      __syncthreads();  // Q has arrived, before O overwrites it
    }
    queue.request_next();
    const auto smem_q = rows_tile<kRows, kHeadDim>(smem.q);
    LeftOperand<Out::kRowBlocks, kHeadDim / 16> registers_q;
    if constexpr (kTiles.keeps_q) {
      ptx::cp_async_wait_all();
      __syncthreads();
      load_left_operand<RowMma, Operand::kRows>(smem_q, registers_q);
    }
    const float half_alpha = 0.5f * static_cast<float>(params.alpha);
    Out out = {};
    constexpr int kNextStage = kStages - 1;
    for (int stage = 0; tile >= 0; stage ^= kNextStage) {
      const int k0 = tile * kKeys;

      // S = Q K^T + bias
      typename Tile::Sum scores = {};
      auto bias = bias_of_tile(params, sequence, r0, k0, smem);
      if constexpr (kHasDenseBias) bias.fetch(r0, k0);
      const int next = smem.map.before(tile);
      if constexpr (kBias != ScoreBias::kNone) {
        if (next >= 0) bias.prefetch(r0, next * kKeys);
      }
      [[maybe_unused]] TimeBlock block;
      if constexpr (kHasRelativeBias) {
        block = bias.start(params.mask, head, smem.map.has_partial(tile), scores);
      }
      const auto find_visible = [&](int word) {
        const Mask mask(params.mask, sequence, head);
        return Tile{}.visible_keys(mask, sequence.q_len, r0, k0, word);
      };
      uint64_t visible = 0;
      if (kMasksEarly && smem.map.has_partial(tile)) visible = find_visible(0);
      ptx::cp_async_wait_all();
      __syncthreads();  // this stage has been filled, and the other one has been read
      if (kStages == 2 && next >= 0) copy_keys(smem.k_rows, smem.v_rows, next, stage ^ 1);
      if constexpr (kHasDenseBias) bias.copy_to(scores);
      const auto smem_k = rows_tile<kKeys, kHeadDim>(smem.k[stage]);
      if constexpr (kTiles.keeps_q) {
        gemm_registers<RowMma, Operand::kRows, kTiles.reading>(scores, registers_q, smem_k);
      } else {
        gemm<RowMma, Operand::kRows, Operand::kRows, kTiles.reading>(scores, smem_q, smem_k);
      }

      if constexpr (kHasRelativeBias) bias.scale(half_alpha, block, scores);

      // P = M * silu(alpha * S)
#pragma unroll
      for (float& score : scores.values) {
        const float x = kHasRelativeBias ? score : half_alpha * score;
        score = silu_of_half(x, ptx::tanh_approx(x));
      }
      if (smem.map.has_partial(tile)) {
        Tile{}.for_each_hidden([&](int word) { return kMasksEarly ? visible : find_visible(word); },
                               [&](int m, int n) { scores.at(m, n) = 0.0f; });
      }

      // O += P V
      gemm_registers<RowMma, Operand::kTransposed, kTiles.reading>(
          out, as_left_operand<Element>(scores), rows_tile<kKeys, kHeadDim>(smem.v[stage]));
      if constexpr (kStages == 1) {
        __syncthreads();  // K and V have been read
        if (next >= 0) copy_keys(smem.k_rows, smem.v_rows, next, 0);
      }
      tile = next;
    }
    queue.fetch_next();
    store_out(params, sequence, r0, head, out, smem);
  }

  static HSTU_DEVICE auto bias_of_tile(const ForwardParams& params, const Sequence& sequence,
                                       int r0, int k0, const SharedMemory& smem) {
    if constexpr (kHasRelativeBias) {
      return RelativeTile<Tile>(params.relative_bias, smem.bias, sequence, r0, k0);
    } else {
      return BiasTile<Element, Tile>(smem.bias, sequence);
    }
  }

  // O = scale * O, rounded once
  static HSTU_DEVICE void store_out(const ForwardParams& params, const Sequence& sequence, int r0,
                                    int head, Out& out, SharedMemory& smem) {
    const Tile tile;  // a thread has the same rows of O and of the scores
    float scale = static_cast<float>(params.scale);
    if (params.attn_scale) scale = params.attn_scale[0];
#pragma unroll
    for (int m = 0; m < Out::kRows; ++m) {
      const int row = r0 + tile.first_row + tile.row_offset(m);
      if (params.attn_scale_per_row && row < sequence.q_len) {
        scale = params.attn_scale[sequence.q_begin + row];
      }
#pragma unroll
      for (int n = 0; n < Out::kColumns; ++n) out.at(m, n) *= scale;
    }
    __syncwarp();  // all lanes have read the warp's rows of Q
    to_smem<RowMma, kRows, kHeadDim>(out, smem.q);
    __syncthreads();
    store_rows<kRows, kHeadDim, kThreads, NaturalOrder>(smem.q, params.out, sequence.q_begin + r0,
                                                        sequence.q_len - r0, head);
  }
};

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocksPerSm)
    run_forward(const __grid_constant__ ForwardParams params, const WorkList list) {
  wait_for_previous_kernel();
  extern __shared__ __align__(128) char smem[];
  Kernel::run(params, list, *reinterpret_cast<typename Kernel::SharedMemory*>(smem));
}

}  // namespace hstu::sm80
