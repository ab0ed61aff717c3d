// The work items of one call on a GPU: tiles of rows (forward) or of keys (backward), longest
// first over the whole batch. prepare() makes the list on the device; blocks take items from it one
// by one, so that no length ever has to reach the host.
#pragma once

#include <cuda_runtime.h>

#include "mask.h"

namespace hstu {

struct alignas(16) WorkTile {
  Sequence sequence;
  int sequence_number = 0;
  int tile = 0;
};

struct WorkList {
  int* next = nullptr;        // [1]: the item to hand out next
  int* count = nullptr;       // [1]: tiles in the list
  WorkTile* tiles = nullptr;  // [capacity]
  int capacity = 0;
  int parts = 1;  // items of each tile

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

// The key tiles that some row of a tile of rows sees: [begin, end) twice.
struct TileSpans {
  int begin[2];
  int end[2];
};

#if defined(__CUDACC__)

// How a block gets its items. While it works on one, it learns which is next, and while it stores
// results, it copies that one's tile.
class WorkQueue {
 public:
  struct SharedMemory {
    WorkTile tile[2];
    int part[2];  // of the tile; -1: there is no item
    int next;
  };

  __device__ WorkQueue(const WorkList& list, SharedMemory& shared) : list_(list), shared_(shared) {
    if (threadIdx.x == 0) set_next(blockIdx.x);
    fetch();
    advance();
  }

  // Whether there is an item: part() of tile().
  __device__ bool more() const { return part() >= 0; }
  __device__ const WorkTile& tile() const { return shared_.tile[slot_]; }
  __device__ int part() const { return shared_.part[slot_]; }

  // The three steps to the next item, by all threads. The first waits for device memory, and is
  // best taken where other copies are waited for.
  __device__ void ask() {
    if (threadIdx.x == 0) set_next(gridDim.x + atomicAdd(list_.next, 1));
  }
  __device__ void fetch() {
    if (threadIdx.x != 0 || shared_.part[slot_ ^ 1] < 0) return;
    const char* from = reinterpret_cast<const char*>(list_.tiles + shared_.next);
    const auto to = static_cast<unsigned>(__cvta_generic_to_shared(&shared_.tile[slot_ ^ 1]));
#pragma unroll
    for (int n = 0; n < static_cast<int>(sizeof(WorkTile)); n += 16) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to + n), "l"(from + n));
    }
  }
  __device__ void advance() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    slot_ ^= 1;
  }

 private:
  __device__ void set_next(int item) {
    shared_.next = item / list_.parts;
    shared_.part[slot_ ^ 1] = shared_.next < *list_.count ? item % list_.parts : -1;
  }

  const WorkList& list_;
  SharedMemory& shared_;
  int slot_ = 0;
};

// Which of the tiles that an item meets are visible, and which of those are partial: one bit each.
// Found before the sums take the registers; it lies in shared memory.
struct TileMap {
  // NOTE: later tiles count as partial, which is right for every tile, and slower.
  static constexpr int kTiles = 2048;

  int count;
  unsigned visible[kTiles / 32];
  unsigned partial[kTiles / 32];

  // By all threads of the block, for `tiles` tiles; classify(n) is the TileKind of tile n.
  template <typename Classify>
  __device__ void fill(int tiles, Classify classify) {
    if (threadIdx.x == 0) count = tiles;
    for (int n = threadIdx.x; n / 32 * 32 < min(tiles, kTiles); n += blockDim.x) {
      const TileKind kind = n < tiles ? classify(n) : TileKind::kEmpty;
      const unsigned is_visible = __ballot_sync(0xffffffff, kind != TileKind::kEmpty);
      const unsigned is_partial = __ballot_sync(0xffffffff, kind == TileKind::kPartial);
      if (n % 32 == 0) {
        visible[n / 32] = is_visible;
        partial[n / 32] = is_partial;
      }
    }
  }
};

// Goes through the visible tiles of a map, from the last to the first.
class TileWalk {
 public:
  __device__ explicit TileWalk(const TileMap& map) : map_(map), word_((map.count + 31) / 32) {}

  // Moves to the next visible tile; false at the end.
  __device__ bool advance() {
    while (bits_ == 0) {
      if (word_ == 0) return false;
      --word_;
      if (word_ < TileMap::kTiles / 32) {
        bits_ = map_.visible[word_];
      } else {
        const int rest = map_.count - word_ * 32;
        bits_ = rest < 32 ? (1u << rest) - 1 : 0xffffffff;
      }
    }
    tile_ = word_ * 32 + 31 - __clz(bits_);
    bits_ ^= 1u << tile_ % 32;
    return true;
  }

  __device__ int tile() const { return tile_; }
  __device__ bool is_partial() const {
    return tile_ >= TileMap::kTiles || (map_.partial[tile_ / 32] >> tile_ % 32 & 1);
  }

 private:
  const TileMap& map_;
  int word_;           // words from this one on are begun
  unsigned bits_ = 0;  // tiles of this word that are still to come
  int tile_ = 0;
};

#endif

}  // namespace hstu
