// The work of one call on a GPU: tiles of rows (forward) or of keys (backward), those with the
// longest processing time first. prepare_scheduler() makes the list on the device, and blocks take
// work from it by an atomic counter, so that no length ever has to reach the host.
//
// A work tile is one listed tile for one head (or group of heads, or split): each listed tile
// stands for WorkList::work_per_tile work tiles, and work_index counts work tiles in the order of
// the list.
#pragma once

#include <cuda_runtime.h>

#include "../common/mask.h"
#include "../common/pages.h"
#if defined(__CUDACC__)
#include "../common/ptx.h"
#endif

namespace hstu {

struct alignas(16) SequenceTile {
  Sequence sequence;
  int sequence_index = 0;
  int index = 0;
};

// A tile of rows of the forward, the keys that its rows see, and the pages of its sequence.
struct alignas(16) PreparedTile {
  static constexpr int kPartRows = 64;
  static constexpr int kMaxParts = 3;    // parts of a tile that prepare_scheduler() prepares
  static constexpr int kTileKeys = 128;  // keys of a key tile

  SequenceTile tile;
  SpanSummary summary;  // which padded keys its rows see
  PageList pages;
  int keys[4] = {};  // for each 64 rows: end of the padded keys that some of these rows see
};

// The number of the first tile of sequence b, if each sequence begins with a tile of its own. No
// two sequences share a tile number, and all numbers are below max_tiles().
HSTU_HOST_DEVICE int64_t first_tile(int64_t row_begin, int b, int size) {
  return row_begin / size + b;
}

// The summaries of all tiles of rows. They exist for every mask that is given row by row.
struct SpanSummaries {
  SpanSummary* data = nullptr;  // [heads, tiles], or null
  int heads = 0;                // 1: all heads have the same mask
  int tiles = 0;                // see first_tile()

  HSTU_HOST_DEVICE const SpanSummary& at(int64_t tile, int head) const {
    return data[(heads == 1 ? 0 : int64_t{head} * tiles) + tile];
  }
};

struct WorkList {
  int* next = nullptr;   // [1]: how many work tiles were handed out beyond the first of each block
  int* count = nullptr;  // [1]: number of tiles in the list
  SequenceTile* tiles = nullptr;  // [capacity]; null: no list
  int capacity = 0;
  // If this is > 0, there is no list, because sequences are short or work tiles are few: no
  // sequence has more tiles than this, if max_seqlen_q and max_seqlen_k are right. In the forward,
  // work tile n of a block has the number blockIdx + n * gridDim, where the last tile of each
  // sequence comes first, then the one before it, and so on. The backward has another order, and if
  // this is 1, a block takes all tiles of a sequence.
  int sequence_tiles = 0;
  int work_per_tile = 1;  // work tiles of each listed tile
  Interval unlisted;      // the numbers of tiles that are not listed: blocks begin with them
  SpanSummaries summaries;
  // [capacity], by the numbers of tiles; or null: each block finds these itself.
  PreparedTile* prepared_tiles = nullptr;

  // Classifies tile n of keys for tile m of rows.
  template <int kRows, int kKeys>
  HSTU_HOST_DEVICE TileKind classify(const MaskParams& mask, const SequenceTile& work, int head,
                                     int m, int n) const {
    const Sequence& sequence = work.sequence;
    const int k0 = n * kKeys;
    const int k1 = static_cast<int>(clamp(k0 + kKeys, 0, sequence.k_len));
    if (summaries.data) {
      const int64_t first = first_tile(sequence.q_begin, work.sequence_index, kRows);
      return summaries.at(first + m, head).classify(k0, k1);
    }
    const int r0 = m * kRows;
    const int r1 = static_cast<int>(clamp(r0 + kRows, 0, sequence.q_len));
    return Mask(mask, sequence, head).classify(r0, r1, k0, k1);
  }

  // The largest number of tiles of `size` rows that `batch` sequences with `total` rows can have.
  static int max_tiles(int64_t total, int batch, int size) {
    return static_cast<int>(total / size) + batch;
  }
};

// Finds the tile with number `tile_index`, see first_tile(). Returns false if it has no rows.
HSTU_HOST_DEVICE bool find_row_tile(const BatchParams& batch, int64_t tile_index, int size,
                                    SequenceTile& found) {
  int low = 0, high = batch.batch - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    const int64_t begin = clamp(batch.cu_seqlens_q[middle], 0, batch.total_q);
    if (first_tile(begin, middle, size) <= tile_index) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  found.sequence = load_sequence(batch, low);
  found.sequence_index = low;
  const int64_t tile = tile_index - first_tile(found.sequence.q_begin, low, size);
  found.index = static_cast<int>(tile);
  return tile >= 0 && tile * size < found.sequence.q_len;
}

// Two ranges [begin, end) of the key tiles that some row of a tile of rows sees. In a deterministic
// backward, these key tiles add to the row tile's dQ in ascending order.
// NOTE: only these ranges, and not the mask, decide whether a key tile adds. With inconsistent
// offsets sequences share tiles of rows, and blocks could wait for a key tile that never adds.
struct alignas(16) TileSpans {
  int begin[2];
  int end[2];

  HSTU_HOST_DEVICE bool contains(int tile) const {
    return (begin[0] <= tile && tile < end[0]) || (begin[1] <= tile && tile < end[1]);
  }
  HSTU_HOST_DEVICE int count_before(int tile) const {
    int count = 0;
    for (int n = 0; n < 2; ++n) {
      const int last = tile < end[n] ? tile : end[n];
      if (begin[n] < last) count += last - begin[n];
    }
    return count;
  }
};

#if defined(__CUDACC__)

// The tile scheduler of a block, which gives it one work tile after another. While the block
// processes a work tile, request_next() gets the index of the next one; while the block stores its
// results, fetch_next() copies the description of the next tile.
class WorkQueue {
 public:
  struct Entry {
    SequenceTile tile;
    int index_in_tile;  // below work_per_tile; -1: there is no more work
  };
  struct SharedMemory {
    Entry entry;
    Entry next;
  };

  __device__ WorkQueue(const WorkList& list, SharedMemory& smem) : list_(list), smem_(smem) {
    if (threadIdx.x == 0) set_next(blockIdx.x);
    fetch_next();
    advance();
  }

  // A queue of tiles of rows. If there is no list, each block has one work tile.
  __device__ WorkQueue(const WorkList& list, SharedMemory& smem, const BatchParams& batch,
                       int tile_rows)
      : list_(list), smem_(smem) {
    if (threadIdx.x == 0) {
      if (list.tiles) {
        set_next(blockIdx.x);
      } else {
        const int work_index = static_cast<int>(blockIdx.x);
        const bool found =
            find_row_tile(batch, work_index / list.work_per_tile, tile_rows, smem.next.tile);
        smem.next.index_in_tile = found ? work_index % list.work_per_tile : -1;
      }
    }
    if (list.tiles) fetch_next();
    advance();
  }

  // True if there is a work tile: number index_in_tile() of tile().
  __device__ bool has_work() const { return index_in_tile() >= 0; }
  static constexpr bool is_shared() { return false; }
  __device__ const SequenceTile& tile() const { return smem_.entry.tile; }
  __device__ int index_in_tile() const { return smem_.entry.index_in_tile; }

  // The three steps to the next work tile, called by all threads. request_next() waits for device
  // memory: call it where other copies are waited for.
  __device__ void request_next() {
    if (threadIdx.x != 0) return;
    if (list_.tiles) {
      set_next(gridDim.x + atomicAdd(list_.next, 1));
    } else {
      smem_.next.index_in_tile = -1;
    }
  }
  __device__ void fetch_next() {
    Entry& next = smem_.next;
    if (threadIdx.x != 0 || next.index_in_tile < 0) return;
    const char* from = reinterpret_cast<const char*>(list_.tiles + next.tile.index);
    char* to = reinterpret_cast<char*>(&next.tile);
#pragma unroll
    for (int n = 0; n < static_cast<int>(sizeof(SequenceTile)); n += 16) {
      ptx::cp_async_cached_16(from + n, to + n);
    }
  }
  __device__ void advance() {
    __syncthreads();  // all threads are done with the last work tile
    if (threadIdx.x == 0) {
      ptx::cp_async_wait_all();
      smem_.entry = smem_.next;
    }
    __syncthreads();
  }

 private:
  // Until fetch_next(), tile.index holds the tile's place in the list.
  __device__ void set_next(int work_index) {
    const int tile_index = work_index / list_.work_per_tile;
    smem_.next.tile.index = tile_index;
    smem_.next.index_in_tile = tile_index < *list_.count ? work_index % list_.work_per_tile : -1;
  }

  const WorkList& list_;
  SharedMemory& smem_;
};

// A queue with the methods of WorkQueue that needs no list, for short sequences. Block (b, head, z)
// takes every gridDim.z-th tile of kSize rows (or keys) of sequence b, most often one. Blocks with
// the last tiles, which have most keys under a causal mask, come first.
//
// With kIsCluster, the blocks (b, head, :) are a cluster, and each takes the tile of keys of its
// rank. If the sequence has more tiles than that, the first block takes all of them in order.
template <int kSize, bool kByKeys, bool kIsCluster = false>
class SequenceQueue {
 public:
  struct SharedMemory {
    SequenceTile tile;
    int head;
  };

  __device__ SequenceQueue(SharedMemory& smem, const BatchParams& batch) : smem_(smem) {
    if (threadIdx.x == 0) {
      const int b = static_cast<int>(blockIdx.x);
      const unsigned index = kIsCluster ? blockIdx.z : gridDim.z - 1 - blockIdx.z;
      smem_.tile = {load_sequence(batch, b), b, static_cast<int>(index)};
      smem_.head = static_cast<int>(blockIdx.y);
    }
    __syncthreads();
  }

  __device__ bool has_work() const {
    if (kIsCluster && blockIdx.z > 0 && !is_shared()) return false;
    return tile().index * kSize < (kByKeys ? tile().sequence.k_len : tile().sequence.q_len);
  }
  // True if the blocks of a cluster share the sequence.
  __device__ bool is_shared() const {
    return kIsCluster && gridDim.z > 1 &&
           tile().sequence.k_len <= static_cast<int>(gridDim.z) * kSize;
  }
  __device__ const SequenceTile& tile() const { return smem_.tile; }
  __device__ int index_in_tile() const { return smem_.head; }
  __device__ void request_next() {}
  __device__ void fetch_next() {}
  __device__ void advance() {
    __syncthreads();  // all threads are done with the last tile
    if (threadIdx.x == 0) {
      smem_.tile.index += kIsCluster && !is_shared() ? 1 : static_cast<int>(gridDim.z);
    }
    __syncthreads();
  }

 private:
  SharedMemory& smem_;
};

// One bit for each tile that a work tile could meet: whether it is visible, and whether it is
// partial. The map is filled before the main loop, whose accumulators take the registers, and is
// kept in shared memory.
struct TileMap {
  // NOTE: tiles from kTiles on count as partial, which is correct for every tile, but slower.
  static constexpr int kTiles = 2048;

  int count;
  unsigned visible[kTiles / 32];
  unsigned partial[kTiles / 32];

  // Fills the map for `tiles` tiles, but does not set `count`. Called by thread `thread` of
  // `threads`, which are whole warps; classify(n) returns the TileKind of tile n.
  // NOTE: `tiles` may be in shared memory, so that it takes no register while classify() runs.
  template <typename Classify>
  __device__ void fill(const int& tiles, int thread, int threads, Classify classify) {
    for (int n = thread; n / 32 * 32 < min(tiles, kTiles); n += threads) {
      const TileKind kind = n < tiles ? classify(n) : TileKind::kEmpty;
      const unsigned is_visible = __ballot_sync(0xffffffff, kind != TileKind::kEmpty);
      const unsigned is_partial = __ballot_sync(0xffffffff, kind == TileKind::kPartial);
      if (n % 32 == 0) {
        visible[n / 32] = is_visible;
        partial[n / 32] = is_partial;
      }
    }
  }

  __device__ int first() const { return after(-1); }
  __device__ int last() const { return before(count); }

  // The last visible tile before tile n; -1: there is none.
  __device__ int before(int n) const {
    unsigned allowed = (1u << n % 32) - 1;
    for (int word = n / 32; word >= 0; --word) {
      const unsigned bits = (word < kTiles / 32 ? visible[word] : 0xffffffff) & allowed;
      if (bits != 0) return word * 32 + 31 - __clz(bits);
      allowed = 0xffffffff;
    }
    return -1;
  }

  // The first visible tile after tile n; -1: there is none.
  __device__ int after(int n) const {
    unsigned allowed = 0xffffffff << (n + 1) % 32;
    for (int word = (n + 1) / 32; word * 32 < count; ++word) {
      const unsigned bits = (word < kTiles / 32 ? visible[word] : 0xffffffff) & allowed;
      const int found = word * 32 + __ffs(bits) - 1;
      if (bits != 0) return found < count ? found : -1;
      allowed = 0xffffffff;
    }
    return -1;
  }

  __device__ bool contains(int n) const { return n >= kTiles || (visible[n / 32] >> n % 32 & 1); }
  __device__ bool has_partial(int n) const {
    return n >= kTiles || (partial[n / 32] >> n % 32 & 1);
  }
};

#endif

}  // namespace hstu
