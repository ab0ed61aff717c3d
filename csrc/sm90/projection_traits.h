// The tiles and the shared memory of the e4m3 linear maps (projection.h).
#pragma once

#include "../common/math.h"
#include "../params.h"
#include "pipeline.h"
#include "tensors.h"

namespace hstu::sm90 {

struct ProjectionMaps {
  CUtensorMap x;       // boxes of 64 rows and 128 columns
  CUtensorMap weight;  // boxes of 128 rows and 128 columns; see make_projection_maps()
};

// A thread's accumulators are eight neighboring columns of each 32, where wgmma alone would give it
// four pairs: the copy of the weight permutes its rows.
//
//   column of the product = 32 J + 8 b + 2 t + e      t: the thread of four
//   column of the tile    = 32 J + 8 t + 2 b + e

// The first column of a work tile, and its rows: of one sequence, or rows that belong to none.
struct ProjectionTile {
  int column = 0;
  int begin = 0;   // the first row
  int count = 0;   // at most Fp8Params::kBlock; 0: there are none
  int number = 0;  // of the block of rows; see first_tile()
  bool is_quantized = false;
};

// The tiles and the shared memory of the projection to heads of kHeadDim columns or, if kHeadDim is
// 0, of the output map.
template <int kHeadDim_>
struct ProjectionTraits {
  using Element = cutlass::float_e4m3_t;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kStages = 5;
  static constexpr int kColumns = kProjectionColumns;
  static constexpr int kDepth = 128;  // columns of x in a stage
  static constexpr int kClusterSize = 2;
  static constexpr int kThreads = 3 * kWarpgroup;
  static constexpr int kBlocksPerSm = 1;
  static constexpr bool kIsOutput = kHeadDim == 0;
  static constexpr int kHeads = kIsOutput ? 1 : kColumns / larger(kHeadDim, 1);  // of a work tile
  static constexpr int kSlots = 4;                                               // see SharedMemory
  static constexpr int kTileSlots = 8;
  using Mma = SmemMma<Element, kColumns, kDepth>;

  // The largest magnitude of a head's rows, and the largest sum of squares of a row.
  struct Largest {
    float magnitude;
    float squares;
  };

  struct SharedMemory {
    alignas(1024) Element x[kStages][kWarpgroupRows * kDepth];
    alignas(1024) Element weight[kStages][kColumns * kDepth];
    Pipeline<kStages> pipeline;
    // Work tile n has slots n % kSlots and n % kTileSlots. The producer is at most kStages stages
    // ahead, and a warpgroup at most two work tiles ahead of the other one, because they take
    // turns: so what a slot has is read before it is written again.
    cutlass::arch::ClusterBarrier has_largest[kSlots][2];
    Largest largest[kSlots][2][4][kHeads];  // of each warp of a warpgroup
    ProjectionTile tiles[kTileSlots];
    alignas(16) float weight_descale[kSlots][kColumns];
    alignas(16) float bias[kSlots][kColumns];
    // Sequence n of the batch is number n + 1 here. Number 0 has the rows before the first
    // sequence, and the last number those after the last one.
    int first_block[kMaxProjectionSequences + 3];
    int first_row[kMaxProjectionSequences + 3];
    int work_tiles;
  };
  static_assert(sizeof(SharedMemory) <= kSharedMemory);
  static_assert(kStages <= 2 * kSlots - 3 && kStages <= 2 * kTileSlots - 5 && kSlots >= 4);
  static_assert(kIsOutput || kHeads * kHeadDim == kColumns);
};

}  // namespace hstu::sm90
