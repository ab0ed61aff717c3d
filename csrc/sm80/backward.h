// The fused backward: it recomputes the scores and computes dQ, dK, dV and the gradients of the
// bias in one pass.
//
// A work tile is a tile of keys of one head. If the bias has a gradient, a work tile is a tile of
// keys of all heads that share a bias head: the heads are processed one after another, so that one
// thread sums each element of the gradient. dK and dV stay in registers. Each tile of rows adds its
// part of dQ to an fp32 accumulator in device memory, which convert_dq scales and rounds.
#pragma once

#include "../common/activation.h"
#include "../common/launch.h"
#include "../common/zero.h"
#include "bias.h"
#include "diagonal_sums.h"
#include "dq_sums.h"
#include "relative_bias.h"
#include "tile_config.h"
#include "time_sums.h"

namespace hstu::sm80 {

// The workspace of a backward call.
struct BackwardBuffers {
  WorkList list;
  int heads_per_work_tile;
  float* dq;              // [row tiles, H, rows * head dim] in the order of DeviceSum; zeroed.
                          // Short sequences: not zeroed, null if each has one tile of keys, and in
                          // a cluster with ClusterSums::places() for each row tile and head
  TileSpans* dq_writers;  // [row tiles]: the key tiles that add to the tile's dQ; null: any order
  int* dq_semaphore;      // [row tiles, H]: how many key tiles have added; zeroed; null: any order
  DenseBias drab;         // where dS is summed over heads: fp32 workspace, or params.drab
  TableSums sums;         // for the gradients of a relative bias's tables; zeroed
};

template <int kHeadDim_, typename Element_, Tiling kTiling, ScoreBias kBias, bool kIsDeterministic>
struct Backward {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kHasDenseBias = kBias == ScoreBias::kDense;
  static constexpr bool kHasRelativeBias = kBias == ScoreBias::kRelative;
  static constexpr BackwardTiles kTiles = backward_tiles<kHeadDim, kTiling, kIsDeterministic>();
  static constexpr int kRows = kTiles.rows;
  static constexpr int kKeys = kTiles.keys;
  static constexpr int kWarps = kTiles.warps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kStages = kTiles.stages;
  static constexpr int kBlocksPerSm = kTiles.blocks_per_sm;
  // For short sequences, this kernel stores dQ itself, without convert_dq().
  static constexpr bool kIsShort = is_for_short_sequences(kTiling);
  // Looks up the mask of a tile while the tile is copied, where registers can keep it.
  static constexpr bool kMasksEarly = kIsShort && kHeadDim != 128;
  static_assert(!kMasksEarly || kKeys <= 64, "a word has a bit for each key");
  // The blocks of a sequence and head are a cluster.
  static constexpr bool kIsClusterOfSequence = kTiling == Tiling::kCluster;

  // How the product for dQ reads its operands. With a relative bias, head dim 256 would spill if
  // more copies were in flight.
  static constexpr Reading kRowReading =
      kHasRelativeBias && kHeadDim == 256 ? Reading{1, true} : kTiles.reading;

  // Keeps sums of dS by time from one row tile to the next. A deterministic backward for head dim
  // 64 has too few registers for it.
  static constexpr bool kKeepsTimeSums = !(kIsDeterministic && kHeadDim == 64);

  static constexpr int kScoreKeyWarps = kWarps / kTiles.score_row_warps;
  static constexpr int kGroup = kKeys / kScoreKeyWarps < 32 ? 16 : 32;
  using Order = std::conditional_t<kHasRelativeBias, NaturalOrder, KeyOrder<kGroup>>;
  using ScoreMma =
      Mma<Element, kTiles.score_row_warps, kScoreKeyWarps, kScoreKeyWarps == 1 ? 16 : kGroup>;
  using KeyMma = Mma<Element, kTiles.key_warps, kWarps / kTiles.key_warps>;
  using RowMma = Mma<Element, kTiles.row_warps, kWarps / kTiles.row_warps>;
  using Tile = ScoreTile<kRows, kKeys, ScoreMma, Order>;
  using KeySum = typename KeyMma::template Sum<kKeys, kHeadDim>;
  using RowSum = typename RowMma::template Sum<kRows, kHeadDim>;
  using Diagonals = DiagonalSums<kRows, kKeys, kWarps, ScoreMma>;
  using Times = TimeSums<Tile, ScoreMma>;
  using ClusterDq = ClusterSums<kRows * kHeadDim, RowSum, kThreads>;
  using HeadBias = std::conditional_t<kHasRelativeBias, RelativeMatrix, BiasMatrix>;
  using HeadDrab = std::conditional_t<kHasRelativeBias, ZeroChunk, BiasMatrix>;
  using Queue =
      std::conditional_t<kIsShort, SequenceQueue<kKeys, /*kByKeys=*/true, kIsClusterOfSequence>,
                         WorkQueue>;

  struct SharedMemory {
    alignas(128) Element k[kKeys * kHeadDim];  // stages dK after the main loop
    alignas(128) Element v[kKeys * kHeadDim];  // stages dV after the main loop
    alignas(128) Element q[kStages][kRows * kHeadDim];
    alignas(128) Element dout[kStages][kRows * kHeadDim];
    alignas(128) Element p[kRows * kKeys];
    alignas(128) Element ds[kRows * kKeys];
    alignas(128) Element dq[kIsShort ? kRows * kHeadDim : 1];
    HeadRows<Element> q_rows;
    HeadRows<Element> dout_rows;
    HeadBias bias;
    HeadDrab drab;
    TileMap map;
    int64_t first_row_tile;
    TileSpans dq_writers[kStages];  // of the row tile in each stage
    // The dQ that this block added to last, whose dq_semaphore it has yet to release; -1: none.
    int64_t last_dq;
    typename ClusterDq::SharedMemory cluster_dq;
    typename Queue::SharedMemory queue;
  };
  static_assert(kBlocksPerSm * (sizeof(SharedMemory) + kReservedMemory) <= 228 * 1024,
                "the blocks that registers allow find room on compute capability 9.0");
  static_assert(kTiling != Tiling::kSmallMemory || sizeof(SharedMemory) <= kSmallMemory,
                "the small form fits on every GPU");
  static_assert(kWarps > 1, "warp 0 fills the map while warp 1 describes the work tile");

  // The blocks for which __launch_bounds__ leaves registers. Compute capability 8.0 has 164 KB of
  // shared memory, in which fewer of some forms find room.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kBlocksByMemory = 164 * 1024 / (sizeof(SharedMemory) + kReservedMemory);
  static constexpr int kBoundedBlocks = kBlocksByMemory < 1              ? 1
                                        : kBlocksByMemory < kBlocksPerSm ? kBlocksByMemory
                                                                         : kBlocksPerSm;
#else
  static constexpr int kBoundedBlocks = kBlocksPerSm;
#endif

  static HSTU_DEVICE void run(const BackwardParams& params, const BackwardBuffers& buffers,
                              SharedMemory& smem) {
    Queue queue = make_queue(params, buffers, smem);
    if constexpr (kIsClusterOfSequence) {
      if (gridDim.z > 1) ClusterDq::template start<kKeys>(queue, smem.cluster_dq);
    }
    while (queue.has_work()) {
      for (int head = queue.index_in_tile() * buffers.heads_per_work_tile;; ++head) {
        key_tile(params, buffers, queue, head, smem);
        if (is_last_head(buffers, queue, head)) break;
        __syncthreads();  // dK and dV have been copied from shared memory
      }
      queue.advance();
    }
    if constexpr (kIsShort) {
      // The first head's block zeroes the rows in front of its sequence.
      if (queue.index_in_tile() == 0 && blockIdx.z == 0 && threadIdx.x < 32) {
        const int b = queue.tile().sequence_index;
        const BatchParams& batch = params.batch;
        zero_unowned_rows<RowsOf::kQueries>(batch, params.dq, params.heads, b, batch.batch);
        zero_unowned_rows<RowsOf::kKeys>(batch, params.dk, params.heads, b, batch.batch);
        zero_unowned_rows<RowsOf::kKeys>(batch, params.dv, params.heads, b, batch.batch);
      }
    }
  }

 private:
  static HSTU_DEVICE Queue make_queue(const BackwardParams& params, const BackwardBuffers& buffers,
                                      SharedMemory& smem) {
    if constexpr (kIsShort) {
      return Queue(smem.queue, params.batch);
    } else {
      return Queue(buffers.list, smem.queue);
    }
  }

  static HSTU_DEVICE bool is_last_head(const BackwardBuffers& buffers, const Queue& queue,
                                       int head) {
    return head + 1 == (queue.index_in_tile() + 1) * buffers.heads_per_work_tile;
  }

  // Writes to shared memory what all threads read of the sequence and the head.
  static HSTU_DEVICE void describe(const BackwardParams& params, const BackwardBuffers& buffers,
                                   const SequenceTile& work, int head, SharedMemory& smem) {
    const Sequence& sequence = work.sequence;
    smem.last_dq = -1;
    smem.cluster_dq.stored = -1;
    smem.first_row_tile = first_tile(sequence.q_begin, work.sequence_index, kRows);
    smem.q_rows = {params.q, sequence.q_begin, sequence.q_len, head};
    smem.dout_rows = {params.dout, sequence.q_begin, sequence.q_len, head};
    if constexpr (kHasRelativeBias) {
      smem.bias = {params.relative_bias, sequence, work.sequence_index, head, params.heads};
      smem.drab = {};
    } else {
      smem.bias = {params.rab, work.sequence_index, head, params.heads};
      smem.drab = {buffers.drab, work.sequence_index, head, params.heads};
    }
  }

  // True if the block of this tile of keys stores dQ of row tile m.
  static HSTU_DEVICE bool stores_dq(const Queue& queue, int m) {
    return queue.tile().index == (queue.is_shared() ? m : 0);
  }

  // The row tile that follows row tile m, from the last one to the first; a block of a cluster
  // processes its own one last. -1: there is none.
  static HSTU_DEVICE int row_tile_after(const Queue& queue, int m, const TileMap& map) {
    if (!queue.is_shared()) return map.before(m);
    const int own = queue.tile().index;
    if (m == own && own < map.count) return -1;
    int before = map.before(m);
    if (before == own) before = map.before(own);
    return before < 0 && own < map.count ? own : before;
  }

  // Classifies the row tiles.
  static HSTU_DEVICE void fill_map(const BackwardParams& params, const BackwardBuffers& buffers,
                                   const Queue& queue, int head, SharedMemory& smem) {
    const SequenceTile& work = queue.tile();
    const Sequence& sequence = work.sequence;
    const int row_tiles = ceil_div(sequence.q_len, kRows);
    if (threadIdx.x == 0) smem.map.count = row_tiles;
    smem.map.fill(row_tiles, threadIdx.x, kThreads, [&](int m) {
      if constexpr (kIsDeterministic) {
        const int64_t first = first_tile(sequence.q_begin, work.sequence_index, kRows);
        if (!buffers.dq_writers[first + m].contains(work.index)) return TileKind::kEmpty;
      }
      // A mask given row by row has no summaries without a list. A single tile of keys is not
      // classified, because that would be work before the block's first product.
      if (kIsShort && (sequence.k_len <= kKeys || is_given_by_row(params.mask))) {
        return TileKind::kPartial;
      }
      const TileKind kind =
          buffers.list.classify<kRows, kKeys>(params.mask, work, head, m, work.index);
      // The block that stores dQ of a row also does so if the row sees no key.
      if (kIsShort && stores_dq(queue, m) && kind == TileKind::kEmpty) return TileKind::kPartial;
      if (kIsDeterministic && kind == TileKind::kEmpty) return TileKind::kPartial;
      if constexpr (kHasRelativeBias) {
        return RelativeTile<Tile>::kind_with_bias(kind, sequence, m * kRows, work.index * kKeys);
      }
      return kind;
    });
  }

  static HSTU_DEVICE void copy_row_tile(const HeadRows<Element>& q, const HeadRows<Element>& dout,
                                        int row_tile, int stage, SharedMemory& smem) {
    const int r0 = row_tile * kRows;
    copy_rows_async<kRows, kHeadDim, kThreads, NaturalOrder, kTiles.reading.hides_thread>(
        q, r0, smem.q[stage]);
    copy_rows_async<kRows, kHeadDim, kThreads, NaturalOrder, kTiles.reading.hides_thread>(
        dout, r0, smem.dout[stage]);
  }

  static HSTU_DEVICE void key_tile(const BackwardParams& params, const BackwardBuffers& buffers,
                                   Queue& queue, int head, SharedMemory& smem) {
    // NOTE: `work` refers to shared memory, to leave the registers to the accumulators.
    const SequenceTile& work = queue.tile();
    const Sequence& sequence = work.sequence;
    const int k0 = work.index * kKeys;
    const auto copy_keys = [&] {
      const HeadRows<Element> k_rows(params.k, sequence.k_begin, sequence.k_len, head);
      const HeadRows<Element> v_rows(params.v, sequence.k_begin, sequence.k_len, head);
      copy_rows_async<kKeys, kHeadDim, kThreads, Order, kTiles.reading.hides_thread>(k_rows, k0,
                                                                                     smem.k);
      copy_rows_async<kKeys, kHeadDim, kThreads, Order, kTiles.reading.hides_thread>(v_rows, k0,
                                                                                     smem.v);
    };
    // Short sequences copy the row tile that most masks need first before tiles are classified.
    const auto last_row_tile = [&] { return max(ceil_div(sequence.q_len, kRows) - 1, 0); };
    if constexpr (kIsShort) {
      copy_keys();
      copy_row_tile(HeadRows<Element>(params.q, sequence.q_begin, sequence.q_len, head),
                    HeadRows<Element>(params.dout, sequence.q_begin, sequence.q_len, head),
                    last_row_tile(), 0, smem);
      ptx::cp_async_commit();
    }
    if (threadIdx.x == 32) describe(params, buffers, work, head, smem);
    fill_map(params, buffers, queue, head, smem);
    __syncthreads();
    if constexpr (kIsClusterOfSequence) {
      if (queue.is_shared()) ClusterDq::hand_over_nothing(work.index, smem.map, smem.cluster_dq);
    }

    const auto copy_rows = [&](int row_tile, int stage) {
      copy_row_tile(smem.q_rows, smem.dout_rows, row_tile, stage, smem);
      if (kIsDeterministic && threadIdx.x == 0) {
        ptx::cp_async_16(buffers.dq_writers + smem.first_row_tile + row_tile,
                         &smem.dq_writers[stage]);
      }
      ptx::cp_async_commit();
    };
    int row_tile = row_tile_after(queue, smem.map.count, smem.map);
    if (row_tile >= 0 && !(kIsShort && row_tile == last_row_tile())) {
      if (!kIsShort) copy_keys();
      if (kIsShort) ptx::cp_async_wait_all();  // the other row tile is no longer being copied
      copy_rows(row_tile, 0);
    }
    if (is_last_head(buffers, queue, head)) queue.request_next();

    const auto smem_k = rows_tile<kKeys, kHeadDim>(smem.k);
    const auto smem_v = rows_tile<kKeys, kHeadDim>(smem.v);
    const auto smem_p = rows_tile<kRows, kKeys>(smem.p);
    const auto smem_ds = rows_tile<kRows, kKeys>(smem.ds);
    KeySum dk = {};
    KeySum dv = {};
    const auto dq_index = [&](int row_tile) {
      return (smem.first_row_tile + row_tile) * params.heads + head;
    };
    // NOTE: short sequences load k0 again where a register would keep it and spill.
    const auto first_key = [&] { return kIsShort ? *opaque_pointer(&work.index) * kKeys : k0; };
    [[maybe_unused]] typename Times::Kept time_sums;
    const int next_stage = kStages - 1;
    for (int stage = 0; row_tile >= 0; stage ^= next_stage) {
      const int r0 = row_tile * kRows;
      int semaphore = 0;  // loaded early: its latency is hidden by the products for S and dP
      if (kIsDeterministic && threadIdx.x == 0) {
        semaphore = ptx::ld_relaxed(buffers.dq_semaphore + dq_index(row_tile));
      }

      const auto smem_q = rows_tile<kRows, kHeadDim>(smem.q[stage]);
      const auto smem_dout = rows_tile<kRows, kHeadDim>(smem.dout[stage]);

      // S = Q K^T + bias
      typename Tile::Sum scores = {};
      auto bias = bias_of_tile(params, sequence, r0, k0, smem);
      if constexpr (kHasDenseBias) bias.fetch(r0, k0);
      const int next = row_tile_after(queue, row_tile, smem.map);
      [[maybe_unused]] TimeBlock block;
      if constexpr (kHasRelativeBias) {
        block = bias.start(params.mask, head, smem.map.has_partial(row_tile), scores);
      }
      const auto find_visible = [&](int word) {
        const Mask mask(params.mask, sequence, head);
        return Tile{}.visible_keys(mask, sequence.q_len, r0, first_key(), word);
      };
      uint64_t visible = 0;
      if (kMasksEarly && smem.map.has_partial(row_tile)) visible = find_visible(0);
      ptx::cp_async_wait_all();
      __syncthreads();  // this stage has been filled; the other stage, P and dS have been read
      if (kStages == 2 && next >= 0) copy_rows(next, stage ^ 1);
      if constexpr (kHasDenseBias) bias.copy_to(scores);
      gemm<ScoreMma, Operand::kRows, Operand::kRows, kTiles.reading>(scores, smem_q, smem_k);
      if constexpr (kHasRelativeBias) {
        bias.scale(0.5f * static_cast<float>(params.alpha), block, scores);
      }

      if constexpr (kBias != ScoreBias::kNone) {
        if (next >= 0) bias.prefetch(next * kRows, kIsClusterOfSequence ? k0 : first_key());
      }
      if (kIsDeterministic && threadIdx.x == 0) {
        release_dq_semaphore(buffers, smem, dq_index(row_tile));
      }
      // dP = dO V^T
      typename Tile::Sum gradients = {};
      gemm<ScoreMma, Operand::kRows, Operand::kRows, kTiles.reading>(gradients, smem_dout, smem_v);

      // P = M * silu(alpha * S), dX = M * dP * silu'(alpha * S)
      silu_and_mask(params, r0, smem.map.has_partial(row_tile), sequence, scores, gradients,
                    [&](int word) { return kMasksEarly ? visible : find_visible(word); });
      to_smem<ScoreMma, kRows, kKeys>(scores, smem.p);
      to_smem<ScoreMma, kRows, kKeys>(gradients, smem.ds);
      if constexpr (kHasRelativeBias) {
        if (buffers.sums.time.words) {
          typename Times::Kept of_tile;
          auto& kept = kKeepsTimeSums ? time_sums : of_tile;
          Times::add(bias, block, gradients, smem.ds, buffers.sums.time, kept);
          if (!kKeepsTimeSums) {
            Times::add_kept(smem.bias.time_entry, buffers.sums.time, true, kept);
          }
        }
      }
      if constexpr (kHasDenseBias) {
        // dRab += alpha * scale * dX. The heads that share a bias head are processed one after
        // another, and the same thread always adds to an element.
        if (smem.drab.data) {
          const float factor = static_cast<float>(params.alpha) * uniform_scale(params);
          const bool is_only_part = params.rab.heads == params.heads;
          add_to_bias<Element>(smem.drab, Tile{}, sequence, r0, first_key(), gradients, factor,
                               is_only_part);
        }
      }
      if (kIsDeterministic && threadIdx.x == 0) {
        wait_for_dq_semaphore(smem.dq_writers[stage], work.index, semaphore,
                              buffers.dq_semaphore + dq_index(row_tile));
      }
      __syncthreads();  // P and dS are written, and thread 0 has waited for dq_semaphore
      // NOTE: earlier, this would wait until the parts of dQ have been written, and would keep the
      // compiler from mixing the products with the activation.
      if (kIsClusterOfSequence && threadIdx.x == 0) {
        ClusterDq::hand_over(queue.tile().index, smem.cluster_dq);
      }

      if constexpr (kHasRelativeBias) {
        if (buffers.sums.position.words) {
          Diagonals::add(smem.ds, smem.drab, k0 - (r0 + sequence.offset), params.relative_bias,
                         smem.bias, buffers.sums.position);
        }
      }
      // dV += P^T dO
      gemm<KeyMma, Operand::kTransposed, Operand::kTransposed, kTiles.reading>(dv, smem_p,
                                                                               smem_dout);
      // dK += dX^T Q
      gemm<KeyMma, Operand::kTransposed, Operand::kTransposed, kTiles.reading>(dk, smem_ds, smem_q);
      if constexpr (kStages == 1) {
        __syncthreads();  // Q and dO have been read
        if (next >= 0) copy_rows(next, 0);
      }
      // dQ += dX K
      RowSum dq = {};
      gemm<RowMma, Operand::kRows, Operand::kTransposed, kRowReading>(dq, smem_ds, smem_k);
      if constexpr (kIsShort) {
        const int places = ClusterDq::places(gridDim.z);
        float* const sums = buffers.dq + dq_index(row_tile) * places * (kRows * kHeadDim);
        if (queue.is_shared() && row_tile != work.index) {
          ClusterDq::store(dq, row_tile, work.index, sums, smem.cluster_dq);
        } else {
          if (queue.is_shared()) {
            ClusterDq::template add_parts<kKeys>(dq, work, sums, smem.cluster_dq);
          } else if (buffers.dq) {
            add_to_total<kThreads, kKeys>(dq, sums, work);
          }
          store_rows_of_dq(params, dq, !buffers.dq, work, r0, head, smem);
        }
      } else {
        DeviceSum<kThreads>::add(dq, buffers.dq + dq_index(row_tile) * (kRows * kHeadDim));
      }
      // NOTE: with a relative bias, no register can keep `next` until here.
      row_tile = kHasRelativeBias && kHeadDim > 32 ? smem.map.before(row_tile) : next;
    }
    if constexpr (kHasRelativeBias) {
      if (kKeepsTimeSums && buffers.sums.time.words) {
        Times::add_kept(smem.bias.time_entry, buffers.sums.time, true, time_sums);
      }
    }

    // dK = alpha * scale * dK and dV = scale * dV, rounded once
    const float scale = uniform_scale(params);
    const float alpha = static_cast<float>(params.alpha);
    if (is_last_head(buffers, queue, head)) queue.fetch_next();
    if (kIsShort) ptx::cp_async_wait_all();  // K and V may not have arrived if no row sees them
    __syncthreads();                         // K and V have been read
    if (kIsClusterOfSequence && threadIdx.x == 0)
      ClusterDq::hand_over(queue.tile().index, smem.cluster_dq);
    if (kIsDeterministic && threadIdx.x == 0) release_dq_semaphore(buffers, smem, -1);
    store_keys(dk, alpha * scale, smem.k, params.dk, work, head);
    store_keys(dv, scale, smem.v, params.dv, work, head);
  }

 public:
  // The scale of all rows; 1 if each row has its own scale.
  static HSTU_DEVICE float uniform_scale(const BackwardParams& params) {
    if (params.attn_scale_per_row) return 1.0f;
    return params.attn_scale ? params.attn_scale[0] : static_cast<float>(params.scale);
  }

 private:
  static HSTU_DEVICE auto bias_of_tile(const BackwardParams& params, const Sequence& sequence,
                                       int r0, int k0, const SharedMemory& smem) {
    if constexpr (kHasRelativeBias) {
      return RelativeTile<Tile>(params.relative_bias, smem.bias, sequence, r0, k0);
    } else {
      return BiasTile<Element, Tile>(smem.bias, sequence);
    }
  }

  // Turns p from S (alpha / 2 * S with a relative bias) into P, and dx from dP into dX.
  template <typename Visible>
  static HSTU_DEVICE void silu_and_mask(const BackwardParams& params, int r0, bool is_partial,
                                        const Sequence& sequence, typename Tile::Sum& p,
                                        typename Tile::Sum& dx, Visible visible) {
    const float half_alpha = 0.5f * static_cast<float>(params.alpha);
#pragma unroll
    for (int n = 0; n < Tile::Sum::kCount; ++n) {
      const float x = kHasRelativeBias ? p.values[n] : half_alpha * p.values[n];
      const float t = ptx::tanh_approx(x);
      p.values[n] = silu_of_half(x, t);
      dx.values[n] *= silu_derivative_of_half(x, t);
    }
    const Tile tile;
    if (is_partial) {
      tile.for_each_hidden(visible, [&](int m, int n) {
        p.at(m, n) = 0.0f;
        dx.at(m, n) = 0.0f;
      });
    }
    if (params.attn_scale_per_row) {
#pragma unroll
      for (int m = 0; m < Tile::kThreadRows; ++m) {
        const int row = r0 + tile.first_row + Tile::row_offset(m);
        const float scale = row < sequence.q_len ? params.attn_scale[sequence.q_begin + row] : 0.0f;
#pragma unroll
        for (int n = 0; n < Tile::kThreadColumns; ++n) {
          p.at(m, n) *= scale;
          dx.at(m, n) *= scale;
        }
      }
    }
  }

  // A deterministic backward adds the key tiles to a dQ in ascending order: dq_semaphore counts the
  // key tiles that have added. A block releases it in the step after its addition, when the sums
  // have had time to arrive.

  // NOTE: the fence orders the additions of all threads before the last barrier, and this thread's
  // read of the next dq_semaphore, before the memory operations that follow.
  static HSTU_DEVICE void release_dq_semaphore(const BackwardBuffers& buffers, SharedMemory& smem,
                                               int64_t next_dq) {
    ptx::fence_acq_rel_gpu();
    if (smem.last_dq >= 0) atomicAdd(buffers.dq_semaphore + smem.last_dq, 1);
    smem.last_dq = next_dq;
  }

  // `seen` is an earlier value of `*semaphore`.
  static HSTU_DEVICE void wait_for_dq_semaphore(const TileSpans& spans, int key_tile, int seen,
                                                const int* semaphore) {
    const int before = spans.count_before(key_tile);
    // NOTE: `<` and not `!=`, because sequences with overlapping offsets share a tile.
    while (seen < before) seen = ptx::ld_acquire(semaphore);
  }

  // dQ = alpha * scale * dQ, rounded. If a sequence has several tiles of keys, each of them stores
  // the sum so far. If the sequence is longer than max_seqlen_k says, there is no total: `adds` is
  // true, and later tiles add to the rounded dQ of earlier tiles.
  static HSTU_DEVICE void store_rows_of_dq(const BackwardParams& params, RowSum& dq, bool adds,
                                           const SequenceTile& work, int r0, int head,
                                           SharedMemory& smem) {
    const float factor = static_cast<float>(params.alpha) * uniform_scale(params);
#pragma unroll
    for (float& value : dq.values) value *= factor;
    to_smem<RowMma, kRows, kHeadDim>(dq, smem.dq);
    __syncthreads();
    const int64_t begin = work.sequence.q_begin + r0;
    const int count = work.sequence.q_len - r0;
    if (adds && work.index > 0) {
      add_rows<kRows, kHeadDim, kThreads>(params.dq, begin, count, head, smem.dq);
      __syncthreads();
    }
    store_rows<kRows, kHeadDim, kThreads, NaturalOrder>(smem.dq, params.dq, begin, count, head);
  }

  static HSTU_DEVICE void store_keys(KeySum& sum, float factor, Element* through,
                                     const PackedTensor& tensor, const SequenceTile& work,
                                     int head) {
#pragma unroll
    for (float& value : sum.values) value *= factor;
    to_smem<KeyMma, kKeys, kHeadDim>(sum, through);
    __syncthreads();
    const int k0 = work.index * kKeys;
    store_rows<kKeys, kHeadDim, kThreads, Order>(through, tensor, work.sequence.k_begin + k0,
                                                 work.sequence.k_len - k0, head);
  }
};

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBoundedBlocks)
    run_backward(const __grid_constant__ BackwardParams params,
                 const __grid_constant__ BackwardBuffers buffers) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (Kernel::kIsClusterOfSequence) return;  // never launched
#endif
  wait_for_previous_kernel();
  extern __shared__ __align__(128) char smem[];
  Kernel::run(params, buffers, *reinterpret_cast<typename Kernel::SharedMemory*>(smem));
}

// dQ = alpha * scale * sum, rounded once. A block takes one tile of rows of one head.
template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    convert_dq(const __grid_constant__ BackwardParams params, const float* sums) {
  using Element = typename Kernel::Element;
  constexpr int kRows = Kernel::kRows;
  constexpr int kHeadDim = Kernel::kHeadDim;
  __shared__ alignas(128) Element smem[kRows * kHeadDim];
  wait_for_previous_kernel();
  const int tile_index = blockIdx.x / params.heads;
  const int head = blockIdx.x % params.heads;

  SequenceTile work;
  if (!find_row_tile(params.batch, tile_index, kRows, work)) return;
  const int r0 = work.index * kRows;

  typename Kernel::RowSum dq;
  DeviceSum<Kernel::kThreads>::load(sums + int64_t{blockIdx.x} * (kRows * kHeadDim), dq);
  const float factor = static_cast<float>(params.alpha) * Kernel::uniform_scale(params);
#pragma unroll
  for (float& value : dq.values) value *= factor;
  to_smem<typename Kernel::RowMma, kRows, kHeadDim>(dq, smem);
  __syncthreads();
  store_rows<kRows, kHeadDim, Kernel::kThreads, NaturalOrder>(
      smem, params.dq, work.sequence.q_begin + r0, work.sequence.q_len - r0, head);
}

// Rounds the bias gradient, which has been summed over heads in fp32.
template <typename Element>
__global__ void round_drab(const float* sums, DenseBias drab, int64_t rows) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t b = row / drab.length / drab.heads;
    Element* out = static_cast<Element*>(drab.data) + b * drab.batch_stride +
                   row / drab.length % drab.heads * drab.head_stride +
                   row % drab.length * drab.row_stride;
    for (int j = threadIdx.x; j < drab.length; j += blockDim.x) {
      out[j] = static_cast<Element>(sums[row * drab.length + j]);
    }
  }
}

}  // namespace hstu::sm80
