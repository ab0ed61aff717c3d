// The reductions of split-KV: they add the partial O of the splits of a row tile, through global
// memory or over a cluster. A partial O is stored in the order of registers: four values of each
// thread of a warpgroup, which are 8 columns of all rows, then the next four.
#pragma once

#include "../common/ptx.h"
#include "pipeline.h"
#include "stores.h"

namespace hstu::sm90 {

// Stores the partial O of a warpgroup.
template <typename Sum>
HSTU_DEVICE void store_partial(const Sum& sum, float* to) {
  to += reload_thread_idx() % kWarpgroup * 4;
#pragma unroll
  for (int n = 0; n < size(sum); n += 4) {
    *reinterpret_cast<float4*>(to + n * kWarpgroup) = {sum(n), sum(n + 1), sum(n + 2), sum(n + 3)};
  }
}

// sum += the partial O of another split. Up to 64 values are in flight, because a load takes about
// 1 us.
template <typename Sum>
HSTU_DEVICE void add_partial(const float* from, Sum& sum) {
  constexpr int kSize = decltype(size(sum))::value;
  constexpr int kAtOnce = kSize > 64 ? 32 : kSize;
  from += reload_thread_idx() % kWarpgroup * 4;
#pragma unroll
  for (int first = 0; first < kSize; first += kAtOnce) {
    float4 parts[kAtOnce / 4];
#pragma unroll
    for (int n = 0; n < kAtOnce / 4; ++n) {
      // NOTE: another block has written it, so it must not come from the L1 cache.
      parts[n] = __ldcg(reinterpret_cast<const float4*>(from + (first + n * 4) * kWarpgroup));
    }
#pragma unroll
    for (int n = 0; n < kAtOnce / 4; ++n) {
      // NOTE: adding 0 gives the bits of sum_partials(), which begins with 0: -0 becomes +0.
      const float values[4] = {parts[n].x, parts[n].y, parts[n].z, parts[n].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum(first + n * 4 + i) = (0.0f + sum(first + n * 4 + i)) + values[i];
      }
    }
  }
}

// sum = the columns from `first_column` on of up to `count` partial O of `partial_size` values
// each. Bit n of `filled` tells whether split n has stored one.
template <typename Sum>
HSTU_DEVICE void sum_partials(const float* from, uint32_t filled, int count, int partial_size,
                              int first_column, Sum& sum) {
  constexpr int kPieces = decltype(size(sum))::value / 4;
  constexpr int kAtOnce = 4;  // splits in flight: a load takes about 1 us
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
        // NOTE: another block has written it, so it must not come from the L1 cache.
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

// Returns in all threads of a warpgroup the value of its first thread, and synchronizes them.
HSTU_DEVICE bool broadcast_from_first_thread(bool value, int warpgroup) {
  const int barrier = static_cast<int>(barrier_id(NamedBarriers::kWarpgroupWG0, warpgroup));
  return ptx::barrier_red_or<kWarpgroup>(barrier, value && reload_thread_idx() % kWarpgroup == 0);
}

// True if `others` splits have arrived, whose partial O may then be read. Called by a warpgroup.
HSTU_DEVICE bool have_arrived(const int* arrived, int others, int warpgroup) {
  const int count = reload_thread_idx() % kWarpgroup == 0 ? ptx::ld_acquire(arrived) : 0;
  return broadcast_from_first_thread(count == others, warpgroup);
}

// Arrives, after which others may read the partial O that this warpgroup has stored. True if
// `others` splits had arrived before, whose partial O may then be read. Called by a warpgroup.
HSTU_DEVICE bool is_last_arrival(int* arrived, int others, int warpgroup) {
  sync_warpgroup(warpgroup);  // all threads have stored
  const int before = reload_thread_idx() % kWarpgroup == 0 ? ptx::atom_add_acq_rel(arrived, 1) : 0;
  return broadcast_from_first_thread(before == others, warpgroup);
}

// Adds a warpgroup's partial O over the blocks of a cluster, in the order of their ranks, through
// `sums` in shared memory. Each block adds every kClusterSize-th group of 8 columns, and calls
// store(column, m, x, y) with the sums of columns `column` and `column + 1` of row m of the thread.
// Called by all consumer warpgroups; the producer may have ended.
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
  cluster_sync();  // the partial O of all blocks are in shared memory
  const uint32_t own = cast_smem_ptr_to_uint(sums);
  const int rank = static_cast<int>(block_rank_in_cluster());
  // NOTE: all loads are in flight at once, because one takes about 1 us.
  constexpr int kOwnPieces = ceil_div(kPieces, kClusterSize);
  float4 parts[kOwnPieces][kClusterSize];
#pragma unroll
  for (int n = 0; n < kOwnPieces; ++n) {
    const int piece = min(rank + n * kClusterSize, kPieces - 1);
#pragma unroll
    for (int block = 0; block < kClusterSize; ++block) {
      const uint32_t from = set_block_rank(own + piece * kPieceSize * sizeof(float), block);
      parts[n][block] = ptx::ld_shared_cluster_v4(from);
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
  cluster_sync();  // the other blocks have read this block's shared memory
}

}  // namespace hstu::sm90
