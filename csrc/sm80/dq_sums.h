// Sums of dQ over the key tiles of a sequence, in fp32 and in device memory.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/cluster_sm90.hpp>

#include "../common/ptx.h"
#include "../scheduler/work_list.h"
#include "tile_config.h"

namespace hstu::sm80 {

// An fp32 accumulator of a product of tiles in device memory. Elements are ordered so that a warp
// adds to whole cache lines.
template <int kThreads>
struct DeviceSum {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static constexpr int kVector = 4;  // red.v4 needs compute capability 9.0
#else
  static constexpr int kVector = 1;
#endif

  static HSTU_DEVICE int index(int n) {
    return n / kVector * (kVector * kThreads) + static_cast<int>(threadIdx.x) * kVector;
  }

  // The place of element n of the fragment.
  static HSTU_DEVICE int place(int n) { return index(n / kVector * kVector) + n % kVector; }

  template <typename Sum>
  static HSTU_DEVICE void add(const Sum& part, float* sum) {
#pragma unroll
    for (int n = 0; n < Sum::kCount; n += kVector) {
      if constexpr (kVector == 4) {
        ptx::red_add_v4(sum + index(n), part.values[n], part.values[n + 1], part.values[n + 2],
                        part.values[n + 3]);
      } else {
        atomicAdd(sum + index(n), part.values[n]);
      }
    }
  }

  template <typename Sum>
  static HSTU_DEVICE void load(const float* sum, Sum& whole) {
#pragma unroll
    for (int n = 0; n < Sum::kCount; n += kVector) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) whole.values[n + i] = sum[index(n) + i];
    }
  }
};

// Adds the sum that earlier key tiles of the sequence have stored at `total`, where each thread has
// its own elements, and stores the new sum there for later key tiles.
template <int kThreads, int kKeys, typename Sum>
HSTU_DEVICE void add_to_total(Sum& dq, float* total, const SequenceTile& work) {
  const bool is_first = work.index == 0;
  const bool is_last = (work.index + 1) * kKeys >= work.sequence.k_len;
#pragma unroll
  for (int n = 0; n < Sum::kCount; ++n) {
    float& at = total[DeviceSum<kThreads>::place(n)];
    if (!is_first) dq.values[n] += at;
    if (!is_last) at = dq.values[n];
  }
}

// dQ of a sequence whose key tiles are processed by the blocks of a cluster, one tile by each.
// Block n sums dQ of row tile n, the last one that it processes: it adds the parts that the other
// blocks have stored in device memory, in the order of the blocks. kSize is the number of elements
// of a tile of dQ.
template <int kSize, typename Sum, int kThreads>
struct ClusterSums {
  struct SharedMemory {
    uint64_t barrier;  // where the other blocks arrive when they have stored their parts
    int has_part[kMaxClusterOfSequence];  // whether there is a part of each of them
    int stored;  // the row tile whose part this block has stored, but not handed over; -1: none
  };

  // Parts of a row tile: one of each block but its own.
  static HSTU_HOST_DEVICE int places(int blocks) { return blocks > 2 ? blocks - 1 : 1; }

  // Called by all threads of all blocks, before the work.
  template <int kKeys, typename Queue>
  static HSTU_DEVICE void start(const Queue& queue, SharedMemory& smem) {
    if (threadIdx.x == 0) {
      const int key_tiles = ceil_div(queue.tile().sequence.k_len, kKeys);
      cutlass::arch::ClusterBarrier::init(&smem.barrier, max(key_tiles - 1, 1));
      cutlass::arch::fence_barrier_init();
    }
    __syncwarp();
    cute::cluster_arrive();
    // The blocks that share the sequence wait in hand_over_nothing().
    if (!queue.is_shared() || !queue.has_work()) cute::cluster_wait();
  }

  // Tells the blocks of row tiles that this block's keys do not see that it has no part of them.
  static HSTU_DEVICE void hand_over_nothing(int key_tile, const TileMap& map, SharedMemory& smem) {
    cute::cluster_wait();  // all barriers are ready
    const int m = static_cast<int>(threadIdx.x);
    if (m < map.count && m != key_tile && !map.contains(m)) {
      ptx::st_and_arrive(m, smem.has_part + key_tile, false, &smem.barrier);
    }
  }

  static HSTU_DEVICE void store(const Sum& dq, int row_tile, int key_tile, float* parts,
                                SharedMemory& smem) {
    float* const part = parts + (key_tile - (key_tile > row_tile)) * kSize;
#pragma unroll
    for (int n = 0; n < Sum::kCount; n += 4) {
      __stcg(reinterpret_cast<float4*>(part + DeviceSum<kThreads>::place(n)),
             {dq.values[n], dq.values[n + 1], dq.values[n + 2], dq.values[n + 3]});
    }
    if (threadIdx.x == 0) smem.stored = row_tile;
  }

  // Called by thread 0 after a barrier of the block that follows store().
  static HSTU_DEVICE void hand_over(int key_tile, SharedMemory& smem) {
    if (smem.stored < 0) return;
    ptx::st_and_arrive(smem.stored, smem.has_part + key_tile, true, &smem.barrier);
    smem.stored = -1;
  }

  template <int kKeys>
  static HSTU_DEVICE void add_parts(Sum& dq, const SequenceTile& work, const float* parts,
                                    SharedMemory& smem) {
    const int key_tiles = ceil_div(work.sequence.k_len, kKeys);
    if (key_tiles == 1) return;
    ptx::mbarrier_wait_cluster(&smem.barrier);
#pragma unroll 1
    for (int k = 0; k < key_tiles; ++k) {
      if (k == work.index) continue;
      const float* const part = parts;
      parts += kSize;
      if (!smem.has_part[k]) continue;
#pragma unroll
      for (int n = 0; n < Sum::kCount; n += 4) {
        const float4 add =
            __ldcg(reinterpret_cast<const float4*>(part + DeviceSum<kThreads>::place(n)));
        dq.values[n] += add.x;
        dq.values[n + 1] += add.y;
        dq.values[n + 2] += add.z;
        dq.values[n + 3] += add.w;
      }
    }
  }
};

}  // namespace hstu::sm80
