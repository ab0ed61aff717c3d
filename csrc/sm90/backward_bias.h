// The warpgroup of the backward that computes the weights by time of a relative bias, and sums dS
// for the gradients of the tables.
//
// It computes the weights of a tile of rows one step ahead of the consumers, then reads the dS that
// they have stored for dQ. Consumers add the weights by position.
#pragma once

#include "../common/opaque.h"
#include "backward_traits.h"

namespace hstu::sm90 {

template <typename Traits>
class BackwardBias {
  using BiasState = typename Traits::BiasState;
  using DsState = typename Traits::DsState;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using WorkTile = typename Traits::WorkTile;
  static constexpr int kRows = Traits::kRows;
  static constexpr int kKeys = Traits::kBlockKeys;
  using Gradients = TableGradients<kRows, kKeys, Element, Traits::kIsDeterministic>;

 public:
  static HSTU_DEVICE void run(const BackwardParams& params, const BackwardBuffers& buffers,
                              SharedMemory& smem) {
    if (params.relative_bias.time.data) {
      run<true>(params, buffers, smem);
    } else {
      run<false>(params, buffers, smem);
    }
  }

 private:
  template <bool kHasTime>
  static HSTU_DEVICE void run(const BackwardParams& params, const BackwardBuffers& buffers,
                              SharedMemory& smem) {
    const TableSums& sums = buffers.sums;
    auto& memory = smem.relative_bias[0];
    Gradients gradients(thread_of_warpgroup(), memory.keys, memory.gradients);
    BiasState bias_state;
    DsState ds_state;
    for_each_work_tile(smem.work_tiles, smem.pipeline_work, [&](const WorkTile& work_tile) {
      const SequenceTile& tile = work_tile.tile;
      const RelativeBias& tables = params.relative_bias;
      const HeadBias bias(tables, params.mask, tile.sequence, tile.sequence_index, params.heads,
                          work_tile.head);
      const TableEntries entries = {
          sums,
          tile.sequence,
          tables.position.size,
          first_entry(tables.position, params, work_tile.head),
          first_entry(tables.time, params, work_tile.head),
          Traits::first_key(work_tile) - tile.sequence.offset + tables.position.size / 2};
      // Computes the weights by time of tile m of rows.
      const auto find_times = [&](int m) {
        const int thread = thread_of_warpgroup();
        RowTimes times;
        if (m >= 0) times = bias.times_of_row(m * kRows + thread % kRows);
        ptx::cp_async_wait_all();
        sync();  // what the keys have is written, and the times of rows of the tile before are read
        if (m < 0) return;
        const int next = Traits::next_row_tile(work_tile, m);
        if (next >= 0) bias.prefetch_times_of_row(next * kRows + thread % kRows);
        gradients.store_rows(times, bias_state.count % 2);
        find_tile(thread, work_tile, bias, times, bias_state, smem);
      };
      int m = Traits::first_row_tile(work_tile);
      if constexpr (kHasTime) {
        const int thread = thread_of_warpgroup();
        sync();  // the windows have been read
        bias.template start_copy_keys<kWarpgroup>(thread, Traits::first_key(work_tile),
                                                  memory.keys);
        bias.template start_copy_cells<kWarpgroup>(thread, memory.cells);
      }
      // With weights by time, the first round only computes those of the first tile.
      int next = kHasTime ? m : Traits::next_row_tile(work_tile, m);
      for (bool is_first = kHasTime;; is_first = false) {
        gradients.set_thread(thread_of_warpgroup());
        typename Gradients::Block block;
        const int parity = ds_state.count % 2;
        if constexpr (kHasTime) {
          find_times(next);
          if (is_first) {
            next = Traits::next_row_tile(work_tile, m);
            continue;
          }
          if (sums.time.words)
            block = gradients.find_block(tables, Traits::first_key(work_tile), parity);
        }
        smem.pipeline_ds.consumer_wait(ds_state);
        compiler_barrier();  // before plain loads of what has been waited for
        const Element* const ds =
            Traits::ds_tile(smem, ds_state) + Traits::rank() * (kRows * kKeys);
        const auto release = [&] { smem.pipeline_ds.consumer_release_by_warp(ds_state); };
        if (kHasTime && sums.time.words) {
          gradients.add_tile(entries, tables, m, parity, block, ds,
                             memory.warps[thread_of_warpgroup() / 32].time_bins, release);
        } else if (sums.position.words) {
          gradients.add_positions(entries, m, ds, release);
        } else {
          release();
        }
        ds_state.advance();
        if (sums.position.words) skip_tiles(entries, m, next, gradients);
        m = next;
        if (m < 0) break;
        next = Traits::next_row_tile(work_tile, m);
      }
    });
  }

  // NOTE: the compiler knows nothing about the value. Otherwise it would keep, and spill, what
  // follows from it for all steps.
  static HSTU_DEVICE int thread_of_warpgroup() { return bounded_thread_idx() % kWarpgroup; }
  static HSTU_DEVICE void sync() { sync_warpgroup(Traits::kConsumers); }

  // The first entry of the table of a head.
  static HSTU_DEVICE int first_entry(const BiasTable& table, const BackwardParams& params,
                                     int head) {
    return table.data ? head / (params.heads / table.heads) * table.size : 0;
  }

  // Adds the sums of diagonals that do not reach from tile m of rows to tile `next`. With -1, these
  // are all.
  static HSTU_DEVICE void skip_tiles(const TableEntries& entries, int m, int next,
                                     Gradients& gradients) {
    const int skipped = min(next < 0 ? kRows : abs(next - m) - 1, Gradients::kTilesOfDiagonal);
    for (int n = 0; n < skipped; ++n) {
      gradients.add_empty_tile(entries, m + (Traits::kIsDeterministic ? -1 - n : 1 + n));
    }
  }

  // Computes the next tile of weights by time. A thread has a row, with `times`, and half of the
  // keys.
  static HSTU_DEVICE void find_tile(int thread, const WorkTile& work_tile, const HeadBias& bias,
                                    const RowTimes& times, BiasState& state, SharedMemory& smem) {
    constexpr int kThreadChunks = kKeys / 8 / 2;
    auto& memory = smem.relative_bias[0];
    const int row = thread % kRows;
    const int first_chunk = thread / kRows * kThreadChunks;
    const int first_row = row / 32 * 32;
    // A chunk in the layout of rows_tensor().
    const auto chunk_at = [&](int own, int n) {
      const int chunk = first_chunk + n;
      return smem.bias[state.index()] + (chunk / 8 * kRows + first_row + own) * 64 +
             (chunk % 8 ^ own % 8) * 8;
    };
    smem.pipeline_bias.producer_acquire(state);
    bias.template find<kThreadChunks, NoPosition>(
        times, Traits::first_key(work_tile) + first_chunk * 8, memory.keys.times + first_chunk * 8,
        memory.keys.ranges + first_chunk, nullptr, memory.cells, memory.warps[thread / 32].mixed,
        [&](int own, int chunk, const float (&x)[8]) {
          *reinterpret_cast<uint4*>(chunk_at(own, chunk)) = half_chunk(x);
        },
        [&](int own, int key) { chunk_at(own, key / 8)[key % 8] = cutlass::half_t(0); });
    smem.pipeline_bias.producer_commit_by_warp(state);
    state.advance();
  }
};

}  // namespace hstu::sm90
