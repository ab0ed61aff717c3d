// The producers of the forward: four warps that find items, and copy Q, K and V.
#pragma once

#include "../common/launch.h"
#include "bias.h"
#include "forward_traits.h"

namespace hstu::sm90 {

template <typename Traits>
struct ForwardProducers : Traits {
  using Traits::kClusterSize;
  using Traits::kConsumers;
  using Traits::kFinderLanes;
  using Traits::kHasBias;
  using Traits::kHeadDim;
  using Traits::kIsClusterSplit;
  using Traits::kIsPaged;
  using Traits::kIsQuantized;
  using Traits::kIsSplitKV;
  using Traits::kKeys;
  using Traits::kKVCopyLanes;
  using Traits::kNoKey;
  using Traits::kNoWork;
  using Traits::kQCopyLanes;
  using Traits::kRows;
  using Traits::kTilesLeft;
  using typename Traits::BiasState;
  using typename Traits::Element;
  using typename Traits::KeyTile;
  using typename Traits::KVState;
  using typename Traits::QState;
  using typename Traits::SharedMemory;
  using typename Traits::WorkState;
  using typename Traits::WorkTile;
  using QuantizedState = typename Traits::Quantized::State;

  static HSTU_DEVICE void run(const ForwardParams& params, const ForwardMaps& maps,
                              const WorkList& list, const SplitKV& split_kv, SharedMemory& smem) {
    if (threadIdx.x < 32) find_work_tiles(params, list, split_kv, smem);
    if (threadIdx.x >= 32 && threadIdx.x < 32 + kQCopyLanes) copy_queries(params, maps, smem);
    if (threadIdx.x >= 64 && threadIdx.x < 64 + kKVCopyLanes) copy_keys(params, maps, smem);
    if (threadIdx.x >= 96 && threadIdx.x < 96 + kKVCopyLanes) copy_values(params, maps, smem);
  }

 private:
  // By one warp, which zeroes the outputs of items that see no key; consumers do not get them.
  static HSTU_DEVICE void find_work_tiles(const ForwardParams& params, const WorkList& list,
                                          const SplitKV& split_kv, SharedMemory& smem) {
    const int lane = static_cast<int>(threadIdx.x);
    WorkState state;
    if (lane == 0) smem.work_index = static_cast<int>(blockIdx.x) / kClusterSize;
    __syncwarp();
    for (;;) {
      // NOTE: in shared memory, since producers have few registers.
      WorkTile& work_tile = smem.work_tiles[state.index()];
      smem.pipeline_work.producer_acquire(state);
      find_work_tile(params, list, split_kv, smem, work_tile);
      __syncwarp();
      if (!kIsClusterSplit && work_tile.head >= 0 && work_tile.tile_from(0) == kNoKey) {
        const Sequence& sequence = work_tile.tile.sequence;
        const int first = work_tile.tile.index * kRows;
        // Of an item in shares the first one does it, where none has a key.
        if (!kIsSplitKV ||
            (work_tile.split.begin == 0 && work_tile.tile_of(0, INT_MAX) == kNoKey)) {
          zero_rows_of_head<Element>(params.out, sequence.q_begin + first,
                                     min(kRows, sequence.q_len - first), work_tile.head);
        }
        __syncwarp();
      } else {
        if (lane < kFinderLanes) smem.pipeline_work.full[state.index()].arrive();
        if (work_tile.head < 0) return;
        if (!kIsClusterSplit) smem.next_work_wanted.wait(state.count % 2);
        state.advance();
      }
      if (lane == 0) smem.work_index = next_work_index(list);
      __syncwarp();
    }
  }

  static HSTU_DEVICE int next_work_index(const WorkList& list) {
    if (!list.tiles) return kNoWork;
    wait_for_previous_kernel();
    return reload_grid_dim() + atomicAdd(list.next, 1);
  }

  // Item shared.number, if there is one. By a warp: a lane each finds what a warpgroup's rows see,
  // and the next one what all rows see.
  static HSTU_DEVICE void find_work_tile(const ForwardParams& params, const WorkList& list,
                                         const SplitKV& split_kv, const SharedMemory& smem,
                                         WorkTile& work_tile) {
    const int lane = static_cast<int>(threadIdx.x);
    // One share of all tiles and heads comes after another.
    const int work_tiles = list.capacity * params.heads;  // of a share
    const int split = kIsSplitKV ? smem.work_index / work_tiles : 0;
    const int work_index = kIsSplitKV ? smem.work_index - split * work_tiles : smem.work_index;
    const int tile = work_index / params.heads;
    bool exists = kIsSplitKV ? split < split_kv.num_splits : work_index != kNoWork;
    const bool is_listed = list.tiles && tile >= list.unlisted;
    if (kIsPaged && exists && !is_listed) {
      const bool has_rows = find_paged_tile(params, tile, kRows, work_tile.tile, work_tile.pages);
      exists = has_rows || list.tiles != nullptr;  // others come after one without rows
    }
    if (lane == 0) {
      if (exists && is_listed) {
        wait_for_previous_kernel();
        const bool is_there = tile - list.unlisted < *list.count;
        work_tile.tile = is_there ? list.tiles[tile - list.unlisted] : SequenceTile{};
        exists = is_there || split + 1 < split_kv.num_splits;
        // The rest of this share is not there either.
        if (!is_there && exists) atomicMax(list.next, (split + 1) * work_tiles - reload_grid_dim());
        if (kIsPaged && is_there) {
          work_tile.pages = PageList(params.paged, work_tile.tile.sequence_index);
        }
      } else if (!kIsPaged && exists && !find_row_tile(params.batch, tile, kRows, work_tile.tile)) {
        work_tile.tile = {};             // without rows
        exists = list.tiles != nullptr;  // others come after it
      }
      work_tile.head = exists ? work_index - tile * params.heads : -1;
      if constexpr (kIsSplitKV) work_tile.split = split_kv.keys_of(split);
    }
    __syncwarp();
    if (work_tile.head < 0 || lane >= kFinderLanes) return;
    compiler_barrier();
    const Sequence& sequence = work_tile.tile.sequence;
    const int first = work_tile.tile.index * kRows;
    const int r0 = first + lane % kConsumers * kWarpgroupRows;
    const int r1 = min(lane < kConsumers ? r0 + kWarpgroupRows : first + kRows, sequence.q_len);
    if (list.summaries.data) {
      if (lane < kConsumers) {
        work_tile.keys[lane] = r0 < r1 ? INT_MAX : 0;
      } else {
        const int64_t before = first_tile(sequence.q_begin, work_tile.tile.sequence_index, kRows);
        work_tile.summary = list.summaries.at(before + work_tile.tile.index, work_tile.head);
        // NOTE: offsets that lie may leave a summary unwritten.
        for (Interval& keys : work_tile.summary.hull) keys.end = min(keys.end, sequence.k_len);
        if constexpr (kIsPaged) pad_keys(work_tile);
        if constexpr (kIsSplitKV) count_other_splits(split_kv, work_tile);
      }
      return;
    }
    MaskParams closed_form = params.mask;
    closed_form.row_spans = nullptr;
    closed_form.func = nullptr;
    const KeyIntervals keys = Mask(closed_form, sequence, 0).kv_intervals(r0, r1);
    if (lane < kConsumers) {
      const int end = max(keys.interval[0].end, keys.interval[1].end);
      work_tile.keys[lane] = kIsPaged ? PaddedKeys<kKeys>(sequence).padded_end(end) : end;
    } else {
      work_tile.summary = {};
      work_tile.summary.set_hull(keys);
      compiler_barrier();
      Mask(closed_form, sequence, 0).fully_visible(r0, r1, work_tile.summary.fully_visible);
      if constexpr (kIsPaged) pad_keys(work_tile);
      if constexpr (kIsSplitKV) count_other_splits(split_kv, work_tile);
      if constexpr (kIsClusterSplit) {
        clip_to_cluster_rank<kKeys, kClusterSize>(work_tile.summary.hull);
      }
    }
  }

  static HSTU_DEVICE void count_other_splits(const SplitKV& split_kv, WorkTile& work_tile) {
    int others = -1;
#pragma unroll 1
    for (int n = 0; n < split_kv.num_splits; ++n) others += work_tile.sees(split_kv.keys_of(n));
    work_tile.other_splits = others;
  }

  // What rows see, from keys to columns of tiles: see paged_keys.h.
  static HSTU_DEVICE void pad_keys(WorkTile& work_tile) {
    const Sequence& sequence = work_tile.tile.sequence;
    const PaddedKeys<kKeys> padded(sequence);
    for (int n = 0; n < 2; ++n) {
      work_tile.summary.hull[n] = padded.to_padded(work_tile.summary.hull[n], sequence.k_len);
      work_tile.summary.fully_visible[n] =
          padded.to_padded(work_tile.summary.fully_visible[n], sequence.k_len);
    }
  }

  // Q, K and V are copied by a thread each, so that none waits for another's stage; with pages, by
  // a warp each. If these hold e4m3, the first warp copies it, too, and the others convert it.

  static HSTU_DEVICE bool is_leader() { return !kIsPaged || threadIdx.x % 32 == 0; }

  static HSTU_DEVICE void copy_queries(const ForwardParams& params, const ForwardMaps& maps,
                                       SharedMemory& smem) {
    QState state;
    KVState kv_state;
    QuantizedState quantized_state;
    PageWindow window;
    for_each_work_tile(smem.work_tiles, smem.pipeline_work, [&](const WorkTile& work_tile) {
      if (kIsClusterSplit && work_tile.tile_from(0) == kNoKey) return;
      const Sequence& sequence = work_tile.tile.sequence;
      const RaggedRows rows{sequence.q_begin, sequence.q_len, work_tile.head};
      const int first = work_tile.tile.index * kRows;
      if (threadIdx.x == 32) {
        smem.pipeline_q.producer_acquire(state);
        copy_rows<kRows, kHeadDim, kWarpgroupRows>(maps.q, rows, first, smem.q[state.index()][0],
                                                   smem.pipeline_q.full[state.index()]);
      }
      state.advance();
      if constexpr (kIsQuantized) {
        __syncwarp();
        copy_quantized(params, maps, smem, work_tile, kv_state, quantized_state, window);
      }
    });
  }

  // The stored keys and values of an item.
  static HSTU_DEVICE void copy_quantized(const ForwardParams& params, const ForwardMaps& maps,
                                         SharedMemory& smem, const WorkTile& work_tile,
                                         KVState& kv_state, QuantizedState& quantized_state,
                                         PageWindow& window) {
    const Sequence& sequence = work_tile.tile.sequence;
    const PaddedKeys<kKeys> padded(sequence);
    window.enter(work_tile.pages);
    for (int first = work_tile.tile_from(0); first != kNoKey;
         first = work_tile.tile_from(first + kKeys)) {
      const int stage = kv_state.index();
      if (!padded.is_target(first)) {
        smem.pipeline_k.producer_acquire(kv_state);
        start_copy_quantized<PagePart::kKeys, kKeys, kHeadDim>(
            params.paged, maps.pages, window, sequence, work_tile.head, first, smem.k[stage],
            smem.quantized[0], quantized_state);
        smem.pipeline_v.producer_acquire(kv_state);
        start_copy_quantized<PagePart::kValues, kKeys, kHeadDim>(
            params.paged, maps.pages, window, sequence, work_tile.head, first, smem.v[stage],
            smem.quantized[1], quantized_state);
        quantized_state.advance();
      }
      kv_state.advance();
    }
  }

  static HSTU_DEVICE void copy_keys(const ForwardParams& params, const ForwardMaps& maps,
                                    SharedMemory& smem) {
    BiasState bias_state;
    QuantizedState quantized_state;
    PageWindow window;
    bool is_next_wanted = false;
    for_each_key_tile(smem, [&](const WorkTile& work_tile, int first, int next, KVState state) {
      // NOTE: the keys of an item may end behind its last tile, where a share ends in a gap.
      const bool is_end = next == kNoKey || first + kTilesLeft * kKeys >= work_tile.end();
      if (is_leader() && !is_next_wanted && is_end) {
        smem.next_work_wanted.arrive();
        is_next_wanted = true;
      }
      if (next == kNoKey) is_next_wanted = false;
      smem.pipeline_k.producer_acquire(state);
      if (is_leader()) {
        int bits = first;
        const bool is_full = work_tile.summary.classify(first, first + kKeys) == TileKind::kFull;
        if (!is_full) bits |= KeyTile::kPartial;
        if (next == kNoKey) bits |= KeyTile::kLast;
        for (int n = 0; n < kConsumers; ++n) {
          if (next >= work_tile.keys[n]) bits |= KeyTile::kLastOfFirst << n;
        }
        smem.key_tiles[state.index()] = {bits};
      }
      copy_tile<PagePart::kKeys>(params, maps, maps.k, smem, window, quantized_state, work_tile,
                                 first, smem.k[state.index()], smem.pipeline_k.full[state.index()]);
      if (kHasBias && is_leader()) {
        const Sequence& sequence = work_tile.tile.sequence;
        smem.pipeline_bias.producer_acquire(bias_state);
        auto& bias_full = smem.pipeline_bias.full[bias_state.index()];
        bias_full.arrive_and_expect_tx(kRows * kKeys * sizeof(Element));
        start_copy_bias<kRows, kKeys>(maps.bias, work_tile.tile.sequence_index,
                                      work_tile.head / (params.heads / params.rab.heads),
                                      work_tile.tile.index * kRows + sequence.offset,
                                      first_key(sequence, first), smem.bias[bias_state.index()],
                                      bias_full);
        bias_state.advance();
      }
    });
  }

  static HSTU_DEVICE void copy_values(const ForwardParams& params, const ForwardMaps& maps,
                                      SharedMemory& smem) {
    PageWindow window;
    QuantizedState quantized_state;
    for_each_key_tile(smem, [&](const WorkTile& work_tile, int first, int, KVState state) {
      smem.pipeline_v.producer_acquire(state);
      copy_tile<PagePart::kValues>(params, maps, maps.v, smem, window, quantized_state, work_tile,
                                   first, smem.v[state.index()],
                                   smem.pipeline_v.full[state.index()]);
    });
  }

  // The tile of K or V that begins with column `first`.
  template <PagePart kPart>
  static HSTU_DEVICE void copy_tile(const ForwardParams& params, const ForwardMaps& maps,
                                    const CUtensorMap& packed, SharedMemory& smem,
                                    PageWindow& window, QuantizedState& quantized_state,
                                    const WorkTile& work_tile, int first, Element* to,
                                    cutlass::arch::ClusterTransactionBarrier& full) {
    const Sequence& sequence = work_tile.tile.sequence;
    if constexpr (!kIsPaged) {
      copy_rows<kKeys, kHeadDim>(packed, {sequence.k_begin, sequence.k_len, work_tile.head}, first,
                                 to, full);
    } else {
      const PaddedKeys<kKeys> padded(sequence);
      const bool is_target = padded.is_target(first);
      if constexpr (kIsQuantized) {
        if (!is_target) {
          dequantize_tile<kKeys, kHeadDim>(smem.quantized[static_cast<int>(kPart)], quantized_state,
                                           to);
          quantized_state.advance();
          if (is_leader()) full.arrive();
          return;
        }
      }
      if (is_leader()) full.arrive_and_expect_tx(kKeys * kHeadDim * sizeof(Element));
      if (!is_target) {
        window.enter(work_tile.pages);
        start_copy_pages<kPart, kKeys, kHeadDim>(params.paged, maps.pages, window, sequence,
                                                 work_tile.head, first, to, full);
      } else if (is_leader()) {
        start_copy_rows<kKeys, kHeadDim>(packed, target_rows(sequence, work_tile.head),
                                         first - padded.first_target(), to, full);
      }
    }
  }

  // The first key of the tile that begins with column `first`.
  static HSTU_DEVICE int first_key(const Sequence& sequence, int first) {
    return kIsPaged ? PaddedKeys<kKeys>(sequence).key(first) : first;
  }

  // Calls visit(item, first, next, place) for each tile of keys, told by its first key.
  template <typename Visit>
  static HSTU_DEVICE void for_each_key_tile(SharedMemory& smem, Visit visit) {
    KVState state;
    for_each_work_tile(smem.work_tiles, smem.pipeline_work, [&](const WorkTile& work_tile) {
      for (int first = work_tile.tile_from(0); first != kNoKey;) {
        const int next = work_tile.tile_from(first + kKeys);
        visit(work_tile, first, next, state);
        state.advance();
        first = next;
      }
    });
  }
};

}  // namespace hstu::sm90
