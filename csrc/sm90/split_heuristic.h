// Chooses how many splits the keys of a tile of rows have. Host code that needs no CUDA.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>

#include "../common/math.h"
#include "../scheduler/split_kv.h"
#include "tile_config.h"

namespace hstu::sm90 {

// The shape of a call in tiles. It is the same for every replay of a CUDA graph and for any lengths
// of the sequences. Therefore the order of summation is the same, too.
struct SplitKVShape {
  int64_t row_tiles = 0;  // tiles of rows of all heads, if all sequences had max_seqlen_q rows
  int64_t key_tiles = 0;  // key tiles of a sequence of max_seqlen_k keys
  int tile_keys = 0;      // keys of a tile
  int head_dim = 0;
  int64_t blocks = 0;  // blocks that are resident at once
  // Clusters of each of kClusterSizes that are resident at once; 0: none may be used.
  std::array<int64_t, std::size(kClusterSizes)> clusters = {};
};

// Splits over clusters if all of them are resident at once, else plans the splits through global
// memory that have the shortest estimated time, if that is less than 90 % of the time without
// splits, and if it saves the time to make the list that they need.
//
// Times are in key tiles: the time that a block takes for one key tile of a work tile. Without
// splits a call takes ceil(row_tiles / blocks) * key_tiles. With n splits there are two candidates:
//
// * n equal splits of ceil(key_tiles / n) tiles. A block takes ceil(n * row_tiles / blocks) splits,
//   one after another; each also stores its partial O, and the last to arrive adds another.
// * n - 1 long splits with a block each, and a short last split. The blocks that are left take
//   `rounds` short splits each, meanwhile, and store their partial O. The length of the long splits
//   is chosen so that both kinds of blocks end at the same time:
//       long = rounds * (key_tiles - (n - 1) * long + store)
//
// Example: 8 users with 384 rows and 4 heads are 96 tiles of 128 rows, on 132 blocks, and 4352 keys
// are 34 tiles. At head dim 128, to store a partial O takes 2.5 and to add one takes 1. Without
// splits the call takes 34 while 36 blocks idle. Two equal splits take 2 * (17 + 3.5) = 41. Two
// unequal splits let the 36 blocks take 3 short splits each: long = 3 * 36.5 / 4 = 27 tiles, the
// short one has 7, and the call takes max(27, 3 * 9.5) + 1 = 29.5: less than .9 * 34 = 30.6. More
// splits take longer. So the plan has 2 splits, with 27 * 128 = 3456 keys in the first.
inline SplitKVPlan plan_split_kv(const SplitKVShape& shape) {
  for (size_t n = 0; n < std::size(kClusterSizes); ++n) {
    if (shape.clusters[n] > 0 && shape.row_tiles <= shape.clusters[n]) {
      return {.reduction = SplitKVReduction::kCluster, .num_splits = kClusterSizes[n]};
    }
  }
  const double store = 1.0 * keys_to_store_partial(shape.head_dim) / shape.tile_keys;
  const double add = 1.0 * kKeysToAddPartial / shape.tile_keys;
  SplitKVPlan plan;
  const double unsplit = 1.0 * ceil_div(shape.row_tiles, shape.blocks) * shape.key_tiles;
  double shortest = std::min(0.9 * unsplit, unsplit - 1.0 * kKeysToMakeList / shape.tile_keys);
  const auto consider = [&](int num_splits, int64_t tiles_per_split, double time) {
    if (time >= shortest) return;
    shortest = time;
    plan = {.reduction = SplitKVReduction::kGlobalMemory,
            .num_splits = num_splits,
            .keys_per_split = static_cast<int>(tiles_per_split) * shape.tile_keys};
  };
  for (int num_splits = 2; num_splits <= kMaxSplits; ++num_splits) {
    const int64_t equal = ceil_div(shape.key_tiles, num_splits);
    const int64_t rounds_of_all = ceil_div(shape.row_tiles * num_splits, shape.blocks);
    consider(num_splits, equal, rounds_of_all * (equal + store + add));

    const int long_splits = num_splits - 1;
    const int64_t blocks_left = shape.blocks - shape.row_tiles * long_splits;
    if (blocks_left <= 0) continue;
    const int64_t rounds = ceil_div(shape.row_tiles, blocks_left);
    const auto long_tiles =
        static_cast<int64_t>(rounds * (shape.key_tiles + store) / (1 + rounds * long_splits));
    const int64_t short_tiles = shape.key_tiles - long_splits * long_tiles;
    if (long_tiles == 0 || short_tiles <= 0) continue;
    const double time = std::max<double>(long_tiles, rounds * (short_tiles + store));
    consider(num_splits, long_tiles, time + long_splits * add);
  }
  return plan;
}

}  // namespace hstu::sm90
