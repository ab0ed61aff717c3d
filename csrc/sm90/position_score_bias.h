// The weights by position of a relative bias in the forward: the warp that copies K copies a window
// of the position table for each key tile. Without a time bias, they initialize the accumulator of
// S.
#pragma once

#include "../common/opaque.h"
#include "../common/relative_bias.h"
#include "position_window.h"

namespace hstu::sm90 {

// The inputs of a relative bias for one key tile. `times` is empty without weights by time.
template <int kRows, int kKeys, bool kHasTime>
struct RelativeBiasWindow {
  using Position = PositionWindow<kRows, kKeys, 2>;
  static constexpr int kTimeBytes = kKeys / 8 * sizeof(KeyBlockTimes);

  KeyBlockTimes times[kHasTime ? kKeys / 8 : 0];
  Position position;
};

// Starts copying the weights by position of a work tile's rows and of a tile of keys from `key` on.
// The copy completes on `full`, which already expects its bytes. Called by one thread.
template <typename Traits>
HSTU_DEVICE void start_copy_position(const ForwardParams& params,
                                     const typename Traits::WorkTile& work_tile, int key,
                                     typename Traits::BiasWindow::Position& window,
                                     cutlass::arch::ClusterTransactionBarrier& full) {
  const RelativeBias& bias = params.relative_bias;
  const float* const table =
      bias.prepared.position + work_tile.bias_head * bias.prepared.position_head_stride;
  window.start_copy(bias.prepared, table, work_tile.tile.sequence,
                    work_tile.tile.index * Traits::kRows, key, full);
}

// The producer's part. The copies of windows complete on the barriers of K.
template <typename Traits>
struct PositionBiasProducer {
  using Source = typename Traits::Source;

  // Starts copying the window of the key tile that begins with padded key `first`. Called by all
  // threads that copy K, after K of the tile is being copied.
  HSTU_DEVICE void load(const ForwardParams& params, const typename Traits::Maps&,
                        typename Traits::SharedMemory& smem,
                        const typename Traits::WorkTile& work_tile, int first,
                        typename Traits::KVState state) {
    if (!Source::is_leader()) return;
    auto& full = smem.pipeline_k.full[state.index()];
    auto& window = smem.bias_windows[Traits::bias_window(state)].position;
    full.arrive_and_expect_tx(Traits::BiasWindow::Position::kBytes);
    start_copy_position<Traits>(
        params, work_tile, Source::template key_of<Traits::kKeys>(work_tile.tile.sequence, first),
        window, full);
  }
};

// The consumers' part. Called by all threads of a warpgroup.
template <typename Traits>
struct PositionBiasConsumer {
  HSTU_DEVICE explicit PositionBiasConsumer(const ForwardParams&) {}

  // scores = the weights of the key tile at `state`.
  template <typename Scores>
  HSTU_DEVICE void init_accumulator(typename Traits::SharedMemory& smem, int warpgroup,
                                    typename Traits::KVState state, Scores& scores) {
    constexpr int kChunks = Traits::kKeys / 8;
    float2 positions[kChunks + 1];
    load(smem.bias_windows[Traits::bias_window(state)].position, Traits::row_of_thread(warpgroup),
         0, positions);
#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        scores(n * 4 + m * 2) = positions[n + 1 - m].x;
        scores(n * 4 + m * 2 + 1) = positions[n + 1 - m].y;
      }
    }
  }

  // Loads the weights of the thread's scores in the chunks of 8 keys from `chunk` on. The thread
  // has rows `row` and `row` + 8. positions[n] has the weights of row `row` + 8 in chunk n, which
  // are also the weights of row `row` in chunk n - 1.
  template <typename Position, int kCount>
  static HSTU_DEVICE void load(const Position& window, int row, int chunk,
                               float2 (&positions)[kCount]) {
    const float* const from = window.of_row(row + 8) + reload_thread_idx() % 4 * 2 + chunk * 8;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      positions[n] = *reinterpret_cast<const float2*>(from + 8 * n);
    }
  }
  HSTU_DEVICE void skip_tile(typename Traits::SharedMemory&) {}
};

}  // namespace hstu::sm90
