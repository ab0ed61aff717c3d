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
  using Times = TimeBlocks<kRows, kKeys, Element, Traits::kIsDeterministic>;

 public:
  static HSTU_DEVICE void run(const BackwardParams& params, const BackwardBuffers& buffers,
                              SharedMemory& smem) {
    const bool has_position = buffers.sums.position.words;
    if constexpr (!Traits::kHasTimeBias) {
      run<false, true, false>(params, buffers, smem);
    } else if (!buffers.sums.time.words) {
      run<true, true, false>(params, buffers, smem);
    } else if (has_position) {
      run<true, true, true>(params, buffers, smem);
    } else {
      run<true, false, true>(params, buffers, smem);
    }
  }

 private:
  // kHasTime: the bias has a time table. kSumsPositions: the gradient of the position table may be
  // wanted. kSumsTimes: that of the time table is wanted.
  template <bool kHasTime, bool kSumsPositions, bool kSumsTimes>
  static HSTU_DEVICE void run(const BackwardParams& params, const BackwardBuffers& buffers,
                              SharedMemory& smem) {
    const TableSums& sums = buffers.sums;
    auto& memory = smem.relative_bias[0];
    Gradients gradients(thread_of_warpgroup(), memory.gradients);
    Times times(thread_of_warpgroup(), memory.keys, memory.warps[thread_of_warpgroup() / 32]);
    BiasState bias_state;
    DsState ds_state;
    for_each_work_tile(smem.work_tiles, smem.pipeline_work, [&](const WorkTile& work_tile) {
      const SequenceTile& tile = work_tile.tile;
      const RelativeBias& tables = params.relative_bias;
      const int time_head =
          tables.time.data ? work_tile.head / (params.heads / tables.time.heads) : 0;
      const TableEntries entries = {
          sums,
          tile.sequence,
          tables.position.size,
          work_tile.bias_head * tables.position.size,
          time_head * tables.time.size,
          Traits::first_key(work_tile) - tile.sequence.offset + tables.position.size / 2};
      const TimesOfTile times_of_tile = {tables,
                                         params.mask,
                                         tile,
                                         work_tile.map,
                                         work_tile.head,
                                         time_head,
                                         Traits::first_key(work_tile),
                                         memory.first_rows,
                                         memory.last_rows};
      int m = Traits::first_row_tile(work_tile);
      if constexpr (kHasTime) {
        times.enter();
        sync();  // the times of keys have been read
        if (thread_of_warpgroup() == 0) {
          memory.first_rows =
              static_cast<int>(first_tile(tile.sequence.q_begin, tile.sequence_index, 8));
          memory.last_rows = (tile.sequence.q_len - 1) / 8;
        }
        sync();
        times.start_load_ranges(times_of_tile, m);
        times.start_load_rows(times_of_tile, m, bias_state.count % 2);
        memory.keys.template start_copy<kWarpgroup>(tables, tile, Traits::first_key(work_tile),
                                                    thread_of_warpgroup());
        ptx::cp_async_wait_all();
        sync();
      }
      // With weights by time, the first iteration only computes the weights of the first tile.
      int next = kHasTime ? m : Traits::next_row_tile(work_tile, m);
      for (bool is_first = kHasTime;; is_first = false) {
        const int thread = thread_of_warpgroup();
        gradients.set_thread(thread);
        times.set_thread(thread);
        const int parity = ds_state.count % 2;  // of the step of tile m
        int after = -1;
        if constexpr (kHasTime) {
          if (next >= 0) {
            after = Traits::next_row_tile(work_tile, next);
            smem.pipeline_bias.producer_acquire(bias_state);
            times.find(times_of_tile, next, bias_state.count % 2, memory.times[bias_state.index()],
                       reinterpret_cast<uint32_t*>(smem.bias[bias_state.index()]));
            smem.pipeline_bias.producer_commit_by_warp(bias_state);
            bias_state.advance();
            if (after >= 0) times.start_load_ranges(times_of_tile, after);
          } else {
            times.skip();
          }
          if (is_first) {
            if (after >= 0) times.start_load_rows(times_of_tile, after, bias_state.count % 2);
            next = after;
            continue;
          }
        }
        smem.pipeline_ds.consumer_wait(ds_state);
        compiler_barrier();  // keeps the plain loads of dS behind the wait
        const Element* const ds =
            Traits::ds_tile(smem, ds_state) + Traits::rank() * (kRows * kKeys);
        const auto release = [&] { smem.pipeline_ds.consumer_release_by_warp(ds_state); };
        if constexpr (kSumsTimes) {
          const float total = gradients.template add_tile<kSumsPositions, true>(ds);
          times.add(entries, times_of_tile, m, parity, total, ds, release);
          if (kSumsPositions) gradients.finish(entries, m);
        } else if (sums.position.words) {
          gradients.template add_tile<true, false>(ds);
          release();
          gradients.finish(entries, m);
        } else {
          release();
        }
        ds_state.advance();
        if constexpr (kHasTime) {
          if (after >= 0) times.start_load_rows(times_of_tile, after, bias_state.count % 2);
        }
        if (kSumsPositions && sums.position.words) skip_tiles(entries, m, next, gradients);
        m = next;
        if (m < 0) break;
        next = Traits::next_row_tile(work_tile, m);
      }
      if constexpr (kSumsTimes) times.finish(entries);
    });
  }

  // NOTE: the value is opaque to the compiler, which would otherwise keep, and spill, all that it
  // derives from the thread index.
  static HSTU_DEVICE int thread_of_warpgroup() { return bounded_thread_idx() % kWarpgroup; }
  static HSTU_DEVICE void sync() { sync_warpgroup(Traits::kConsumers); }

  // Adds the sums of the diagonals that end in the row tiles between tile m and tile `next`, which
  // the main loop skips. If `next` is -1, all diagonals end.
  static HSTU_DEVICE void skip_tiles(const TableEntries& entries, int m, int next,
                                     Gradients& gradients) {
    const int skipped = min(next < 0 ? kRows : abs(next - m) - 1, Gradients::kTilesOfDiagonal);
    for (int n = 0; n < skipped; ++n) {
      gradients.add_empty_tile(entries, m + (Traits::kIsDeterministic ? -1 - n : 1 + n));
    }
  }
};

}  // namespace hstu::sm90
