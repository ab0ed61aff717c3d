// The producer of the e4m3 linear maps: finds the rows of work tiles, and copies tiles by TMA.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "../common/sequence.h"
#include "../scheduler/work_list.h"
#include "projection_traits.h"

namespace hstu::sm90 {

template <typename Traits>
struct ProjectionProducer : Traits {
  using SharedMemory = typename Traits::SharedMemory;
  using Traits::kClusterSize;
  using Traits::kColumns;
  using Traits::kDepth;
  using Traits::kSlots;
  using Traits::kStages;
  using Traits::kTileSlots;

  // Writes first_block, first_row and work_tiles. Called by a warp.
  static HSTU_DEVICE void count_blocks(const ProjectionParams& params, SharedMemory& smem) {
    const int lane = threadIdx.x % 32;
    const int count = params.batch.batch + 2;
    int blocks = 0;
    for (int first = 0; first < count; first += 32) {
      const int n = first + lane;
      const int begin = begin_of(params, n);
      const int rows = n < count ? max(begin_of(params, n + 1) - begin, 0) : 0;
      int sum = ceil_div(rows, Fp8Params::kBlock);
      const int own = sum;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += before;
      }
      if (n < count) {
        smem.first_block[n] = blocks + sum - own;
        smem.first_row[n] = begin;
      }
      blocks += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) {
      smem.first_block[count] = blocks;
      smem.first_row[count] = begin_of(params, count);
      smem.work_tiles = ceil_div(blocks, kClusterSize) * params.column_tiles();
    }
  }

  static HSTU_DEVICE void run(const ProjectionParams& params, const ProjectionMaps& maps,
                              SharedMemory& smem) {
    const int blocks = smem.first_block[params.batch.batch + 2], work_tiles = smem.work_tiles;
    const int rank = static_cast<int>(cute::block_rank_in_cluster());
    const int steps = ceil_div(params.depth, kDepth);
    PipelineState<kStages> state;
    const int clusters = static_cast<int>(gridDim.x) / kClusterSize;
    int work = static_cast<int>(blockIdx.x) / kClusterSize;
    for (int count = 0; work < work_tiles; work += clusters, ++count) {
      const int slot = count % kSlots;
      const int column = work % params.column_tiles() * kColumns;
      const int block = work / params.column_tiles() * kClusterSize + rank;
      const ProjectionTile tile =
          block < blocks ? find_tile(params, smem, column, block) : ProjectionTile{column};
      const int first_row = __shfl_sync(~0u, tile.begin, 0);  // the compiler knows it is uniform
      for (int m = 0; m < 2; ++m) {
        for (int step = 0; step < steps; ++step) {
          smem.pipeline.producer_acquire(state);
          if (cute::elect_one_sync()) {
            auto& full = smem.pipeline.full[state.index()];
            auto* const barrier = reinterpret_cast<uint64_t*>(&full);
            constexpr int kBytes = sizeof(smem.x[0]) + sizeof(smem.weight[0]);
            if (m == 0 && step == 0) {
              smem.tiles[count % kTileSlots] = tile;
              constexpr int kColumnBytes = sizeof(smem.bias[0]);
              full.arrive_and_expect_tx(kBytes + 2 * kColumnBytes);
              cute::SM90_BULK_COPY_G2S::copy(params.weight_descale + column, barrier,
                                             smem.weight_descale[slot], kColumnBytes);
              cute::SM90_BULK_COPY_G2S::copy(params.bias + column, barrier, smem.bias[slot],
                                             kColumnBytes);
            } else {
              full.arrive_and_expect_tx(kBytes);
            }
            cute::SM90_TMA_LOAD_2D::copy(
                &maps.x, barrier, static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                smem.x[state.index()], step * kDepth, first_row + m * kWarpgroupRows);
            constexpr int kHalf = kColumns / kClusterSize;
            cute::SM90_TMA_LOAD_MULTICAST_5D::copy(
                &maps.weight, barrier, (1 << kClusterSize) - 1,
                static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST),
                smem.weight[state.index()] + rank * kHalf * kDepth, step * kDepth, 0, 0, 0,
                (column + rank * kHalf) / 32);
          }
          __syncwarp();
          state.advance();
        }
      }
    }
  }

 private:
  // The first row of "sequence" n: sequence n - 1, or the rows before the first sequence (0) or
  // after the last one (batch + 1).
  static HSTU_DEVICE int begin_of(const ProjectionParams& params, int n) {
    if (n == 0) return 0;
    if (n > params.batch.batch + 1 || params.batch.batch == 0) {
      return static_cast<int>(params.batch.total_k);
    }
    return static_cast<int>(clamp(params.batch.cu_seqlens_k[n - 1], 0, params.batch.total_k));
  }

  // Finds the rows of block `block`. Called by all lanes of a warp.
  static HSTU_DEVICE ProjectionTile find_tile(const ProjectionParams& params,
                                              const SharedMemory& smem, int column, int block) {
    const int lane = threadIdx.x % 32;
    const int batch = params.batch.batch;
    int low = 0, count = batch + 2;
    while (count > 1) {
      const int step = ceil_div(count, 32);
      const bool is_before =
          lane * step < count && (lane == 0 || smem.first_block[low + lane * step] <= block);
      const int last = 31 - __clz(__ballot_sync(~0u, is_before));
      low += last * step;
      count = min(step, count - last * step);
    }
    const int first = (block - smem.first_block[low]) * Fp8Params::kBlock;
    const int begin = smem.first_row[low], length = smem.first_row[low + 1] - begin;
    return {
        column, begin + first, min(length - first, Fp8Params::kBlock),
        static_cast<int>(first_tile(begin, low - 1, Fp8Params::kBlock)) + first / Fp8Params::kBlock,
        low > 0 && low <= batch && column >= params.u_columns};
  }
};

}  // namespace hstu::sm90
