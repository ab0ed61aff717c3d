// The warpgroups of the backward that compute the weights by time of a relative bias, and sum dS
// for the gradients of the tables.
//
// A bias warpgroup computes the weights of a row tile ahead of the consumers, then reads the dS
// that the consumers have stored for dQ of its previous row tile. If there are two bias warpgroups,
// each takes every second row tile. The consumers add the weights by position.
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
  static constexpr int kWarpgroups = Traits::kBiasWarpgroups;
  using Gradients = TableGradients<kRows, kKeys, Element, Traits::kIsDeterministic>;
  using Times = TimeBlocks<kRows, kKeys, Element, Traits::kIsDeterministic>;

 public:
  static HSTU_DEVICE void run(const BackwardParams& params, const BackwardBuffers& buffers,
                              SharedMemory& smem, int warpgroup) {
    const bool has_position = buffers.sums.position.words;
    if constexpr (!Traits::kHasTimeBias) {
      run<false, true, false>(params, buffers, smem, warpgroup);
    } else if (!buffers.sums.time.words) {
      run<true, true, false>(params, buffers, smem, warpgroup);
    } else if (has_position) {
      run<true, true, true>(params, buffers, smem, warpgroup);
    } else {
      run<true, false, true>(params, buffers, smem, warpgroup);
    }
  }

 private:
  // kHasTime: the bias has a time table. kSumsPositions: the gradient of the position table may be
  // wanted. kSumsTimes: the gradient of the time table is wanted.
  template <bool kHasTime, bool kSumsPositions, bool kSumsTimes>
  static HSTU_DEVICE void run(const BackwardParams& params, const BackwardBuffers& buffers,
                              SharedMemory& smem, int warpgroup) {
    const TableSums& sums = buffers.sums;
    auto& bias = smem.relative_bias[0];
    auto& memory = bias.warpgroups[warpgroup];
    Gradients gradients(thread_of_warpgroup(), memory.gradients);
    Times times(thread_of_warpgroup(), memory.keys, memory.warps[thread_of_warpgroup() / 32]);
    uint32_t steps = 0;  // number of steps before the work tile
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
      // The warpgroup's next tile of rows, and the number of its step.
      int next = Traits::first_row_tile(work_tile);
      uint32_t step = steps;
      if (step % kWarpgroups != static_cast<uint32_t>(warpgroup)) {
        next = Traits::next_row_tile(work_tile, next);
        ++step;
      }
      if (next < 0) {
        steps = step;
        return;
      }
      if constexpr (kHasTime) {
        times.enter();
        sync(warpgroup);  // the times of keys have been read
        if (thread_of_warpgroup() == 0) {
          memory.first_rows =
              static_cast<int>(first_tile(tile.sequence.q_begin, tile.sequence_index, 8));
          memory.last_rows = (tile.sequence.q_len - 1) / 8;
        }
        sync(warpgroup);
        times.start_load_ranges(times_of_tile, next);
        times.start_load_rows(times_of_tile, next, parity_of(step));
        memory.keys.template start_copy<kWarpgroup>(tables, tile, Traits::first_key(work_tile),
                                                    thread_of_warpgroup());
        ptx::cp_async_wait_all();
        sync(warpgroup);
      }
      // With weights by time, the first iteration only computes the weights of the first tile.
      int m = -1;
      if constexpr (!kHasTime) {
        m = next;
        next = next_tile(work_tile, m);
        step += kWarpgroups;
      }
      for (;;) {
        const int thread = thread_of_warpgroup();
        gradients.set_thread(thread);
        times.set_thread(thread);
        const int parity = parity_of(step - kWarpgroups);  // of the step of tile m
        int after = -1;
        if constexpr (kHasTime) {
          if (next >= 0) {
            const BiasState state{step};
            smem.pipeline_bias.producer_acquire(state);
            times.find(times_of_tile, next, parity_of(step), bias.times[state.index()],
                       reinterpret_cast<uint32_t*>(smem.bias[state.index()]));
            smem.pipeline_bias.producer_commit_by_warp(state);
            after = next_tile(work_tile, next);
            if (after >= 0) times.start_load_ranges(times_of_tile, after);
          } else {
            times.skip();
          }
        }
        if (m >= 0) {
          const DsState state{step - kWarpgroups};
          smem.pipeline_ds.consumer_wait(state);
          compiler_barrier();  // keeps the plain loads of dS behind the wait
          const Element* const ds = Traits::ds_tile(smem, state) + Traits::rank() * (kRows * kKeys);
          const auto release = [&] { smem.pipeline_ds.consumer_release_by_warp(state); };
          if constexpr (kSumsTimes) {
            // NOTE: two passes over dS need fewer registers than one.
            if (kSumsPositions) gradients.template add_tile<true, false>(ds);
            const float total = gradients.template add_tile<false, true>(ds);
            times.add(entries, times_of_tile, m, parity, total, ds, release);
            if (kSumsPositions) gradients.finish(entries, m);
          } else if (sums.position.words) {
            gradients.template add_tile<true, false>(ds);
            release();
            gradients.finish(entries, m);
          } else {
            release();
          }
          if (kSumsPositions && sums.position.words) {
            skip_tiles(entries, m, next, gradients);
          }
        }
        if (kHasTime && after >= 0) times.start_load_rows(times_of_tile, after, parity);
        if (next < 0) break;
        m = next;
        next = kHasTime ? after : next_tile(work_tile, m);
        step += kWarpgroups;
      }
      // With two warpgroups, the last step of the work tile may belong to the other warpgroup.
      const bool is_last = kWarpgroups == 1 || Traits::next_row_tile(work_tile, m) < 0;
      steps = is_last ? step - kWarpgroups + 1 : step;
      if constexpr (kSumsTimes) times.finish(entries);
    });
  }

  // NOTE: the value is opaque to the compiler, which would otherwise keep, and spill, all that it
  // derives from the thread index.
  static HSTU_DEVICE int thread_of_warpgroup() { return bounded_thread_idx() % kWarpgroup; }
  static HSTU_DEVICE void sync(int warpgroup) { sync_warpgroup(Traits::kConsumers + warpgroup); }

  // Alternates between the steps of a warpgroup.
  static HSTU_DEVICE int parity_of(uint32_t step) {
    return static_cast<int>(step / kWarpgroups % 2);
  }

  // The warpgroup's tile after tile m.
  static HSTU_DEVICE int next_tile(const WorkTile& work_tile, int m) {
    m = Traits::next_row_tile(work_tile, m);
    return kWarpgroups == 2 && m >= 0 ? Traits::next_row_tile(work_tile, m) : m;
  }

  // Adds the sums of the diagonals that end in the row tiles between tile m and tile `next`; the
  // warpgroup reads no dS of those tiles. If `next` is -1, all diagonals end.
  static HSTU_DEVICE void skip_tiles(const TableEntries& entries, int m, int next,
                                     Gradients& gradients) {
    const int skipped = min(next < 0 ? kRows : abs(next - m) - 1, Gradients::kTilesOfDiagonal);
    for (int n = 0; n < skipped; ++n) {
      gradients.add_empty_tile(entries, m + (Traits::kIsDeterministic ? -1 - n : 1 + n));
    }
  }
};

}  // namespace hstu::sm90
