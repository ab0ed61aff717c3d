// The producer warpgroup of the forward: warp 0 schedules work tiles; warps 1, 2 and 3 copy Q, K
// (and the bias) and V, so that no copy waits for a stage of another. With E4m3PagedKeys, warps 1
// to 3 work as e4m3_pages.h describes. convert_pages() runs in the converter warpgroup, which calls
// with QuantizedPagedKeys have.
#pragma once

#include "forward_traits.h"
#include "tile_scheduler.h"

namespace hstu::sm90 {

// Calls visit(work_tile, first key, first key of the next tile or kNoKey, state of its stage) for
// each visible key tile of each work tile.
template <typename Traits, typename Visit>
HSTU_DEVICE void for_each_key_tile(typename Traits::SharedMemory& smem, Visit visit) {
  typename Traits::KVState state;
  for_each_work_tile(smem.work_tiles, smem.pipeline_work,
                     [&](const typename Traits::WorkTile& work_tile) {
                       for (int first = work_tile.tile_from(0); first != Traits::kNoKey;) {
                         const int next = work_tile.tile_from(first + Traits::kKeys);
                         visit(work_tile, first, next, state);
                         state.advance();
                         first = next;
                       }
                     });
}

template <typename Traits>
class ForwardProducer {
  using KeyTile = typename Traits::KeyTile;
  using KVState = typename Traits::KVState;
  using SharedMemory = typename Traits::SharedMemory;
  using Source = typename Traits::Source;
  using WorkTile = typename Traits::WorkTile;

 public:
  static HSTU_DEVICE void run(const ForwardParams& params, const ForwardMaps& maps,
                              const SchedulerMetadata& metadata, SharedMemory& smem) {
    if (threadIdx.x < 32) {
      TileScheduler<Traits>::run(params, metadata, smem);
    } else if (Traits::kFollowsQuantization) {
      wait_for_previous_kernel();
    }
    const bool transposes = Traits::kTransposesValues && is_in_warp(3, Source::kCopyLanes);
    if (is_in_warp(1, Source::kQueryCopyLanes) || transposes) copy_queries(params, maps, smem);
    if (is_in_warp(2, Source::kCopyLanes)) copy_keys(params, maps, smem);
    if constexpr (!Traits::kTransposesValues) {
      if (is_in_warp(3, Source::kCopyLanes)) copy_values(params, maps, smem);
    }
  }

 private:
  // True for the first `lanes` lanes of a warp.
  static HSTU_DEVICE bool is_in_warp(unsigned warp, unsigned lanes) {
    return threadIdx.x >= warp * 32 && threadIdx.x < warp * 32 + lanes;
  }

  static HSTU_DEVICE void copy_queries(const ForwardParams& params, const ForwardMaps& maps,
                                       SharedMemory& smem) {
    typename Traits::QState state;
    typename Source::template QueryWarpLoader<Traits> loader;
    for_each_work_tile(smem.work_tiles, smem.pipeline_work, [&](const WorkTile& work_tile) {
      if (Traits::kIsSplitByCluster && work_tile.is_empty()) return;
      const Sequence& sequence = work_tile.tile.sequence;
      const RaggedRows rows{sequence.q_begin, sequence.q_len, work_tile.head};
      const int first = work_tile.tile.index * Traits::kRows;
      if constexpr (Traits::kFindsFactorsFirst) loader.find_factors(params, smem, work_tile);
      constexpr int kRows = Traits::kRows / Traits::kQueryPipelines;
      for (int n = 0; n < Traits::kQueryPipelines; ++n) {
        auto& pipeline_q = smem.pipeline_q[n];
        if (threadIdx.x == 32) {
          pipeline_q.producer_acquire(state);
          copy_rows<kRows, Traits::kHeadDim, kWarpgroupRows>(maps.q, rows, first + n * kRows,
                                                             smem.q[state.index()][n],
                                                             pipeline_q.full[state.index()]);
        }
        if constexpr (Traits::kFindsFactorsFirst) pipeline_q.producer_commit_by_warp(state);
      }
      if constexpr (Traits::kHasTimeBias) {
        if (threadIdx.x == 32)
          RelativeBiasProducer<Traits>::load_cells(params, smem, work_tile, state);
      }
      state.advance();
      loader.load(params, maps, smem, work_tile);
    });
  }

  static HSTU_DEVICE void copy_keys(const ForwardParams& params, const ForwardMaps& maps,
                                    SharedMemory& smem) {
    typename Source::template Loader<Traits, PagePart::kKeys> loader;
    typename Traits::Bias::template Producer<Traits> bias;
    bool is_next_wanted = false;
    for_each_key_tile<Traits>(
        smem, [&](const WorkTile& work_tile, int first, int next, KVState state) {
          // NOTE: a split may end between the history and the targets, and then its last key tile
          // ends before its keys do.
          const bool is_end = next == Traits::kNoKey ||
                              first + Traits::kTilesLeft * Traits::kKeys >= work_tile.end();
          if (Source::is_leader() && !is_next_wanted && is_end) {
            smem.next_work_wanted.arrive();
            is_next_wanted = true;
          }
          if (next == Traits::kNoKey) is_next_wanted = false;
          smem.pipeline_k.producer_acquire(state);
          if (Source::is_leader()) smem.key_tiles[state.index()] = key_tile(work_tile, first, next);
          loader.load(params, maps, smem, work_tile, first, state.index());
          bias.load(params, maps, smem, work_tile, first, state);
        });
  }

  static HSTU_DEVICE void copy_values(const ForwardParams& params, const ForwardMaps& maps,
                                      SharedMemory& smem) {
    typename Source::template Loader<Traits, PagePart::kValues> loader;
    for_each_key_tile<Traits>(smem, [&](const WorkTile& work_tile, int first, int, KVState state) {
      smem.pipeline_v.producer_acquire(state);
      loader.load(params, maps, smem, work_tile, first, state.index());
    });
  }

  // Returns what consumers read about the key tile that begins with key `first`. `next` is the
  // first key of the next one.
  static HSTU_DEVICE KeyTile key_tile(const WorkTile& work_tile, int first, int next) {
    int bits = first;
    const bool is_full =
        work_tile.summary.classify(first, first + Traits::kKeys) == TileKind::kFull;
    if (!is_full) bits |= KeyTile::kPartial;
    if (next == Traits::kNoKey) bits |= KeyTile::kLast;
    for (int n = 0; n < Traits::kConsumers; ++n) {
      if (next >= work_tile.keys[n]) bits |= KeyTile::kLastOfFirst << n;
    }
    return {bits};
  }
};

// Converts the tiles of history, whose bytes the Q warp copies, to 16 bits. Called by the converter
// warpgroup, which also arrives at the barriers of tiles of targets.
template <typename Traits>
HSTU_DEVICE void convert_pages(typename Traits::SharedMemory& smem) {
  typename Traits::ByteState bytes;
  for_each_key_tile<Traits>(
      smem, [&](const typename Traits::WorkTile& work_tile, int first, int, auto state) {
        const PaddedKeys<Traits::kKeys> padded(work_tile.tile.sequence);
        const auto convert = [&](auto& pipeline, auto* tile) {
          pipeline.producer_acquire(state);
          if (!padded.is_target(first)) {
            smem.pipeline_bytes.consumer_wait(bytes);
            dequantize_tile<Traits::kKeys, Traits::kHeadDim>(smem.bytes[bytes.index()],
                                                             smem.scales[bytes.index()], tile);
            smem.pipeline_bytes.consumer_release_by_warp(bytes);
            bytes.advance();
          }
          pipeline.producer_commit_by_warp(state);
        };
        convert(smem.pipeline_k, smem.k[state.index()]);
        convert(smem.pipeline_v, smem.v[state.index()]);
      });
}

}  // namespace hstu::sm90
