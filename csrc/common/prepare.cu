#include "launch.h"
#include "prepare.h"
#include "zero.h"

namespace hstu {
namespace {

constexpr int kThreads = 1024;
constexpr int kBins = kThreads;

// Bins in falling order of cost, 32 for each power of two.
__device__ int bin_of(int cost) {
  int rank = cost;
  if (cost >= 32) {
    const int exponent = 31 - __clz(cost);
    rank = 32 * (exponent - 4) + (cost >> (exponent - 5) & 31);
  }
  return kBins - 1 - rank;
}

template <int kCapacity>
__device__ int length(const IntervalList<kCapacity>& list) {
  int sum = 0;
  for (int n = 0; n < list.count; ++n) sum += list.interval[n].end - list.interval[n].begin;
  return sum;
}

// Visible tiles that the item goes through; all of them where spans are given row by row, since
// nothing short tells which are visible.
__device__ int item_cost(const PrepareParams& params, const Sequence& sequence, const Mask& mask,
                         int tile) {
  if (params.by_keys) {
    const int k0 = tile * params.tile_keys;
    return length(tiles(mask.q_intervals(k0, k0 + params.tile_keys), params.tile_rows));
  }
  if (mask.arbitrary()) return (sequence.k_len + params.tile_keys - 1) / params.tile_keys;
  const int r0 = tile * params.tile_rows;
  const int r1 = min(r0 + params.tile_rows, sequence.q_len);
  return length(tiles(mask.kv_intervals(r0, r1), params.tile_keys));
}

// Calls visit(sequence, its number, tile, bin, active) for every tile of the batch, by whole warps.
// A group of lanes takes a sequence and goes through its tiles from the last to the first. Of keys,
// the rank is the largest cost from the tile onwards: an earlier key tile then never stands behind
// a later one.
template <typename Visit>
__device__ void for_each_tile(const PrepareParams& params, int group, Visit visit) {
  const int lane = threadIdx.x % 32 % group;
  const int groups = kThreads / group;
  for (int first = 0; first < params.batch.batch; first += groups) {
    const int b = first + static_cast<int>(threadIdx.x) / group;
    const bool real = b < params.batch.batch;
    const Sequence sequence = real ? load_sequence(params.batch, b) : Sequence{};
    const Mask mask(params.mask, sequence, 0);
    const int size = params.by_keys ? params.tile_keys : params.tile_rows;
    const int count = ((params.by_keys ? sequence.k_len : sequence.q_len) + size - 1) / size;
    const int rounds = __reduce_max_sync(0xffffffff, (count + group - 1) / group);
    int largest = 0;
    for (int round = rounds - 1; round >= 0; --round) {
      const int tile = round * group + lane;
      const bool active = tile < count;
      int cost = active ? item_cost(params, sequence, mask, tile) : 0;
      if (params.by_keys) {
        cost = max(cost, largest);
        for (int step = 1; step < group; step *= 2) {
          const int later = __shfl_down_sync(0xffffffff, cost, step, group);
          if (lane + step < group) cost = max(cost, later);
        }
        largest = __shfl_sync(0xffffffff, cost, 0, group);
      }
      visit(sequence, b, tile, bin_of(cost), active);
    }
  }
}

// The sum of the values of this lane and those before it.
__device__ int sum_up_to_lane(int value) {
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xffffffff, value, step);
    if (threadIdx.x % 32 >= step) value += before;
  }
  return value;
}

// Turns the bins' sizes into their ends, and says how long the list is.
__device__ void sum_bins(int (&bins)[kBins], const WorkList& list) {
  __shared__ int warp_ends[32];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int end = sum_up_to_lane(bins[threadIdx.x]);
  if (lane == 31) warp_ends[warp] = end;
  __syncthreads();
  const int ends = sum_up_to_lane(warp_ends[lane]);
  if (warp > 0) end += __shfl_sync(0xffffffff, ends, warp - 1);
  bins[threadIdx.x] = end;
  if (threadIdx.x == kThreads - 1) {
    *list.count = min(end, list.capacity);
    *list.next = 0;
  }
}

__device__ void make_list(const PrepareParams& params) {
  __shared__ int bins[kBins];
  const int lane = threadIdx.x % 32;

  // As many lanes to a sequence as it has tiles on average.
  int group = 1;
  while (group < 32 && group * params.batch.batch < params.list.capacity) group *= 2;

  bins[threadIdx.x] = 0;
  __syncthreads();
  // First the tiles of each bin are counted, then each tile gets its place.
  // NOTE: one loop and not two: a kernel that runs once waits for its instructions above all.
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    for_each_tile(
        params, group, [&](const Sequence& sequence, int b, int tile, int bin, bool active) {
          if (pass == 0) {
            if (active) atomicAdd(&bins[bin], 1);
            return;
          }
          // Bins fill from their ends, as sequences are gone through from theirs: so
          // within a bin the tiles of one sequence stand in ascending order.
          const unsigned peers =
              __match_any_sync(0xffffffff, active ? lane / group * kBins + bin : -1);
          const int leader = 31 - __clz(peers);
          int end = 0;
          if (active && lane == leader) end = atomicSub(&bins[bin], __popc(peers));
          const int position = __shfl_sync(0xffffffff, end, leader) - __popc(peers >> lane);
          if (active && position < params.list.capacity) {
            params.list.tiles[position] = {sequence, b, tile};
          }
        });
    __syncthreads();
    if (pass == 0) sum_bins(bins, params.list);
    __syncthreads();
  }
}

// The turns of each sequence's row tiles. Where spans are given row by row, and past the end of a
// TileMap, every key tile takes one.
__device__ void write_turns(const PrepareParams& params, int first, int step) {
  for (int b = first; b < params.batch.batch; b += step) {
    const Sequence sequence = load_sequence(params.batch, b);
    const Mask mask(params.mask, sequence, 0);
    TileSpans* turns = params.turns + first_tile(sequence.q_begin, b, params.tile_rows);
    const int count = (sequence.q_len + params.tile_rows - 1) / params.tile_rows;
    for (int m = threadIdx.x % 32; m < count; m += 32) {
      KeyIntervals seen;
      if (mask.arbitrary() || m >= TileMap::kTiles) {
        seen.append({0, sequence.k_len});
      } else {
        const int r0 = m * params.tile_rows;
        seen = mask.kv_intervals(r0, min(r0 + params.tile_rows, sequence.q_len));
      }
      const KeyIntervals spans = tiles(seen, params.tile_keys);
      const Interval none;
      const Interval& x = spans.count > 0 ? spans.interval[0] : none;
      const Interval& y = spans.count > 1 ? spans.interval[1] : none;
      turns[m] = {{x.begin, y.begin}, {x.end, y.end}};
    }
  }
}

// A warp takes a tile of rows.
__device__ void write_summaries(const PrepareParams& params, int first, int step) {
  constexpr unsigned kWarp = 0xffffffff;
  const SpanSummaries& summaries = params.list.summaries;
  for (int64_t n = first; n < int64_t{summaries.heads} * summaries.tiles; n += step) {
    WorkTile work;
    if (!find_row_tile(params.batch, n % summaries.tiles, params.tile_rows, work)) continue;
    const Mask mask(params.mask, work.sequence, static_cast<int>(n / summaries.tiles));
    const int r0 = work.tile * params.tile_rows;
    const int r1 = min(r0 + params.tile_rows, work.sequence.q_len);
    SpanSummary all;
    for (int r = r0 + static_cast<int>(threadIdx.x) % 32; r < r1; r += 32) {
      all.add(mask.summarize(r));
    }
    for (int i = 0; i < 2; ++i) {
      all.hull[i].begin = __reduce_min_sync(kWarp, all.hull[i].begin);
      all.hull[i].end = __reduce_max_sync(kWarp, all.hull[i].end);
      all.shared[i].begin = __reduce_max_sync(kWarp, all.shared[i].begin);
      all.shared[i].end = __reduce_min_sync(kWarp, all.shared[i].end);
    }
    if (threadIdx.x % 32 == 0) summaries.data[n] = all;
  }
}

__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const __grid_constant__ PrepareParams params) {
  let_next_kernel_start();
  if (blockIdx.x == 0) {
    make_list(params);
    return;
  }
  const int block = blockIdx.x - 1;
  const int blocks = gridDim.x - 1;
  constexpr int kWarps = kThreads / 32;
  const int warp = block * kWarps + static_cast<int>(threadIdx.x) / 32;
  zero_gaps<RowsOf::kQueries>(params.batch, params.row_output, params.heads, warp, blocks * kWarps);
  for (const PackedTensor& output : params.key_outputs) {
    if (!output.data) continue;
    zero_gaps<RowsOf::kKeys>(params.batch, output, params.heads, warp, blocks * kWarps);
  }
  if (params.turns) write_turns(params, warp, blocks * kWarps);
  if (params.list.summaries.data) write_summaries(params, warp, blocks * kWarps);
  uint4* zeros = static_cast<uint4*>(params.zeros);
  const int64_t count = params.zero_bytes / 16;
  for (int64_t n = int64_t{block} * kThreads + threadIdx.x; n < count; n += blocks * kThreads) {
    zeros[n] = uint4{};
  }
}

}  // namespace

void prepare(const PrepareParams& params, const CudaLaunch& launch) {
  const SpanSummaries& summaries = params.list.summaries;
  const int64_t warps = params.batch.batch + 1 + int64_t{summaries.heads} * summaries.tiles;
  const int64_t work = params.zero_bytes / 16 + 32 * warps;
  const int64_t blocks =
      clamp((work + kThreads - 1) / kThreads, 1, 2 * launch.device.multiprocessors);
  launch_kernel(prepare_kernel, {.blocks = 1 + blocks, .threads = kThreads}, launch, "prepare",
                params);
}

}  // namespace hstu
