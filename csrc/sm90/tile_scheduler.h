// The tile scheduler of the forward: hands a block one work tile after another.
//
// Work tiles come from one of these:
//   no list      each block (or cluster) has one work tile, numbered by blockIdx; or, for short
//                sequences, every gridDim-th work tile (WorkList::sequence_tiles)
//   list         a block begins with the work tile of its number, and takes the next one by an
//                atomic counter. Some row tiles of the batch are not listed (WorkList::unlisted),
//                so that blocks begin before prepare_scheduler() has written the list
//   split-KV     the list is processed once per split: the first splits of all row tiles come first
//   cluster      there is no list, and each block of a cluster has one split of its work tile
//
// A block finds the keys that its rows see itself, unless the tile is prepared (PreparedTile).
#pragma once

#include "../common/launch.h"
#include "../common/zero.h"
#include "forward_traits.h"
#include "stores.h"

namespace hstu::sm90 {

// Clips the visible keys of a work tile to the key tiles of this block of the cluster.
template <int kKeys, int kClusterSize>
HSTU_DEVICE void clip_to_cluster_rank(Interval (&hull)[2]) {
  Interval tiles[2];
  for (int n = 0; n < 2; ++n) {
    tiles[n] = {hull[n].begin / kKeys, ceil_div(hull[n].end, kKeys)};
    if (hull[n].empty()) tiles[n] = {};
  }
  tiles[1].begin = max(tiles[1].begin, tiles[0].end);
  const int first = max(tiles[0].end - tiles[0].begin, 0);
  const int count = first + max(tiles[1].end - tiles[1].begin, 0);
  const int rank = static_cast<int>(block_rank_in_cluster());
  const int begin = count * rank / kClusterSize;
  const int end = count * (rank + 1) / kClusterSize;
  for (int n = 0; n < 2; ++n) {
    const int origin = tiles[n].begin - n * first;
    hull[n] = {max(hull[n].begin, (origin + begin) * kKeys),
               min(hull[n].end, (origin + end) * kKeys)};
  }
}

// All functions are called by all lanes of the first warp of the producer.
template <typename Traits>
class TileScheduler {
  using SharedMemory = typename Traits::SharedMemory;
  using Source = typename Traits::Source;
  using WorkTile = typename Traits::WorkTile;
  static constexpr int kConsumers = Traits::kConsumers;
  static constexpr int kKeys = Traits::kKeys;
  static constexpr int kRows = Traits::kRows;

 public:
  // Fills the ring of work tiles until there is no more work. Consumers do not get work tiles whose
  // rows see no key, but the blocks of a cluster do, because they reduce O together.
  static HSTU_DEVICE void run(const ForwardParams& params, const SchedulerMetadata& metadata,
                              SharedMemory& smem) {
    const int lane = static_cast<int>(threadIdx.x);
    typename Traits::WorkState state;
    if (lane == 0) {
      smem.work_index = static_cast<int>(blockIdx.x) / Traits::kClusterSize;
      smem.tiles_beyond = 0;
    }
    __syncwarp();
    for (;;) {
      // NOTE: the work tile stays in shared memory, because the producer has few registers.
      WorkTile& work_tile = smem.work_tiles[state.index()];
      smem.pipeline_work.producer_acquire(state);
      get_next_work(params, metadata, smem, work_tile);
      __syncwarp();
      if (!Traits::kIsSplitByCluster && !work_tile.is_end() && work_tile.is_empty()) {
        zero_output(params, work_tile);
        __syncwarp();
      } else {
        if (lane < Traits::kSchedulerLanes) smem.pipeline_work.full[state.index()].arrive();
        if (work_tile.is_end()) return;
        if (!Traits::kIsSplitByCluster) smem.next_work_wanted.wait(state.count % 2);
        state.advance();
      }
      if (lane == 0) advance(metadata.list, work_tile.tile, smem);
      __syncwarp();
    }
  }

 private:
  // Goes on to the work tile after `tile`. Called by one thread.
  static HSTU_DEVICE void advance(const WorkList& list, const SequenceTile& tile,
                                  SharedMemory& smem) {
    if (Traits::kReduction == SplitKVReduction::kNone && list.sequence_tiles > 0) {
      // NOTE: max_seqlen_q, from which sequence_tiles was computed, may be understated.
      const bool has_more =
          tile.index + 1 >= list.sequence_tiles && (tile.index + 1) * kRows < tile.sequence.q_len;
      smem.tiles_beyond = has_more ? smem.tiles_beyond + 1 : 0;
      if (!has_more) smem.work_index += reload_grid_dim();
    } else if (list.tiles) {
      wait_for_previous_kernel();
      smem.work_index = reload_grid_dim() + atomicAdd(list.next, 1);
    } else {
      smem.work_index = Traits::kNoWorkIndex;
    }
  }

  // Writes work tile smem.work_index: its rows, which may be none, and the keys that they see.
  // Writes kEndOfWork only if no later work tile of the block can have rows.
  static HSTU_DEVICE void get_next_work(const ForwardParams& params,
                                        const SchedulerMetadata& metadata, const SharedMemory& smem,
                                        WorkTile& work_tile) {
    const bool is_prepared = find_rows(params, metadata, smem, work_tile);
    __syncwarp();
    const int lane = static_cast<int>(threadIdx.x);
    if (work_tile.is_end() || lane >= Traits::kSchedulerLanes) return;
    compiler_barrier();
    find_keys(params, metadata, work_tile, is_prepared);
  }

  // Writes the row tile, heads and split of a work tile. Returns true if the row tile has been
  // prepared, so that the keys that it sees have been written, too.
  static HSTU_DEVICE bool find_rows(const ForwardParams& params, const SchedulerMetadata& metadata,
                                    const SharedMemory& smem, WorkTile& work_tile) {
    const int work_index = smem.work_index;
    const WorkList& list = metadata.list;
    const SplitKVPlan& split_kv = metadata.split_kv;
    const int work_tiles = list.capacity * params.heads;  // of each split
    const int split = Traits::kIsSplitByList ? work_index / work_tiles : 0;
    const int index = Traits::kIsSplitByList ? work_index - split * work_tiles : work_index;
    const int tile = index / params.heads;
    const int unlisted = list.unlisted.end - list.unlisted.begin;
    const bool is_listed = list.tiles && tile >= unlisted;
    bool exists =
        Traits::kIsSplitByList ? split < split_kv.num_splits : work_index != Traits::kNoWorkIndex;
    const bool is_by_sequence =
        Traits::kReduction == SplitKVReduction::kNone && list.sequence_tiles > 0;
    const bool is_prepared = copy_prepared_tile(list, tile, work_tile);
    if (is_by_sequence) {
      exists = work_index < work_tiles;
    } else if (exists && !is_listed && !is_prepared) {
      const bool has_rows =
          Source::template find_row_tile<kRows>(params, list.unlisted.begin + tile, work_tile);
      exists = has_rows || list.tiles != nullptr;
    }
    if (threadIdx.x != 0) return is_prepared;
    if (exists && is_by_sequence) {
      int b = tile;
      int n = list.sequence_tiles - 1 + smem.tiles_beyond;
      for (; b >= params.batch.batch; b -= params.batch.batch) --n;
      const Sequence sequence = load_sequence(params.batch, b);
      work_tile.tile = n * kRows < sequence.q_len ? SequenceTile{sequence, b, n} : SequenceTile{};
      Source::find_pages(params, work_tile);
    } else if (exists && is_listed) {
      wait_for_previous_kernel();
      const bool has_rows = tile - unlisted < *list.count;
      if (!is_prepared) work_tile.tile = has_rows ? list.tiles[tile - unlisted] : SequenceTile{};
      exists = has_rows || (Traits::kIsSplitByList && split + 1 < split_kv.num_splits);
      // The rest of this split has no rows either: go on with the next split.
      if (!has_rows && exists) atomicMax(list.next, (split + 1) * work_tiles - reload_grid_dim());
      if (has_rows && !is_prepared) Source::find_pages(params, work_tile);
    }
    work_tile.head = exists ? index - tile * params.heads : Traits::kEndOfWork;
    work_tile.bias_head = Traits::Bias::bias_head(params, work_tile.head);
    if constexpr (Traits::kIsSplitByList) work_tile.split = split_kv.keys_of(split);
    return is_prepared;
  }

  // Copies prepared tile `tile`, counted as find_rows() does. Behind the last one, the copy has no
  // rows. Returns false if the tile has not been prepared.
  static HSTU_DEVICE bool copy_prepared_tile(const WorkList& list, int tile, WorkTile& work_tile) {
    if (!Traits::kFollowsQuantization || !list.prepared_tiles) return false;
    wait_for_previous_kernel();
    const int unlisted = list.unlisted.end - list.unlisted.begin;
    int64_t number = list.unlisted.begin + tile;
    if (tile >= unlisted) {
      number = list.capacity;
      if (tile - unlisted < *list.count) {
        const SequenceTile& listed = list.tiles[tile - unlisted];
        number = first_tile(listed.sequence.q_begin, listed.sequence_index, kRows) + listed.index;
        // NOTE: with inconsistent offsets, another sequence may have this number.
        const SequenceTile& prepared = list.prepared_tiles[number].tile;
        if (prepared.sequence_index != listed.sequence_index || prepared.index != listed.index) {
          return false;
        }
      }
    }
    constexpr int kLanes = Traits::kSchedulerLanes;
    const auto* const from = reinterpret_cast<const uint4*>(list.prepared_tiles + number);
    auto* const to = reinterpret_cast<uint4*>(static_cast<PreparedTile*>(&work_tile));
    constexpr int kPieces = sizeof(PreparedTile) / sizeof(uint4);
#pragma unroll
    for (int first = 0; first < kPieces; first += kLanes) {
      const int n = first + static_cast<int>(threadIdx.x);
      if (threadIdx.x < kLanes && n < kPieces) to[n] = number < list.capacity ? from[n] : uint4{};
    }
    return true;
  }

  // Writes which keys the rows of a work tile see: a lane for each warpgroup writes the end of the
  // keys that its rows see, and the next lane the summary of all rows.
  static HSTU_DEVICE void find_keys(const ForwardParams& params, const SchedulerMetadata& metadata,
                                    WorkTile& work_tile, bool is_prepared) {
    const WorkList& list = metadata.list;
    const int lane = static_cast<int>(threadIdx.x);
    if (is_prepared) {
      if constexpr (Traits::kIsSplitByList) {
        if (lane == kConsumers) count_other_splits(metadata.split_kv, work_tile);
      }
      return;
    }
    const Sequence& sequence = work_tile.tile.sequence;
    const int first = work_tile.tile.index * kRows;
    const int r0 = first + lane % kConsumers * kWarpgroupRows;
    const int r1 = min(lane < kConsumers ? r0 + kWarpgroupRows : first + kRows, sequence.q_len);
    if (!Traits::kIsClosedForm && list.summaries.data) {
      if (lane < kConsumers) {
        work_tile.keys[lane] = r0 < r1 ? INT_MAX : 0;
      } else {
        const int64_t before = first_tile(sequence.q_begin, work_tile.tile.sequence_index, kRows);
        work_tile.summary = list.summaries.at(before + work_tile.tile.index, work_tile.head);
        // NOTE: inconsistent offsets may leave a summary unwritten.
        for (Interval& keys : work_tile.summary.hull) keys.end = min(keys.end, sequence.k_len);
        Source::template pad_keys<kKeys>(work_tile);
        if constexpr (Traits::kIsSplitByList) count_other_splits(metadata.split_kv, work_tile);
      }
      return;
    }
    const MaskParams mask = closed_form(params.mask);
    const KeyIntervals keys = Mask(mask, sequence, 0).kv_intervals(r0, r1);
    if (lane < kConsumers) {
      const int end = max(keys.interval[0].end, keys.interval[1].end);
      work_tile.keys[lane] = Source::template padded_end<kKeys>(sequence, end);
    } else {
      work_tile.summary = {};
      work_tile.summary.set_hull(keys);
      compiler_barrier();
      Mask(mask, sequence, 0).fully_visible(r0, r1, work_tile.summary.fully_visible);
      Source::template pad_keys<kKeys>(work_tile);
      if constexpr (Traits::kIsSplitByList) count_other_splits(metadata.split_kv, work_tile);
      if constexpr (Traits::kIsSplitByCluster) {
        clip_to_cluster_rank<kKeys, Traits::kClusterSize>(work_tile.summary.hull);
      }
    }
  }

  static HSTU_DEVICE void count_other_splits(const SplitKVPlan& split_kv, WorkTile& work_tile) {
    int others = -1;
#pragma unroll 1
    for (int n = 0; n < split_kv.num_splits; ++n) others += work_tile.sees(split_kv.keys_of(n));
    work_tile.other_splits = others;
  }

  // Zeroes the output of rows that see no key. If the keys are split, only the first split zeroes
  // it, and only if no other split has visible keys.
  static HSTU_DEVICE void zero_output(const ForwardParams& params, const WorkTile& work_tile) {
    if (Traits::kIsSplitByList &&
        (work_tile.split.begin != 0 || work_tile.tile_of(0, INT_MAX) != Traits::kNoKey)) {
      return;
    }
    const Sequence& sequence = work_tile.tile.sequence;
    const int first = work_tile.tile.index * kRows;
    zero_rows_of_head(params.out, sequence.q_begin + first, min(kRows, sequence.q_len - first),
                      work_tile.head);
  }
};

}  // namespace hstu::sm90
