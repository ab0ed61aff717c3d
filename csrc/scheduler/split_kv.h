// Split-KV: several work tiles divide the keys of one tile of rows. Since O needs no rescaling,
// their partial O are added at the end.
#pragma once

#include "../common/mask.h"

namespace hstu {

// The memory in which the partial O of the splits of a tile of rows are added.
enum class SplitKVReduction : int {
  kNone,          // there is one split
  kCluster,       // in distributed shared memory: each split is one block of a cluster
  kGlobalMemory,  // in global memory, by the last split to arrive
};

// Divides the keys of each tile of rows among splits.
struct SplitKVPlan {
  SplitKVReduction reduction = SplitKVReduction::kNone;
  int num_splits = 1;
  // For kGlobalMemory: the keys of each split but the last, which gets the remaining keys. A fixed
  // length keeps the order of summation of a sequence independent of the rest of the batch.
  // A cluster divides the key tiles that a tile of rows sees, see clip_to_cluster_rank().
  int keys_per_split = INT_MAX;

  HSTU_HOST_DEVICE Interval keys_of(int split) const {
    return {split * keys_per_split,
            split + 1 < num_splits ? (split + 1) * keys_per_split : INT_MAX};
  }
};

}  // namespace hstu
