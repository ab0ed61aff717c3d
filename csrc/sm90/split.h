// An item whose keys are shared: by the blocks of a cluster, each of which takes some of its tiles,
// or by items of the list of their own. Since the sums need no rescaling, they are added up in the
// end.
#pragma once

#include "../common/pages.h"
#include "../scheduler/work_list.h"
#include "stores.h"

namespace hstu::sm90 {

// Shares of fixed length, so that which keys add up to a sum depends on nothing else in the batch.
// Each leaves its sum in device memory, and the last one to come adds them up, in the order of
// keys; the first of two adds what the other has left to its own. All first shares come first in
// the list, and the last ones, which may be shorter, last of all: of these, blocks that got none of
// the others take several.
struct SplitKV {
  int num_splits = 1;
  int keys_per_split = INT_MAX;  // the last split has all keys that follow
  // [row tiles, heads, warpgroups, num_splits, 64 * head dim], see first_tile()
  float* partial_out = nullptr;
  int* arrived = nullptr;  // [row tiles, heads, warpgroups]: splits that have stored a partial O

  HSTU_HOST_DEVICE Interval keys_of(int n) const {
    return {n * keys_per_split, n + 1 < num_splits ? (n + 1) * keys_per_split : INT_MAX};
  }
};

// A warpgroup's sums, in the order of registers: four values of each thread and then the next four.
template <typename Sum>
HSTU_DEVICE void store_partial(const Sum& sum, float* to) {
  to += reload_thread_idx() % kWarpgroup * 4;
#pragma unroll
  for (int n = 0; n < size(sum); n += 4) {
    *reinterpret_cast<float4*>(to + n * kWarpgroup) = {sum(n), sum(n + 1), sum(n + 2), sum(n + 3)};
  }
}

// Adds what store_partial() has left to a sum of the same shape.
template <typename Sum>
HSTU_DEVICE void add_partial(const float* from, Sum& sum) {
  constexpr int kSize = decltype(size(sum))::value;
  constexpr int kAtOnce = kSize > 64 ? 32 : kSize;  // each answer takes most of a microsecond
  from += reload_thread_idx() % kWarpgroup * 4;
#pragma unroll
  for (int first = 0; first < kSize; first += kAtOnce) {
    float4 parts[kAtOnce / 4];
#pragma unroll
    for (int n = 0; n < kAtOnce / 4; ++n) {
      // NOTE: from the L2 cache, where others have written it.
      parts[n] = __ldcg(reinterpret_cast<const float4*>(from + (first + n * 4) * kWarpgroup));
    }
#pragma unroll
    for (int n = 0; n < kAtOnce / 4; ++n) {
      // NOTE: 0 first, as in sum_partials(): -0 and -0 would be -0.
      const float values[4] = {parts[n].x, parts[n].y, parts[n].z, parts[n].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum(first + n * 4 + i) = (0.0f + sum(first + n * 4 + i)) + values[i];
      }
    }
  }
}

// The sum of what store_partial() has left of some columns, from `first_column` on, in `count`
// places of `size` values, of which those are filled whose bit is set.
template <typename Sum>
HSTU_DEVICE void sum_partials(const float* from, uint32_t filled, int count, int partial_size,
                              int first_column, Sum& sum) {
  constexpr int kPieces = decltype(size(sum))::value / 4;
  constexpr int kAtOnce = 4;  // asked for at once: each answer takes most of a microsecond
  from += reload_thread_idx() % kWarpgroup * 4 + first_column * kWarpgroupRows;
  clear(sum);
#pragma unroll 1
  for (int first = 0; first < count; first += kAtOnce) {
    float4 parts[kAtOnce][kPieces] = {};
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (!(filled >> (first + n) & 1)) continue;
      const float* const partial = from + (first + n) * partial_size;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        // NOTE: from the L2 cache, where others have written it.
        parts[n][piece] = __ldcg(reinterpret_cast<const float4*>(partial) + piece * kWarpgroup);
      }
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        sum(piece * 4) += parts[n][piece].x;
        sum(piece * 4 + 1) += parts[n][piece].y;
        sum(piece * 4 + 2) += parts[n][piece].z;
        sum(piece * 4 + 3) += parts[n][piece].w;
      }
    }
  }
}

// What the first thread of a warpgroup says. By the warpgroup, which meets here.
HSTU_DEVICE bool broadcast_from_first_thread(bool value, int warpgroup) {
  int result = value && reload_thread_idx() % kWarpgroup == 0;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.s32 p, %0, 0;\n"
      "barrier.cta.red.or.pred q, %1, %2, p;\n"
      "selp.s32 %0, 1, 0, q;\n"
      "}\n"
      : "+r"(result)
      : "r"(static_cast<int>(NamedBarrier::kWarpgroup0) + warpgroup), "n"(kWarpgroup)
      : "memory");
  return result != 0;
}

// Whether `others` have arrived; if so, what they wrote can be read. By a warpgroup.
HSTU_DEVICE bool have_arrived(const int* arrived, int others, int warpgroup) {
  int count = 0;
  if (reload_thread_idx() % kWarpgroup == 0) {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(arrived) : "memory");
  }
  return broadcast_from_first_thread(count == others, warpgroup);
}

// The same, of this warpgroup's arrival, after which others can read what it wrote.
HSTU_DEVICE bool is_last_arrival(int* arrived, int others, int warpgroup) {
  const int barrier = static_cast<int>(NamedBarrier::kWarpgroup0) + warpgroup;
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kWarpgroup) : "memory");  // all have written
  int before = 0;
  if (reload_thread_idx() % kWarpgroup == 0) {
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(arrived)
                 : "memory");
  }
  return broadcast_from_first_thread(before == others, warpgroup);
}

// The value of one lane, in all lanes of a warp.
template <typename Value>
HSTU_DEVICE Value of_lane(Value value, int lane) {
  static_assert(sizeof(Value) % sizeof(uint32_t) == 0);
  uint32_t words[sizeof(Value) / sizeof(uint32_t)];
  memcpy(words, &value, sizeof(Value));
#pragma unroll
  for (uint32_t& word : words) word = __shfl_sync(0xffffffff, word, lane);
  memcpy(&value, words, sizeof(Value));
  return value;
}

// The tile of find_row_tile(), or one without rows, and the sequence's pages. By a warp, each lane
// of which looks at a sequence of its own: a block that has few items would wait for each step of a
// search.
HSTU_DEVICE bool find_paged_tile(const ForwardParams& params, int tile_index, int size,
                                 SequenceTile& found, PageList& pages) {
  const BatchParams& batch = params.batch;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  bool exists = false;
  if (lane == 0) found = {};  // NOTE: offsets that lie may begin behind it
  for (int first = 0; first < batch.batch; first += 32) {
    const int b = min(first + lane, batch.batch - 1);
    const Sequence sequence = load_sequence(batch, b);
    const PageList list(params.paged, b);
    const int64_t tile = tile_index - first_tile(sequence.q_begin, b, size);
    // The last sequence whose first tile is not behind it
    const unsigned begun = __ballot_sync(0xffffffff, first + lane < batch.batch && tile >= 0);
    if (begun == 0) break;
    const int owner = 31 - __clz(begun);
    const SequenceTile last = of_lane(SequenceTile{sequence, b, static_cast<int>(tile)}, owner);
    const PageList last_pages = of_lane(list, owner);
    exists = int64_t{last.index} * size < last.sequence.q_len;
    if (lane == 0) {
      found = exists ? last : SequenceTile{};
      pages = last_pages;
    }
    if (owner < 31) break;
  }
  return exists;
}

// Leaves of what an item's rows see the tiles that the block takes.
template <int kKeys, int kClusterSize>
HSTU_DEVICE void clip_to_cluster_rank(Interval (&hull)[2]) {
  Interval tiles[2];
  for (int n = 0; n < 2; ++n) {
    tiles[n] = {hull[n].begin / kKeys, (hull[n].end + kKeys - 1) / kKeys};
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

// Adds up a warpgroup's sums over the blocks of the cluster, in the order of their ranks. Each
// leaves its own in shared memory in the order of registers, four values of each thread and then
// the next four, which are 8 columns of all rows; each adds up every kSplits-th of these pieces,
// and calls store(column, m, x, y) for what it finds of columns `column` and the next, and of row m
// of the thread. By all warpgroups that have sums; others of the block may have ended.
template <int kClusterSize, typename Sum, typename Store>
HSTU_DEVICE void reduce_sums_over_cluster(const Sum& sum, float* sums, Store store) {
  constexpr int kPieces = decltype(size(sum))::value / 4;
  constexpr int kPieceSize = kWarpgroup * 4;
  const int thread = reload_thread_idx() % kWarpgroup;
  sums += thread * 4;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int n = piece * 4;
    *reinterpret_cast<float4*>(sums + piece * kPieceSize) = {sum(n), sum(n + 1), sum(n + 2),
                                                             sum(n + 3)};
  }
  compiler_barrier();
  cluster_sync();
  const uint32_t own = cast_smem_ptr_to_uint(sums);
  const int rank = static_cast<int>(block_rank_in_cluster());
  // NOTE: all of it is asked for at once, since each answer takes a microsecond.
  constexpr int kOwnPieces = (kPieces + kClusterSize - 1) / kClusterSize;
  float4 parts[kOwnPieces][kClusterSize];
#pragma unroll
  for (int n = 0; n < kOwnPieces; ++n) {
    const int piece = min(rank + n * kClusterSize, kPieces - 1);
#pragma unroll
    for (int block = 0; block < kClusterSize; ++block) {
      const uint32_t from = set_block_rank(own + piece * kPieceSize * sizeof(float), block);
      float4& part = parts[n][block];
      asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w)
                   : "r"(from));
    }
  }
#pragma unroll
  for (int n = 0; n < kOwnPieces; ++n) {
    const int piece = rank + n * kClusterSize;
    float4 total = parts[n][0];
#pragma unroll
    for (int block = 1; block < kClusterSize; ++block) {
      total.x += parts[n][block].x;
      total.y += parts[n][block].y;
      total.z += parts[n][block].z;
      total.w += parts[n][block].w;
    }
    if (piece >= kPieces) break;
    const int column = piece * 8 + thread % 4 * 2;
    store(column, 0, total.x, total.y);
    store(column, 1, total.z, total.w);
  }
  cluster_sync();  // the other blocks have read what is here
}

}  // namespace hstu::sm90
