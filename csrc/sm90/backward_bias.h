// The warpgroup of the backward that computes the tiles of a relative bias, and sums dS for the
// gradients of the tables.
//
// It computes the bias of a tile of rows one step ahead of the consumers, then reads the dS that
// they have stored for dQ. A sum of dS over the scores that read an entry of a table is first found
// within the tile:
//
//   position  Thread (r, g) adds up chunks of 8 keys along a diagonal of 8 x 8 blocks: rows r + 8 k
//             and chunks g + k. All have the same distances, so 8 sums are enough. Then one thread
//             for each distance adds up the 8 rows r of a block.
//   time      The sums of the same thread are moved to bins, one for each bucket and thread, when
//             the buckets of the 8 keys change from one chunk to the next, which is rare.
//
// Each sum is found in a fixed order and added to a TableSum, whose value no order changes.
#pragma once

#include "backward_traits.h"

namespace hstu::sm90 {

template <typename Traits>
class BackwardBias {
  using Element = typename Traits::Element;
  using BiasState = typename Traits::BiasState;
  using DsState = typename Traits::DsState;
  using SharedMemory = typename Traits::SharedMemory;
  using WorkTile = typename Traits::WorkTile;
  using Memory = typename Traits::TableGradientMemory;
  static constexpr int kRows = Traits::kRows;
  static constexpr int kKeys = Traits::kBlockKeys;
  static constexpr int kChunks = kKeys / 8;  // of a row
  static constexpr int kRowBlocks = kRows / 8;
  static constexpr int kBins = Memory::kBins;
  static_assert(kRows == 64 && kChunks >= kRowBlocks);

 public:
  static HSTU_DEVICE void run(const BackwardParams& params, const BackwardBuffers& buffers,
                              SharedMemory& smem) {
    const bool sums_ds = buffers.sums.position.words || buffers.sums.time.words;
    const int thread = thread_of_warpgroup();
    Memory& memory = smem.table_gradients[0];
    BiasState bias_state;
    DsState ds_state;
    for_each_work_tile(smem.work_tiles, smem.pipeline_work, [&](const WorkTile& work_tile) {
      const SequenceTile& tile = work_tile.tile;
      const HeadBias bias(params.relative_bias, tile.sequence, tile.sequence_index, params.heads,
                          work_tile.head);
      RowTimes times;
      const auto start_copy = [&](int m, int parity) {
        bias.template start_copy_position<kWarpgroup>(
            thread, m * kRows, Traits::first_key(work_tile), memory.position[parity]);
        times = bias.times_of_row(m * kRows + thread % kRows);
      };
      int m = Traits::first_row_tile(work_tile);
      sync();  // the windows have been read
      bias.template start_copy_keys<kWarpgroup>(thread, Traits::first_key(work_tile), memory.keys);
      bias.template start_copy_cells<kWarpgroup>(thread, memory.cells);
      start_copy(m, bias_state.count % 2);
      int next = m;
      for (bool is_first = true;; is_first = false) {
        // The bias of the next tile, which is the first one in the first round.
        if (next >= 0) {
          ptx::cp_async_wait_all();
          sync();  // this window is written, the other one is read
          const RowTimes own = times;
          const int parity = bias_state.count % 2;
          const int after = Traits::next_row_tile(work_tile, next);
          if (after >= 0) start_copy(after, parity ^ 1);
          find_tile(params, buffers, work_tile, bias, own, bias_state, smem);
        }
        if (!is_first) {
          smem.pipeline_ds.consumer_wait(ds_state);
          if (sums_ds) {
            sum_tile(params, buffers, work_tile, m, ds_state, smem);
          } else {
            smem.pipeline_ds.consumer_release_by_warp(ds_state);
          }
          ds_state.advance();
          m = next;
          if (m < 0) break;
        }
        next = Traits::next_row_tile(work_tile, m);
      }
    });
  }

 private:
  static HSTU_DEVICE int thread_of_warpgroup() {
    return static_cast<int>(threadIdx.x) % kWarpgroup;
  }
  static HSTU_DEVICE void sync() { sync_warpgroup(Traits::kConsumers); }

  // A chunk of 8 keys in a tile of the bias or of dS, in the layout of rows_tensor().
  template <typename T>
  static HSTU_DEVICE T* chunk_at(T* tile, int row, int chunk) {
    return tile + (chunk / 8 * kRows + row) * 64 + (chunk % 8 ^ row % 8) * 8;
  }
  // The buckets of a chunk, in one of the block's two tiles of them.
  static HSTU_DEVICE uint2* buckets_at(const BackwardBuffers& buffers, int tile, int row,
                                       int chunk) {
    uint8_t* const own = buffers.buckets + (int64_t{blockIdx.x} * 2 + tile) * (kRows * kKeys);
    return reinterpret_cast<uint2*>(own) + row * kChunks + chunk;
  }

  // Computes the next tile of the bias. A thread has a row, with `times`, and half of the keys.
  static HSTU_DEVICE void find_tile(const BackwardParams& params, const BackwardBuffers& buffers,
                                    const WorkTile& work_tile, const HeadBias& bias,
                                    const RowTimes& times, BiasState& state, SharedMemory& smem) {
    constexpr int kThreadChunks = kChunks / 2;
    Memory& memory = smem.table_gradients[0];
    const int row = thread_of_warpgroup() % kRows;
    const int first_chunk = thread_of_warpgroup() / kRows * kThreadChunks;
    const int parity = state.count % 2;
    const int warp = thread_of_warpgroup() / 32;
    const int first_row = warp % (kRows / 32) * 32;
    smem.pipeline_bias.producer_acquire(state);
    bias.template find<kThreadChunks, typename Memory::Position>(
        times, Traits::first_key(work_tile) + first_chunk * 8, memory.keys.times + first_chunk * 8,
        memory.keys.ranges + first_chunk, memory.position[parity].of_row(row) + first_chunk * 8,
        memory.cells, memory.mixed[warp],
        [&](int own, int n, const float (&x)[8]) {
          const int chunk = first_chunk + n;
          *reinterpret_cast<uint4*>(chunk_at(smem.bias[state.index()], first_row + own, chunk)) =
              half_chunk(x);
        },
        [&](int own, int key) {
          const int chunk = first_chunk + key / 8;
          chunk_at(smem.bias[state.index()], first_row + own, chunk)[key % 8] = cutlass::half_t(0);
        });
    smem.pipeline_bias.producer_commit_by_warp(state);
    uint32_t lowest = 255;
    if (buffers.sums.time.words) {
#pragma unroll 1
      for (int chunk = first_chunk; chunk < first_chunk + kThreadChunks; ++chunk) {
        uint32_t words[2] = {};
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const uint32_t bucket = bucket_of(
              params.relative_bias, time_difference(times.time, memory.keys.times[chunk * 8 + n]));
          words[n / 4] |= bucket << n % 4 * 8;
          lowest = min(lowest, bucket);
        }
        *buckets_at(buffers, parity, row, chunk) = {words[0], words[1]};
      }
    }
    lowest = __reduce_min_sync(0xffffffff, lowest);
    if (threadIdx.x % 32 == 0) {
      memory.lowest_bucket[parity][thread_of_warpgroup() / 32] = static_cast<int>(lowest);
    }
    state.advance();
  }

  // Adds dS of tile m of rows to the sums of the tables, and releases it.
  static HSTU_DEVICE void sum_tile(const BackwardParams& params, const BackwardBuffers& buffers,
                                   const WorkTile& work_tile, int m, DsState state,
                                   SharedMemory& smem) {
    Memory& memory = smem.table_gradients[0];
    const TableSums& sums = buffers.sums;
    const int parity = state.count % 2;
    // Buckets of this tile have been written, and the memory for sums has been read.
    sync();
    int lowest = 255;
#pragma unroll
    for (int warp = 0; warp < 4; ++warp) lowest = min(lowest, memory.lowest_bucket[parity][warp]);
    const int64_t first_time_entry =
        sums.time.words ? first_entry(params.relative_bias.time, params, work_tile.head) : 0;
    const int thread = thread_of_warpgroup();
    if (thread < kKeys) {
      if (sums.time.words) {
#pragma unroll 8
        for (int bin = 0; bin < kBins; ++bin) memory.bins[bin][thread] = 0;
      }
      walk_diagonal(sums, first_time_entry, parity, lowest, buffers,
                    Traits::ds_tile(smem, state) + Traits::rank() * (kRows * kKeys), memory);
    }
    smem.pipeline_ds.consumer_release_by_warp(state);
    sync();
    if (sums.time.words) add_bins(sums.time, first_time_entry + lowest, memory);
    if (sums.position.words) {
      add_diagonals(sums.position, params, work_tile, m, memory);
    }
  }

  static HSTU_DEVICE int64_t first_entry(const BiasTable& table, const BackwardParams& params,
                                         int head) {
    return int64_t{head / (params.heads / table.heads)} * table.size;
  }

  static HSTU_DEVICE void walk_diagonal(const TableSums& sums, int64_t first_time_entry, int parity,
                                        int lowest, const BackwardBuffers& buffers, Element* ds,
                                        Memory& memory) {
    const int thread = thread_of_warpgroup();
    const int r = thread % 8;
    const int g = thread / 8;
    const bool has_time = sums.time.words;
    uint2 before = {};             // the buckets of the chunk before
    uint2 ahead[kRowBlocks] = {};  // and those of the next chunks
    if (has_time) {
#pragma unroll
      for (int k = 0; k < kRowBlocks; ++k) {
        ahead[k] = *buckets_at(buffers, parity, r + 8 * k, (g + k) % kChunks);
      }
      before = ahead[0];
    }
    float position[8] = {};  // of the diagonal
    float part[8] = {};      // of these, what is not yet in the bins
    const auto move_to_bins = [&](uint2 of) {
      add_to_bins(part, of, sums.time, first_time_entry, lowest, memory);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        position[n] += part[n];
        part[n] = 0;
      }
    };
    const auto store_diagonal = [&](int block) {
      float* const to = &memory.diagonals[r][(block + kRowBlocks - 1) * 8];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        to[n] = has_time ? position[n] : part[n];
        position[n] = 0;
        if (!has_time) part[n] = 0;
      }
    };
#pragma unroll 1
    for (int k = 0; k < kRowBlocks; ++k) {
      const int chunk = (g + k) % kChunks;
      const bool is_new_diagonal = k > 0 && chunk == 0;
      const uint4 words = *reinterpret_cast<const uint4*>(chunk_at(ds, r + 8 * k, chunk));
      const bool changes = ahead[0].x != before.x || ahead[0].y != before.y;
      if (has_time && (changes || is_new_diagonal)) move_to_bins(before);
      before = ahead[0];
#pragma unroll
      for (int n = 0; n + 1 < kRowBlocks; ++n) ahead[n] = ahead[n + 1];
      if (is_new_diagonal) store_diagonal(g);
      const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        part[2 * n] += low_half<Element>(pairs[n]);
        part[2 * n + 1] += high_half<Element>(pairs[n]);
      }
    }
    if (has_time) move_to_bins(before);
    store_diagonal(g + kRowBlocks > kChunks ? g - kChunks : g);
  }

  // Adds 8 sums to the bins of their buckets.
  static HSTU_DEVICE void add_to_bins(const float (&part)[8], uint2 buckets, const TableSum& time,
                                      int64_t first_time_entry, int lowest, Memory& memory) {
    const int thread = thread_of_warpgroup();
    const auto add = [&](int bucket, float sum) {
      const int bin = bucket - lowest;
      if (bin < kBins) {
        memory.bins[bin][thread] += sum;
      } else {
        time.add(first_time_entry + bucket, sum);
      }
    };
    int bucket = buckets.x & 0xff;
    if (buckets.x == bucket * 0x01010101u && buckets.y == buckets.x) {
      add(bucket, ((part[0] + part[1]) + (part[2] + part[3])) +
                      ((part[4] + part[5]) + (part[6] + part[7])));
      return;
    }
    float sum = part[0];
#pragma unroll
    for (int n = 1; n < 8; ++n) {
      const int next = (n < 4 ? buckets.x : buckets.y) >> n % 4 * 8 & 0xff;
      if (next != bucket) {
        add(bucket, sum);
        sum = 0;
        bucket = next;
      }
      sum += part[n];
    }
    add(bucket, sum);
  }

  // Adds the bins of all threads, of which the first is entry `first`.
  static HSTU_DEVICE void add_bins(const TableSum& time, int64_t first, const Memory& memory) {
    constexpr int kThreadsOfBin = kWarpgroup / kBins;
    constexpr int kThreadBins = kKeys / kThreadsOfBin;  // that one thread adds
    const int thread = thread_of_warpgroup();
    const int bin = thread / kThreadsOfBin;
    const float* const own = memory.bins[bin] + thread % kThreadsOfBin * kThreadBins;
    float sum = 0;
#pragma unroll 8
    // NOTE: lanes begin at other columns, so that they read other banks.
    for (int n = 0; n < kThreadBins; ++n) sum += own[(n + thread) % kThreadBins];
#pragma unroll
    for (int distance = kThreadsOfBin / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, distance);
    }
    if (thread % kThreadsOfBin == 0) time.add(first + bin, sum);
  }

  // Adds the sums of all distances of the tile.
  static HSTU_DEVICE void add_diagonals(const TableSum& sums, const BackwardParams& params,
                                        const WorkTile& work_tile, int m, const Memory& memory) {
    const BiasTable& table = params.relative_bias.position;
    const int64_t first = first_entry(table, params, work_tile.head);
    const int origin = Traits::first_key(work_tile) - m * kRows - work_tile.tile.sequence.offset +
                       table.size / 2;  // the entry of distance 0 within the tile
    constexpr int kDistances = kRows + kKeys - 1;
#pragma unroll
    for (int begin = 0; begin < kDistances; begin += kWarpgroup) {
      const int n = begin + thread_of_warpgroup();
      const int distance = n - (kRows - 1);  // of a key and a row of the tile
      float sum = 0;
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        const int column = distance + r + (kRowBlocks - 1) * 8;
        if (n < kDistances && column >= 0 && column < Memory::kDiagonals - 8) {
          sum += memory.diagonals[r][column];
        }
      }
      // Distances past the ends of the table share its first and its last entry.
      const int entry = origin + distance;
      add_shared(sums, first, entry <= 0, sum);
      add_shared(sums, first + table.size - 1, entry >= table.size - 1 && entry > 0, sum);
      if (entry > 0 && entry < table.size - 1) sums.add(first + entry, sum);
    }
  }

  // Adds what the lanes of a warp with `is_shared` have to one entry.
  static HSTU_DEVICE void add_shared(const TableSum& sums, int64_t entry, bool is_shared,
                                     float sum) {
    if (!__any_sync(0xffffffff, is_shared)) return;
    float total = is_shared ? sum : 0;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      total += __shfl_xor_sync(0xffffffff, total, distance);
    }
    if (threadIdx.x % 32 == 0) sums.add(entry, total);
  }
};

}  // namespace hstu::sm90
