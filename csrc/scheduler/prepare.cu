#include "../common/launch.h"
#include "../common/static_switch.h"
#include "../common/zero.h"
#include "prepare.h"

namespace hstu {
namespace {

constexpr int kThreads = 1024;
constexpr int kBinsPerThread = 8;
constexpr int kBins = kBinsPerThread * kThreads;
constexpr int kPaddedBins = kBins + kThreads;

// The address of a bin in shared memory, padded so that the bins of neighboring threads are in
// different banks.
__device__ int padded_bin(int bin) { return bin + bin / kBinsPerThread; }

// The bin of a tile: bins are ordered by chunk, and within a chunk by falling cost, with
// 2^mantissa_bits bins for each power of two.
__device__ int bin_index(const PrepareParams& params, int chunk, int cost) {
  const int mantissa_bits = params.mantissa_bits;
  int rank = cost;
  if (cost >> mantissa_bits != 0) {
    const int exponent = 31 - __clz(cost);
    rank = ((exponent - mantissa_bits) << mantissa_bits) + (cost >> (exponent - mantissa_bits));
  }
  const int bins = kBins / params.num_chunks;
  return chunk * bins + bins - 1 - min(rank, bins - 1);
}

// The chunk of a tile. Tiles are processed chunk after chunk, so that the K and V they read are
// still in the L2 cache, except for those in the tail: see PrepareParams::tail_divisor.
template <bool kByKeys>
__device__ int chunk_index(const PrepareParams& params, const Sequence& sequence, int tile,
                           int count, int cost) {
  const int last = params.num_chunks - 1;
  const int64_t total = params.batch.total_k;
  const bool is_in_tail = sequence.k_begin + sequence.k_len > total - total / params.tail_divisor;
  const int reach = (cost - 1) * 2 * (kByKeys ? params.tile_rows : params.tile_keys);
  // NOTE: for tiles of keys, only the cost decides: an earlier tile of a sequence must never come
  // after a later one.
  const bool is_short =
      kByKeys ? reach <= sequence.q_len : tile < count / 2 && reach <= sequence.k_len;
  if (is_in_tail && is_short) return last;
  return min(static_cast<int>(sequence.k_begin >> params.chunk_shift), max(last - 1, 0));
}

template <int kCapacity>
__device__ int length(const IntervalList<kCapacity>& list) {
  int sum = 0;
  for (int n = 0; n < list.count; ++n) sum += list.interval[n].end - list.interval[n].begin;
  return sum;
}

// The estimated number of visible tiles that a work tile processes. If spans are given row by row,
// it is the number of all tiles, because finding the visible ones would take too long here.
// NOTE: for tiles of rows this is a coarse estimate: the time of a kernel that runs once is mostly
// instruction fetches, so it must have few instructions.
template <bool kByKeys>
__device__ int tile_cost(const PrepareParams& params, const Sequence& sequence, const Mask& mask,
                         int tile) {
  if constexpr (kByKeys) {
    const int k0 = tile * params.tile_keys;
    return length(tiles(mask.q_intervals(k0, k0 + params.tile_keys), params.tile_rows));
  } else {
    const int r0 = tile * params.tile_rows;
    const Interval keys = mask.estimate(r0, min(r0 + params.tile_rows, sequence.q_len));
    return ceil_div(keys.end - keys.begin, params.tile_keys);
  }
}

// Calls visit(sequence, sequence_index, tile, bin, active) for every tile of the batch, by whole
// warps. A group of lanes takes a sequence and visits its tiles from the last to the first. Key
// tiles are ranked by the suffix maximum of cost, so that the tiles of a sequence keep their
// ascending order: the deterministic order of dQ additions needs this.
template <bool kByKeys, typename Visit>
__device__ void for_each_tile(const PrepareParams& params, int group, Visit visit) {
  const int lane = threadIdx.x % 32 % group;
  const int groups = kThreads / group;
  const Interval unlisted = params.list.unlisted;
  for (int first = 0; first < params.batch.batch; first += groups) {
    const int b = first + static_cast<int>(threadIdx.x) / group;
    const bool real = b < params.batch.batch;
    const Sequence sequence = real ? load_sequence(params.batch, b) : Sequence{};
    const Mask mask(params.mask, sequence, 0);
    const int size = kByKeys ? params.tile_keys : params.tile_rows;
    const int count = ceil_div(kByKeys ? sequence.k_len : sequence.q_len, size);
    const int64_t begin = kByKeys ? sequence.k_begin : sequence.q_begin;
    const int64_t first_number = first_tile(begin, b, size);
    const int rounds = __reduce_max_sync(0xffffffff, ceil_div(count, group));
    int largest = 0;
    for (int round = rounds - 1; round >= 0; --round) {
      const int tile = round * group + lane;
      const int64_t number = first_number + tile;
      const bool is_unlisted = unlisted.begin <= number && number < unlisted.end;
      const bool active = tile < count && !is_unlisted;
      int cost = active ? tile_cost<kByKeys>(params, sequence, mask, tile) : 0;
      if constexpr (kByKeys) {
        cost = max(cost, largest);
        for (int step = 1; step < group; step *= 2) {
          const int later = __shfl_down_sync(0xffffffff, cost, step, group);
          if (lane + step < group) cost = max(cost, later);
        }
        largest = __shfl_sync(0xffffffff, cost, 0, group);
      }
      const int chunk = chunk_index<kByKeys>(params, sequence, tile, count, cost);
      visit(sequence, b, tile, padded_bin(bin_index(params, chunk, cost)), active);
    }
  }
}

// Inclusive prefix sum over the lanes of a warp.
__device__ int sum_up_to_lane(int value) {
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xffffffff, value, step);
    if (threadIdx.x % 32 >= step) value += before;
  }
  return value;
}

// Replaces the size of each bin by its end (an inclusive prefix sum) and stores the length of the
// list.
__device__ void sum_bins(int* bins, const WorkList& list) {
  __shared__ int warp_ends[32];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int* own = bins + padded_bin(threadIdx.x * kBinsPerThread);
  int sum = 0;
  for (int n = 0; n < kBinsPerThread; ++n) sum += own[n];
  int end = sum_up_to_lane(sum);
  if (lane == 31) warp_ends[warp] = end;
  __syncthreads();
  const int ends = sum_up_to_lane(warp_ends[lane]);
  if (warp > 0) end += __shfl_sync(0xffffffff, ends, warp - 1);
  if (threadIdx.x == kThreads - 1) {
    *list.count = min(end, list.capacity);
    *list.next = 0;
  }
  for (int n = kBinsPerThread - 1; n >= 0; --n) {
    const int size = own[n];
    own[n] = end;
    end -= size;
  }
}

template <bool kByKeys>
__device__ void make_list(const PrepareParams& params) {
  __shared__ int bins[kPaddedBins];
  const int lane = threadIdx.x % 32;

  // A sequence gets as many lanes as sequences have tiles on average.
  int group = 1;
  while (group < 32 && group * params.batch.batch < params.list.capacity) group *= 2;

  for (int n = threadIdx.x; n < kPaddedBins; n += kThreads) bins[n] = 0;
  __syncthreads();
  // The first pass counts the tiles of each bin, the second one places each tile (a counting sort).
  // NOTE: this is one loop with two passes and not two loops, to have fewer instructions to fetch.
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    for_each_tile<kByKeys>(
        params, group, [&](const Sequence& sequence, int b, int tile, int bin, bool active) {
          if (pass == 0) {
            if (active) atomicAdd(&bins[bin], 1);
            return;
          }
          // Bins are filled from their ends, because each sequence is visited from its last tile to
          // its first: so its tiles are in ascending order within a bin.
          const unsigned peers =
              __match_any_sync(0xffffffff, active ? lane / group * kPaddedBins + bin : -1);
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

// Writes which key tiles add to the dQ of each tile of rows. All key tiles do if spans are given
// row by row, or if a TileMap has no bit for the row tile.
__device__ void write_dq_writers(const PrepareParams& params, int first, int step) {
  for (int b = first; b < params.batch.batch; b += step) {
    const Sequence sequence = load_sequence(params.batch, b);
    const Mask mask(params.mask, sequence, 0);
    TileSpans* dq_writers = params.dq_writers + first_tile(sequence.q_begin, b, params.tile_rows);
    const int count = ceil_div(sequence.q_len, params.tile_rows);
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
      dq_writers[m] = {{x.begin, y.begin}, {x.end, y.end}};
    }
  }
}

// Writes the mask summaries. Each warp takes a tile of rows.
__device__ void write_summaries(const PrepareParams& params, int first, int step) {
  constexpr unsigned kWarp = 0xffffffff;
  const SpanSummaries& summaries = params.list.summaries;
  for (int64_t n = first; n < int64_t{summaries.heads} * summaries.tiles; n += step) {
    SequenceTile work;
    if (!find_row_tile(params.batch, n % summaries.tiles, params.tile_rows, work)) continue;
    const Mask mask(params.mask, work.sequence, static_cast<int>(n / summaries.tiles));
    const int r0 = work.index * params.tile_rows;
    const int r1 = min(r0 + params.tile_rows, work.sequence.q_len);
    SpanSummary all;
    for (int r = r0 + static_cast<int>(threadIdx.x) % 32; r < r1; r += 32) {
      all.add(mask.summarize(r));
    }
    for (int i = 0; i < 2; ++i) {
      all.hull[i].begin = __reduce_min_sync(kWarp, all.hull[i].begin);
      all.hull[i].end = __reduce_max_sync(kWarp, all.hull[i].end);
      all.fully_visible[i].begin = __reduce_max_sync(kWarp, all.fully_visible[i].begin);
      all.fully_visible[i].end = __reduce_min_sync(kWarp, all.fully_visible[i].end);
    }
    if (threadIdx.x % 32 == 0) summaries.data[n] = all;
  }
}

// Writes the prepared tiles. Four neighboring threads take a tile: one for each 64 of its rows, and
// the last one for all of them.
__device__ void write_prepared_tiles(const PrepareParams& params, int first, int step) {
  constexpr int kThreadsOfTile = PreparedTile::kMaxParts + 1;
  const int part = first % kThreadsOfTile;
  const int parts = params.tile_rows / PreparedTile::kPartRows;
  const unsigned lanes = 0xf << threadIdx.x % 32 / kThreadsOfTile * kThreadsOfTile;
  for (int n = first / kThreadsOfTile; n < params.list.capacity; n += step / kThreadsOfTile) {
    PreparedTile prepared;
    if (!find_row_tile(params.batch, n, params.tile_rows, prepared.tile)) prepared.tile = {};
    const Sequence& sequence = prepared.tile.sequence;
    const int begin = prepared.tile.index * params.tile_rows;
    const int end = min(begin + params.tile_rows, sequence.q_len);
    const int r0 = part < parts ? begin + part * PreparedTile::kPartRows : begin;
    const int r1 = part < parts ? min(r0 + PreparedTile::kPartRows, end) : end;
    const Mask mask(params.mask, sequence, 0);
    const KeyIntervals keys = mask.kv_intervals(r0, r1);
    const PaddedKeys<PreparedTile::kTileKeys> padded(sequence);
    const int last = padded.padded_end(max(keys.interval[0].end, keys.interval[1].end));
#pragma unroll
    for (int i = 0; i < PreparedTile::kMaxParts; ++i) {
      const int last_of_part = __shfl_sync(lanes, last, i, kThreadsOfTile);
      if (i < parts) prepared.keys[i] = last_of_part;
    }
    if (part != kThreadsOfTile - 1) continue;
    SpanSummary& summary = prepared.summary;
    summary.set_hull(keys);
    mask.fully_visible(r0, r1, summary.fully_visible);
    for (int i = 0; i < 2; ++i) {
      summary.hull[i] = padded.to_padded(summary.hull[i], sequence.k_len);
      summary.fully_visible[i] = padded.to_padded(summary.fully_visible[i], sequence.k_len);
    }
    prepared.pages = PageList(params.paged, prepared.tile.sequence_index);
    // NOTE: this writes the padding, too, which is copied with the rest.
    uint4 words[sizeof(PreparedTile) / sizeof(uint4)];
    memcpy(words, &prepared, sizeof(words));
    auto* const to = reinterpret_cast<uint4*>(params.list.prepared_tiles + n);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(words) / sizeof(uint4)); ++i) to[i] = words[i];
  }
}

// Zeroes the rows of the bias gradient that belong to no query, and the columns behind the last
// tile of keys. Each warp takes 32 rows.
__device__ void zero_bias_gradient(const PrepareParams& params, int first, int step) {
  const DenseBias& bias = params.bias_gradient;
  const int chunks = ceil_div(bias.length, 32);  // chunks of 32 rows of a matrix
  const int lane = threadIdx.x % 32;
  for (int64_t n = first; n < int64_t{params.batch.batch} * bias.heads * chunks; n += step) {
    const int b = static_cast<int>(n / chunks / bias.heads);
    const Sequence sequence = load_sequence(params.batch, b);
    const int tiles_end = round_up(sequence.k_len, params.tile_keys);
    uint16_t* const matrix = static_cast<uint16_t*>(bias.data) + b * bias.batch_stride +
                             n / chunks % bias.heads * bias.head_stride;
    const int r0 = static_cast<int>(n % chunks) * 32;
    for (int i = r0; i < min(r0 + 32, bias.length); ++i) {
      const bool has_query = i >= sequence.offset && i < sequence.k_len;
      uint16_t* const row = matrix + i * bias.row_stride;
      for (int j = (has_query ? tiles_end : 0) + lane * 8; j < bias.length; j += 32 * 8) {
        *reinterpret_cast<uint4*>(row + j) = uint4{};
      }
    }
  }
}

template <bool kByKeys>
__global__ void __launch_bounds__(kThreads)
    prepare_scheduler_kernel(const __grid_constant__ PrepareParams params) {
  let_next_kernel_start();
  if (blockIdx.x == 0) {
    if (params.list.tiles) make_list<kByKeys>(params);
    return;
  }
  const int block = blockIdx.x - 1;
  const int blocks = gridDim.x - 1;
  constexpr int kWarps = kThreads / 32;
  const int warp = block * kWarps + static_cast<int>(threadIdx.x) / 32;
  zero_unowned_rows<RowsOf::kQueries>(params.batch, params.row_output, params.heads, warp,
                                      blocks * kWarps);
  if constexpr (kByKeys) {
    for (const PackedTensor& output : params.key_outputs) {
      zero_unowned_rows<RowsOf::kKeys>(params.batch, output, params.heads, warp, blocks * kWarps);
    }
  }
  if (kByKeys && params.dq_writers) write_dq_writers(params, warp, blocks * kWarps);
  if (kByKeys && params.bias_gradient.data) zero_bias_gradient(params, warp, blocks * kWarps);
  if (params.list.summaries.data) write_summaries(params, warp, blocks * kWarps);
  if (!kByKeys && params.list.prepared_tiles) {
    write_prepared_tiles(params, warp * 32 + static_cast<int>(threadIdx.x) % 32, blocks * kThreads);
  }
  uint4* zeros = static_cast<uint4*>(params.zeros);
  const int64_t count = params.zero_bytes / 16;
  for (int64_t n = int64_t{block} * kThreads + threadIdx.x; n < count; n += blocks * kThreads) {
    zeros[n] = uint4{};
  }
}

}  // namespace

void prepare_scheduler(const PrepareParams& params, const CudaLaunch& launch) {
  const SpanSummaries& summaries = params.list.summaries;
  const int64_t warps = params.batch.batch + 1 + int64_t{summaries.heads} * summaries.tiles;
  const int64_t prepared_tiles = params.list.prepared_tiles ? params.list.capacity : 0;
  const int64_t work = params.zero_bytes / 16 + 32 * warps + 4 * prepared_tiles;
  const int64_t blocks = clamp(ceil_div(work, kThreads), 1, 2 * launch.device.multiprocessors);
  bool_switch(params.by_keys, [&](auto by_keys) {
    launch_kernel(prepare_scheduler_kernel<by_keys>, {.blocks = 1 + blocks, .threads = kThreads},
                  launch, "prepare", params);
  });
}

}  // namespace hstu
