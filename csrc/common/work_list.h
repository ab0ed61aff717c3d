// The work items of one call on a GPU: tiles of rows (forward) or of keys (backward), longest
// first over the whole batch. prepare() makes the list on the device; blocks take items from it one
// by one, so that no length ever has to reach the host.
#pragma once

#include <cuda_runtime.h>

#include "mask.h"

namespace hstu {

struct WorkTile {
  int sequence;
  int tile;
};

struct WorkList {
  int* next = nullptr;         // [1]: the item to hand out next
  int* count = nullptr;        // [1]: tiles in the list
  WorkTile* tiles = nullptr;   // [capacity]
  int capacity = 0;

  // Tiles of `size` rows that B sequences of `total` rows can have.
  static int max_tiles(int64_t total, int batch, int size) {
    return static_cast<int>(total / size) + batch;
  }
};

// Where the tiles of sequence b are counted from, when each sequence begins with a tile of its own:
// no two sequences share a number, and max_tiles() is never exceeded.
HSTU_HOST_DEVICE int64_t first_tile(int64_t row_begin, int b, int size) {
  return row_begin / size + b;
}

#if defined(__CUDACC__)

// Walks over the visible tiles of one tile row (or column), from the last to the first. Each lane
// of a warp classifies one of 32 tiles; all warps of a block walk the same way.
//
//   classify(n)   TileKind of tile n; n may be past the end
template <typename Classify>
class TileWalk {
 public:
  // Tiles [begin, end).
  __device__ TileWalk(int begin, int end, Classify classify)
      : classify_(classify), begin_(begin), window_((end + 31) / 32) {}

  // Moves to the next visible tile; false at the end.
  __device__ bool advance() {
    while (visible_ == 0) {
      if (window_ * 32 <= begin_) return false;
      --window_;
      const TileKind kind = classify_(window_ * 32 + static_cast<int>(threadIdx.x % 32));
      visible_ = __ballot_sync(0xffffffff, kind != TileKind::kEmpty);
      partial_ = __ballot_sync(0xffffffff, kind == TileKind::kPartial);
    }
    const int bit = 31 - __clz(visible_);
    visible_ ^= 1u << bit;
    tile_ = window_ * 32 + bit;
    is_partial_ = partial_ >> bit & 1;
    return true;
  }

  __device__ int tile() const { return tile_; }
  __device__ bool is_partial() const { return is_partial_; }

 private:
  Classify classify_;
  int begin_;
  int window_;  // windows of 32 tiles from this one on are done
  unsigned visible_ = 0;
  unsigned partial_ = 0;
  int tile_ = 0;
  bool is_partial_ = false;
};

#endif

}  // namespace hstu
