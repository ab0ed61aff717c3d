// The order of the CPU's work tiles: the longest first, over the whole batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../common/mask.h"

namespace hstu {

// A chunk of one head of one sequence: rows [begin, end) forward, keys [begin, end) backward.
struct WorkTile {
  int sequence = 0;
  int head = 0;  // the first head of the work tile
  int begin = 0;
  int end = 0;
  int64_t cost = 0;  // visible tiles
};

struct ScheduleConfig {
  int heads = 1;                // of the tensors
  int heads_per_work_tile = 1;  // worked on together
  int tile_rows = 64;
  int tile_keys = 64;
  // Rows (forward) or keys (backward) of a work tile; a multiple of tile_rows or tile_keys.
  int chunk = 512;
};

// Counts the tiles of rows [r0, r1) and keys [k0, k1) in which something is visible.
inline int64_t count_tiles(const Mask& mask, const ScheduleConfig& config, Interval rows,
                           Interval keys) {
  int64_t count = 0;
  for (int r = rows.begin; r < rows.end; r += config.tile_rows) {
    const KeyIntervals visible = mask.kv_intervals(r, std::min(r + config.tile_rows, rows.end));
    for (int n = 0; n < visible.count; ++n) {
      const int begin = std::max(visible.interval[n].begin, keys.begin);
      const int end = std::min(visible.interval[n].end, keys.end);
      if (begin < end) count += ceil_div(end - begin, config.tile_keys);
    }
  }
  return count;
}

// Returns the row chunks of every sequence and head, those with the most visible tiles first.
inline std::vector<WorkTile> forward_schedule(const BatchParams& batch,
                                              const MaskParams& mask_params,
                                              const ScheduleConfig& config) {
  std::vector<WorkTile> work_tiles;
  for (int b = 0; b < batch.batch; ++b) {
    const Sequence sequence = load_sequence(batch, b);
    const Mask mask(mask_params, sequence, 0);
    for (int r0 = 0; r0 < sequence.q_len; r0 += config.chunk) {
      const int r1 = std::min(r0 + config.chunk, sequence.q_len);
      const int64_t cost = count_tiles(mask, config, {r0, r1}, {0, sequence.k_len});
      for (int head = 0; head < config.heads; head += config.heads_per_work_tile) {
        work_tiles.push_back({b, head, r0, r1, cost});
      }
    }
  }
  std::stable_sort(work_tiles.begin(), work_tiles.end(),
                   [](const WorkTile& x, const WorkTile& y) { return x.cost > y.cost; });
  return work_tiles;
}

// Returns the key chunks of every sequence and head. The chunks of one sequence and head keep their
// order, since a chunk may wait for the dQ of the chunks before it, which must then be finished or
// being worked on. So chunks are ranked by the largest cost of any chunk from them on.
inline std::vector<WorkTile> backward_schedule(const BatchParams& batch,
                                               const MaskParams& mask_params,
                                               const ScheduleConfig& config) {
  struct Ranked {
    WorkTile work_tile;
    int64_t rank;
  };
  std::vector<Ranked> ranked;
  for (int b = 0; b < batch.batch; ++b) {
    const Sequence sequence = load_sequence(batch, b);
    const Mask mask(mask_params, sequence, 0);
    const size_t first = ranked.size();
    for (int k0 = 0; k0 < sequence.k_len; k0 += config.chunk) {
      const int k1 = std::min(k0 + config.chunk, sequence.k_len);
      const int64_t cost = count_tiles(mask, config, {0, sequence.q_len}, {k0, k1});
      for (int head = 0; head < config.heads; head += config.heads_per_work_tile) {
        ranked.push_back({{b, head, k0, k1, cost}, cost});
      }
    }
    int64_t rank = 0;
    for (size_t n = ranked.size(); n > first; --n) {
      rank = std::max(rank, ranked[n - 1].work_tile.cost);
      ranked[n - 1].rank = rank;
    }
  }
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const Ranked& x, const Ranked& y) { return x.rank > y.rank; });
  std::vector<WorkTile> work_tiles;
  work_tiles.reserve(ranked.size());
  for (const Ranked& entry : ranked) work_tiles.push_back(entry.work_tile);
  return work_tiles;
}

}  // namespace hstu
