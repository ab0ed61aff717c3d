// The producers of the backward. Warp 0 gets work tiles and copies K and V; warp 1 copies Q, dO and
// the bias; one thread of each of warps 2 and 3 adds dQ to its accumulator.
#pragma once

#include "../common/ptx.h"
#include "../common/zero.h"
#include "backward_traits.h"

namespace hstu::sm90 {

template <typename Traits>
struct BackwardProducers : Traits {
  using typename Traits::BiasState;
  using typename Traits::DoutState;
  using typename Traits::DqState;
  using typename Traits::DsState;
  using typename Traits::Element;
  using typename Traits::KVState;
  using typename Traits::MaskState;
  using typename Traits::PositionWindow;
  using typename Traits::QState;
  using typename Traits::RowTile;
  using typename Traits::SharedMemory;
  using typename Traits::WorkState;
  using typename Traits::WorkTile;
  using Dq = typename Traits::Dq;
  using Traits::kBlockKeys;
  using Traits::kClusterSize;
  using Traits::kColumns;
  using Traits::kHasBias;
  using Traits::kHasDenseBias;
  using Traits::kHeadDim;
  using Traits::kIsCluster;
  using Traits::kIsDeterministic;
  using Traits::kKeys;
  using Traits::kRows;

  static HSTU_DEVICE void run(const BackwardParams& params, const typename Traits::Maps& maps,
                              const BackwardBuffers& buffers, SharedMemory& smem) {
    static_assert(DqState::kStages == 2, "the last two warps add dQ of a stage each");
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp == 0) {
      find_work_tiles(params, maps, buffers, smem);
    } else if (warp == 1) {
      copy_row_tiles(params, maps, buffers, smem);
    } else if (threadIdx.x % 32 == 0) {
      add_dq(params, maps, buffers, smem, warp - 2);
    }
    __syncwarp();  // NOTE: cluster_sync() after this needs converged warps.
  }

 private:
  // Gets work tiles, passes them to the other warps and copies their K and V. If no row sees a key
  // of a work tile, zeroes dK and dV of its keys and does not pass it to the consumers. Called by
  // one warp.
  static HSTU_DEVICE void find_work_tiles(const BackwardParams& params,
                                          const typename Traits::Maps& maps,
                                          const BackwardBuffers& buffers, SharedMemory& smem) {
    const WorkList& list = buffers.list;
    const int lane = static_cast<int>(threadIdx.x);
    if (Traits::stores_ds(params)) {
      uint4* const zeros = reinterpret_cast<uint4*>(smem.zeros);
      for (int n = lane; n < kRows * 64 / 8; n += 32) zeros[n] = uint4{};
      cutlass::arch::fence_view_async_shared();  // before TMA reads the zeros
    }
    WorkState state;
    if (lane == 0) smem.work_index = static_cast<int>(blockIdx.x) / kClusterSize;
    for (PipelineState<1> work_index_state;; work_index_state.advance()) {
      WorkTile& work_tile = smem.work_tiles[state.index()];
      smem.pipeline_work.producer_acquire(state);
      __syncwarp();
      if (lane == 0) {
        if constexpr (kIsCluster) broadcast_work_index(work_index_state, smem);
        const int tile = smem.work_index / list.work_per_tile;
        const bool is_unlisted = Traits::is_unlisted(list);
        const bool exists = is_unlisted ? smem.work_index >= 0 : tile < *list.count;
        work_tile.head = exists ? smem.work_index - tile * list.work_per_tile : -1;
        if (exists) {
          work_tile.bias_head = Traits::Bias::bias_head(params, work_tile.head);
          work_tile.tile = is_unlisted ? unlisted_tile(params, tile) : list.tiles[tile];
          const Sequence& sequence = work_tile.tile.sequence;
          work_tile.map.count = ceil_div(sequence.q_len, kRows);
          work_tile.first_row_tile =
              static_cast<int>(first_tile(sequence.q_begin, work_tile.tile.sequence_index, kRows));
          if constexpr (Traits::kIsE4m3) {
            static_cast<E4m3Factors&>(work_tile) =
                find_factors(maps.descales, sequence, work_tile.tile.sequence_index, work_tile.head,
                             kHeadDim, static_cast<float>(params.alpha));
          }
        }
      }
      __syncwarp();
      if (work_tile.head >= 0) {
        if constexpr (Traits::kStoresDq) {
          for (int n = lane; n < min(work_tile.map.count / 32 + 1, WorkTile::kWords); n += 32) {
            work_tile.earlier[n] = work_tile.later[n] = 0;
          }
          __syncwarp();
        }
        work_tile.map.fill(work_tile.map.count, lane, 32,
                           [&](int m) { return classify(params, buffers, work_tile, m); });
        __syncwarp();
        if (Traits::kStoresDq && work_tile.tile.index == 0) {
          zero_dq_without_keys(params, work_tile);
        }
        if (lane == 0) {
          work_tile.last_row_tile = kIsDeterministic ? work_tile.map.first() : work_tile.map.last();
        }
        __syncwarp();
      }
      if (work_tile.head >= 0 && work_tile.last_row_tile < 0) {
        const Sequence& sequence = work_tile.tile.sequence;
        const int first = Traits::first_key(work_tile);
        const int count = min(kBlockKeys, sequence.k_len - first);
        zero_rows_of_head(params.dk, sequence.k_begin + first, count, work_tile.head);
        zero_rows_of_head(params.dv, sequence.k_begin + first, count, work_tile.head);
        if (lane == 0 && Traits::stores_ds(params)) start_zeroing_unseen(maps, work_tile, smem);
        __syncwarp();
      } else {
        if (lane == 0) smem.pipeline_work.full[state.index()].arrive();
        if (work_tile.head < 0) break;
        if (lane == 0) copy_keys(maps, work_tile, KVState{state.count}, smem);
        if (lane == 0 && Traits::stores_ds(params)) start_zeroing_unseen(maps, work_tile, smem);
        // NOTE: the next work tile is not taken before it is needed, because an idle block could
        // process it in the meantime.
        smem.next_work_wanted.wait(state.count % 2);
        __syncwarp();
        state.advance();
      }
      if (lane == 0 && Traits::rank() == 0) {
        if (Traits::is_unlisted(list)) {
          smem.work_index = unlisted_index_after(smem.work_index, params, list, work_tile);
        } else {
          smem.work_index = reload_grid_dim() / kClusterSize + atomicAdd(list.next, 1);
        }
      }
    }
    if (Traits::stores_ds(params)) cute::tma_store_wait<0>();
  }

  // Zeroes dQ of the tiles of rows that see no key. Called by one warp, with the first tile of
  // keys.
  static HSTU_DEVICE void zero_dq_without_keys(const BackwardParams& params,
                                               const WorkTile& work_tile) {
    const Sequence& sequence = work_tile.tile.sequence;
    for (int m = 0; m < work_tile.map.count; ++m) {
      if (work_tile.map.contains(m) || work_tile.has_later(m)) continue;
      zero_rows_of_head(params.dq, sequence.q_begin + m * kRows,
                        min(kRows, sequence.q_len - m * kRows), work_tile.head);
    }
  }

  // Returns tile `number` of keys where there is no list: the first tiles of all sequences, which
  // most rows of a causal sequence see, then the second ones, and so on. It has no keys if the
  // sequence has fewer tiles, unless dQ of its rows must be stored.
  static HSTU_DEVICE SequenceTile unlisted_tile(const BackwardParams& params, int number) {
    int n = 0;
    for (; number >= params.batch.batch; number -= params.batch.batch) ++n;
    const Sequence sequence = load_sequence(params.batch, number);
    const bool exists = n * kKeys < sequence.k_len || Traits::kStoresDq;
    return exists ? SequenceTile{sequence, number, n} : SequenceTile{};
  }

  // Returns the index of the block's work tile after `work_tile`, which has the index `index`,
  // where there is no list; -1: there is no more work. With list.next, blocks take work tiles when
  // they are done with others. Without it, they take every second one in the opposite order, so
  // that a block with a longer one gets a shorter.
  //
  // NOTE: max_seqlen_k, from which sequence_tiles was computed, may be understated. The block with
  // the last of these tiles of a sequence then takes the tiles behind it.
  static HSTU_DEVICE int unlisted_index_after(int index, const BackwardParams& params,
                                              const WorkList& list, const WorkTile& work_tile) {
    const int next_tile = work_tile.tile.index + 1;
    const int tiles_of_index = params.batch.batch * list.work_per_tile;
    const int end = list.sequence_tiles * tiles_of_index;
    if (next_tile >= list.sequence_tiles && next_tile * kKeys < work_tile.tile.sequence.k_len) {
      return index + tiles_of_index;
    }
    const int blocks = reload_grid_dim() / kClusterSize;
    if (list.next) {
      index = blocks + atomicAdd(list.next, 1);
      return index < end ? index : -1;
    }
    while (index >= end) index -= tiles_of_index;
    const int block = static_cast<int>(blockIdx.x) / kClusterSize;
    const bool is_reversed = index / blocks % 2;
    index += 1 + 2 * (is_reversed ? block : blocks - 1 - block);
    return index < end ? index : -1;
  }

  static HSTU_DEVICE void copy_keys(const typename Traits::Maps& maps, const WorkTile& work_tile,
                                    KVState state, SharedMemory& smem) {
    const Sequence& sequence = work_tile.tile.sequence;
    const RaggedRows rows{sequence.k_begin, sequence.k_len, work_tile.head};
    const int first = Traits::first_key(work_tile);
    smem.pipeline_kv.producer_acquire(state);
    auto& barrier = smem.pipeline_kv.full[state.index()];
    constexpr int kOthers =
        kIsCluster ? kBlockKeys * kColumns : (Traits::kIsE4m3 ? kBlockKeys * kHeadDim : 0);
    barrier.arrive_and_expect_tx((2 * kBlockKeys * kHeadDim + kOthers) * sizeof(Element));
    constexpr bool kIsNarrow = Traits::kIsNarrow;
    start_copy_rows<kBlockKeys, kHeadDim, kBlockKeys, kIsNarrow>(maps.k, rows, first, smem.k,
                                                                 barrier);
    start_copy_rows<kBlockKeys, kHeadDim, kBlockKeys, kIsNarrow>(maps.v, rows, first, smem.v,
                                                                 barrier);
    if constexpr (Traits::kIsE4m3) {
      copy_columns(maps.k_columns, sequence.k_begin, work_tile, first, smem.k_columns, barrier);
    }
    if constexpr (kIsCluster) {
      const int rank = Traits::rank();
      start_copy_rows<kBlockKeys, kColumns>(maps.k, rows, first + (1 - 2 * rank) * kBlockKeys,
                                            smem.other_k, barrier, rank * kColumns);
    }
  }

  // Starts copying the transpose of the rows from `first` on, which are in one block of 128 rows.
  // `begin` is the first row of the sequence.
  static HSTU_DEVICE void copy_columns(const CUtensorMap& map, int64_t begin,
                                       const WorkTile& work_tile, int first, Element* to,
                                       cutlass::arch::ClusterTransactionBarrier& full) {
    constexpr int kBlock = Fp8Params::kBlock;
    const int64_t block = first_tile(begin, work_tile.tile.sequence_index, kBlock) + first / kBlock;
    cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&full),
                                 static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL), to,
                                 first % kBlock, 0, work_tile.head, static_cast<int>(block));
  }

  // The blocks of a cluster have the same work tiles: the first block sends work_index to the
  // other.
  static HSTU_DEVICE void broadcast_work_index(PipelineState<1> state, SharedMemory& smem) {
    auto& pipeline = smem.pipeline_work_index;
    if (Traits::rank() == 0) {
      pipeline.producer_acquire(state);
      cute::store_shared_remote(smem.work_index, cute::cast_smem_ptr_to_uint(&smem.work_index),
                                cute::cast_smem_ptr_to_uint(&pipeline.full[0]), 1);
    } else {
      pipeline.full[0].arrive_and_expect_tx(sizeof(int));
      pipeline.consumer_wait(state);
      pipeline.empty[0].arrive(0u);
    }
  }

  // Classifies the keys of the work tile for tile m of rows.
  static HSTU_DEVICE TileKind classify(const BackwardParams& params, const BackwardBuffers& buffers,
                                       WorkTile& work_tile, int m) {
    const int tile = work_tile.tile.index;
    const int row_tile = work_tile.first_row_tile + m;
    if constexpr (kIsDeterministic) {
      if (!buffers.dq_writers[row_tile].contains(tile)) return TileKind::kEmpty;
    }
    const Sequence& sequence = work_tile.tile.sequence;
    const int k0 = tile * kKeys;
    if (Traits::is_unlisted(buffers.list)) {
      return classify_unlisted(params, work_tile, m, k0);
    }
    const SpanSummary summary = buffers.list.summaries.at(row_tile, work_tile.head);
    const TileKind kind = summary.classify(k0, min(k0 + kKeys, sequence.k_len));
    if (kIsDeterministic && kind == TileKind::kEmpty) return TileKind::kPartial;
    // NOTE: the bias is not zero past the ends of a sequence, so the mask must hide those elements.
    const bool is_cut = (m + 1) * kRows > sequence.q_len || k0 + kKeys > sequence.k_len;
    return kHasBias && is_cut && kind == TileKind::kFull ? TileKind::kPartial : kind;
  }

  // Classifies the keys from k0 on as SpanSummary::classify() does, for masks in closed form. It
  // has two steps, because the producer has too few registers for both results at once. With
  // kStoresDq, sets the bits of WorkTile::earlier and later, which are 0 before.
  static HSTU_DEVICE TileKind classify_unlisted(const BackwardParams& params, WorkTile& work_tile,
                                                int m, int k0) {
    const Sequence& sequence = work_tile.tile.sequence;
    const MaskParams mask = closed_form(params.mask);
    const int r0 = m * kRows;
    const int r1 = min(r0 + kRows, sequence.q_len);
    const int k1 = min(k0 + kKeys, sequence.k_len);
    const KeyIntervals keys = Mask(mask, sequence, 0).kv_intervals(r0, r1);
    bool is_visible = false, has_earlier = false, has_later = false, is_full = false;
    for (int n = 0; n < 2; ++n) {  // unused intervals are empty
      const auto [begin, end] = keys.interval[n];
      is_visible |= begin < k1 && k0 < end;
      has_earlier |= begin < min(end, k0);
      has_later |= max(begin, k1) < min(end, sequence.k_len);
    }
    if (Traits::kStoresDq && has_earlier) atomicOr(&work_tile.earlier[m / 32], 1u << m % 32);
    if (Traits::kStoresDq && has_later) atomicOr(&work_tile.later[m / 32], 1u << m % 32);
    if (!is_visible) return TileKind::kEmpty;
    compiler_barrier();
    Interval full[2];
    Mask(mask, sequence, 0).fully_visible(r0, r1, full);
    for (const Interval& interval : full) is_full |= interval.begin <= k0 && k1 <= interval.end;
    return is_full ? TileKind::kFull : TileKind::kPartial;
  }

  // Called by one warp: copies Q, dO and the bias of each tile of rows, and, if kProducerFindsMask,
  // computes the bits of partial tiles.
  static HSTU_DEVICE void copy_row_tiles(const BackwardParams& params,
                                         const typename Traits::Maps& maps,
                                         const BackwardBuffers& buffers, SharedMemory& smem) {
    constexpr int kTilesAhead = 3;
    const bool copies = threadIdx.x % 32 == 0;
    bool has_told = false;
    QState state;
    MaskState mask_state;
    for_each_row_tile(smem, [&](const WorkTile& work_tile, int m, int next) {
      const int stage = state.index();
      const int first = m * kRows;
      const bool is_partial = work_tile.map.has_partial(m);
      const bool has_earlier = Traits::kStoresDq && work_tile.has_earlier(m);
      const bool has_later = Traits::kStoresDq && work_tile.has_later(m);
      const auto copy_dout = [&] {
        const DoutState dout_state{state.count};
        smem.pipeline_dout.producer_acquire(dout_state);
        if constexpr (Traits::kIsE4m3) {
          auto& full = smem.pipeline_dout.full[dout_state.index()];
          full.expect_transaction(kRows * kHeadDim);
          copy_columns(maps.dout_columns, work_tile.tile.sequence.q_begin, work_tile, first,
                       smem.dout_columns[dout_state.index()], full);
        }
        copy_rows<kRows, kHeadDim, kRows, Traits::kIsNarrow>(
            maps.dout, rows_of(work_tile), first, smem.dout[dout_state.index()],
            smem.pipeline_dout.full[dout_state.index()]);
      };
      auto& q_full = smem.pipeline_q.full[stage];
      smem.pipeline_q.producer_acquire(state);
      if (copies) {
        smem.row_tiles[stage] = {
            first | (is_partial ? RowTile::kPartial : 0) | (next < 0 ? RowTile::kLast : 0) |
            (has_earlier ? RowTile::kHasEarlier : 0) | (has_later ? RowTile::kHasLater : 0)};
        q_full.expect_transaction(kRows * kHeadDim * sizeof(Element));
        start_copy_rows<kRows, kHeadDim, kRows, Traits::kIsNarrow>(maps.q, rows_of(work_tile),
                                                                   first, smem.q[stage], q_full);
        if constexpr (Traits::kIsE4m3) {
          q_full.expect_transaction(kRows * kHeadDim);
          copy_columns(maps.q_columns, work_tile.tile.sequence.q_begin, work_tile, first,
                       smem.q_columns[stage], q_full);
        }
        if constexpr (Traits::kHasRelativeBias) {
          copy_position(params, work_tile, first, smem.relative_bias[0].position[stage], q_full);
        }
        if constexpr (kHasDenseBias) {
          const BiasState bias_state{state.count};
          smem.pipeline_bias.producer_acquire(bias_state);
          q_full.expect_transaction(kRows * kBlockKeys * sizeof(Element));
          start_copy_bias<kRows, kBlockKeys>(
              maps.bias, work_tile.tile.sequence_index, work_tile.bias_head,
              first + work_tile.tile.sequence.offset, Traits::first_key(work_tile),
              smem.bias[bias_state.index()], q_full);
        }
        if constexpr (!kIsCluster) copy_dout();
        // NOTE: getting the next work tile and copying its first tiles takes as long as a few
        // steps.
        const bool is_near = abs(work_tile.last_row_tile - m) <= kTilesAhead;
        if (is_near && !has_told) smem.next_work_wanted.arrive();
        has_told = is_near && next >= 0;
      }
      __syncwarp();
      if constexpr (Traits::kProducerFindsMask) {
        if (is_partial) {
          smem.pipeline_mask.producer_acquire(mask_state);
          for (int group = 0; group < Traits::kKeyGroups; ++group) {
            Traits::template find_row_bits<kRows, 32>(params, work_tile, first, group,
                                                      smem.visible[mask_state.index()][group]);
          }
          mask_state.advance();
        }
      }
      q_full.arrive();
      // NOTE: the consumers of a cluster need the next Q before they release dO.
      if (kIsCluster && copies) copy_dout();
      state.advance();
    });
  }

  // Starts copying the weights by position of a tile of rows. Called by one thread.
  static HSTU_DEVICE void copy_position(const BackwardParams& params, const WorkTile& work_tile,
                                        int first_row, PositionWindow& window,
                                        cutlass::arch::ClusterTransactionBarrier& full) {
    const RelativeBias& bias = params.relative_bias;
    if (!bias.position.data) return;
    full.expect_transaction(PositionWindow::kBytes);
    window.start_copy(
        bias.prepared,
        bias.prepared.position + work_tile.bias_head * bias.prepared.position_head_stride,
        work_tile.tile.sequence, first_row, Traits::first_key(work_tile), full);
  }

  static HSTU_DEVICE RaggedRows rows_of(const WorkTile& work_tile) {
    const Sequence& sequence = work_tile.tile.sequence;
    return {sequence.q_begin, sequence.q_len, work_tile.head};
  }

  // TMA-reduces the dQ tiles of one stage of pipeline_dq into the accumulators. Called by one
  // thread per stage.
  static HSTU_DEVICE void add_dq(const BackwardParams& params, const typename Traits::Maps& maps,
                                 const BackwardBuffers& buffers, SharedMemory& smem, int stage) {
    DqState state;
    PipelineState<1> work_state;
    if (Traits::is_unlisted(buffers.list)) wait_for_previous_kernel();  // it may zero the sums
    for_each_row_tile(smem, [&](const WorkTile& work_tile, int m, int next) {
      const auto tell_if_last = [&] {
        if (!Traits::kStoresDq || next >= 0) return;
        ptx::bulk_wait_complete();
        ptx::fence_proxy_async_global();
        smem.dq_sums_arrived.arrive();
        // The other thread may have stored sums to which this one adds.
        smem.dq_sums_arrived.wait(work_state.count % 2);
        work_state.advance();
      };
      if (state.index() != stage) {
        state.advance();
        tell_if_last();
        return;
      }
      if (Traits::stores_ds(params)) store_ds(maps, work_tile, m, DsState{state.count}, smem);
      const int row_tile = work_tile.first_row_tile + m;
      const int dq_index = row_tile * params.heads + work_tile.head;
      if constexpr (kIsDeterministic) {  // key tiles add to a dQ in ascending order
        const int before = buffers.dq_writers[row_tile].count_before(work_tile.tile.index);
        // NOTE: `<` and not `!=`, because sequences with overlapping offsets share a tile.
        while (ptx::ld_acquire(buffers.dq_semaphore + dq_index * kClusterSize + Traits::rank()) <
               before) {
        }
        ptx::fence_proxy_async_global();
      }
      smem.pipeline_dq.consumer_wait(state);
      const auto* const tile = Traits::dq_tile(smem, state);
      const int64_t offset = int64_t{dq_index} * Dq::kSize + Traits::rank() * Dq::kBlockSize;
      if constexpr (Traits::kIsE4m3) {
        ptx::bulk_reduce_add_bf16<Dq::kBlockSize * 2>(
            tile, static_cast<char*>(static_cast<void*>(buffers.dq)) + 2 * offset);
      } else if (!Traits::kStoresDq || (work_tile.has_later(m) && work_tile.has_earlier(m))) {
        ptx::bulk_reduce_add<Dq::kBlockSize * sizeof(float)>(tile, buffers.dq + offset);
      } else if (work_tile.has_later(m)) {
        cute::SM90_BULK_COPY_S2G::copy(tile, buffers.dq + offset, Dq::kBlockSize * sizeof(float));
      }
      cute::tma_store_arrive();
      cute::tma_store_wait<0>();
      if constexpr (kIsCluster) {  // dQ was in the memory of Q
        smem.pipeline_q.consumer_release(QState{state.count});
      } else {
        smem.pipeline_dq.consumer_release(state);
      }
      if constexpr (kIsDeterministic) {
        ptx::bulk_wait_complete();
        ptx::fence_proxy_async_global();
        ptx::red_add_release(buffers.dq_semaphore + dq_index * kClusterSize + Traits::rank(), 1);
      }
      state.advance();
      tell_if_last();
    });
    ptx::bulk_wait_complete();
  }

  static HSTU_DEVICE void store_ds(const typename Traits::Maps& maps, const WorkTile& work_tile,
                                   int m, DsState state, SharedMemory& smem) {
    smem.pipeline_ds.consumer_wait(state);
    const Element* const own = Traits::ds_tile(smem, state) + Traits::rank() * (kRows * kBlockKeys);
    start_storing_bias_gradient<kRows * 64>(maps, work_tile, m, own);
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();
    smem.pipeline_ds.consumer_release(state);
  }

  // Starts zeroing the tiles of the bias gradient where no row sees a key of the work tile. Called
  // by one thread.
  static HSTU_DEVICE void start_zeroing_unseen(const typename Traits::Maps& maps,
                                               const WorkTile& work_tile,
                                               const SharedMemory& smem) {
    for (int m = 0; m * kRows < work_tile.tile.sequence.q_len; ++m) {
      if (!work_tile.map.contains(m))
        start_storing_bias_gradient<0>(maps, work_tile, m, smem.zeros);
    }
    cute::tma_store_arrive();
  }

  // Starts storing a tile of the bias gradient, whose panels of 64 keys are kPanelSize elements
  // apart.
  template <int kPanelSize>
  static HSTU_DEVICE void start_storing_bias_gradient(const typename Traits::Maps& maps,
                                                      const WorkTile& work_tile, int m,
                                                      const Element* tile) {
    const SequenceTile& work = work_tile.tile;
#pragma unroll
    for (int panel = 0; panel < kBlockKeys / 64; ++panel) {
      cute::SM90_TMA_STORE_4D::copy(
          &maps.bias_gradient, tile + panel * kPanelSize, Traits::first_key(work_tile) + panel * 64,
          m * kRows + work.sequence.offset, work_tile.head, work.sequence_index);
    }
  }

  // Calls visit(work_tile, m, next) for each visible tile m of rows of each work tile.
  template <typename Visit>
  static HSTU_DEVICE void for_each_row_tile(SharedMemory& smem, Visit visit) {
    for_each_work_tile(smem.work_tiles, smem.pipeline_work, [&](const WorkTile& work_tile) {
      for (int m = Traits::first_row_tile(work_tile); m >= 0;) {
        const int next = Traits::next_row_tile(work_tile, m);
        visit(work_tile, m, next);
        m = next;
      }
    });
  }
};

}  // namespace hstu::sm90
