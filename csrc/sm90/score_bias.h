// What is added to Q K^T before the activation: the policies of ForwardTraits::Bias.
//
//   NoScoreBias        nothing
//   DenseScoreBias     a bias tensor in q's dtype, copied to shared memory tile by tile
//   RelativeScoreBias  weights by time in tiles that a further warpgroup computes, and weights by
//                      position from a window of their table
//
// A policy has a Producer, whose load() is called by the warp that copies K for each key tile, and
// a Consumer, whose init_accumulator() gives the scores the value that Q K^T is added to. Where
// kWarpgroups is 1, the further warpgroup calls run().
#pragma once

#include "../common/opaque.h"
#include "bias.h"
#include "pipeline.h"
#include "relative_bias.h"

namespace hstu::sm90 {

struct NoScoreBias {
  static constexpr bool kHasTiles = false;  // of shared memory
  static constexpr int kWarpgroups = 0;     // that compute tiles
  template <int kRows, int kKeys>
  struct Windows {};  // shared memory of the further warpgroup
  template <typename Element>
  using TileElement = Element;  // for a call with tensors of Element
  static constexpr GMMA::ScaleOut kScaleOut = GMMA::ScaleOut::Zero;

  template <typename Maps>
  static HSTU_DEVICE void prefetch(const Maps&) {}

  template <typename Traits>
  struct Producer {
    HSTU_DEVICE void load(const ForwardParams&, const typename Traits::Maps&,
                          typename Traits::SharedMemory&, const typename Traits::WorkTile&, int) {}
  };

  template <typename Traits>
  struct Consumer {
    HSTU_DEVICE explicit Consumer(const ForwardParams&) {}

    template <typename Scores>
    HSTU_DEVICE void init_accumulator(typename Traits::SharedMemory&, int, Scores&) {}
    HSTU_DEVICE void skip_tile(typename Traits::SharedMemory&, int) {}
  };
};

struct DenseScoreBias {
  static constexpr bool kHasTiles = true;
  static constexpr int kWarpgroups = 0;
  template <int kRows, int kKeys>
  using Windows = NoScoreBias::Windows<kRows, kKeys>;
  template <typename Element>
  using TileElement = Element;
  // Q K^T is added to what the accumulator holds.
  static constexpr GMMA::ScaleOut kScaleOut = GMMA::ScaleOut::One;

  template <typename Maps>
  static HSTU_DEVICE void prefetch(const Maps& maps) {
    cute::prefetch_tma_descriptor(&maps.bias);
  }

  template <typename Traits>
  struct Producer {
    typename Traits::BiasState state;

    // Starts copying the tile of the bias of the key tile that begins with padded key `first`.
    // Called by all threads that copy K.
    HSTU_DEVICE void load(const ForwardParams& params, const typename Traits::Maps& maps,
                          typename Traits::SharedMemory& smem,
                          const typename Traits::WorkTile& work_tile, int first) {
      constexpr int kRows = Traits::kRows;
      constexpr int kKeys = Traits::kKeys;
      using Source = typename Traits::Source;
      if (!Source::is_leader()) return;
      const Sequence& sequence = work_tile.tile.sequence;
      auto& pipeline = smem.pipeline_bias[0];
      pipeline.producer_acquire(state);
      auto& full = pipeline.full[state.index()];
      full.arrive_and_expect_tx(sizeof(smem.bias[0]));
      start_copy_bias<kRows, kKeys>(maps.bias, work_tile.tile.sequence_index,
                                    work_tile.head / (params.heads / params.rab.heads),
                                    work_tile.tile.index * kRows + sequence.offset,
                                    Source::template key_of<kKeys>(sequence, first),
                                    smem.bias[state.index()], full);
      state.advance();
    }
  };

  template <typename Traits>
  struct Consumer {
    typename Traits::BiasState state;

    HSTU_DEVICE explicit Consumer(const ForwardParams&) {}

    // scores = bias of the next key tile. Called by a warpgroup.
    template <typename Scores>
    HSTU_DEVICE void init_accumulator(typename Traits::SharedMemory& smem, int warpgroup,
                                      Scores& scores) {
      constexpr int kKeys = Traits::kKeys;
      auto& pipeline = smem.pipeline_bias[0];
      pipeline.consumer_wait(state);
      load_bias<kKeys>(smem.bias[state.index()] + warpgroup * (kWarpgroupRows * kKeys), scores);
      pipeline.consumer_release_by_warp(state);
      state.advance();
    }
    // Releases the bias of a key tile that no row of the warpgroup sees.
    HSTU_DEVICE void skip_tile(typename Traits::SharedMemory& smem, int) {
      smem.pipeline_bias[0].consumer_wait(state);
      smem.pipeline_bias[0].consumer_release_by_warp(state);
      state.advance();
    }
  };
};

// 8 weights in fp16, which represents them better than bf16 does; weights beyond its range become
// its largest number.
HSTU_DEVICE uint4 half_chunk(const float (&x)[8]) {
  return {half_pair(x[0], x[1]), half_pair(x[2], x[3]), half_pair(x[4], x[5]),
          half_pair(x[6], x[7])};
}

// A warpgroup computes one tile after another.
struct RelativeScoreBias {
  static constexpr bool kHasTiles = true;
  static constexpr int kWarpgroups = 1;
  static constexpr GMMA::ScaleOut kScaleOut = GMMA::ScaleOut::One;
  template <typename Element>
  using TileElement = cutlass::half_t;

  template <typename Maps>
  static HSTU_DEVICE void prefetch(const Maps&) {}

  template <typename Traits>
  using Producer = NoScoreBias::Producer<Traits>;

  // A tile has the weights by time, to which consumers add those by position.
  template <typename Traits>
  struct Consumer {
    const RelativeBias& tables;
    typename Traits::BiasState state;

    HSTU_DEVICE explicit Consumer(const ForwardParams& params) : tables(params.relative_bias) {}

    // scores = bias of the next key tile. Called by a warpgroup.
    template <typename Scores>
    HSTU_DEVICE void init_accumulator(typename Traits::SharedMemory& smem, int warpgroup,
                                      Scores& scores) {
      smem.pipeline_bias[warpgroup].consumer_wait(state);
      compiler_barrier();  // before plain loads of what has been waited for
      // NOTE: each case is a basic block, in which all loads are issued before the first is waited
      // for.
      if (!tables.position.data) {
        load_bias<Traits::kKeys>(times(smem, warpgroup), scores);
      } else if (tables.time.data) {
        load_with_position<true>(smem, warpgroup, scores);
      } else {
        load_with_position<false>(smem, warpgroup, scores);
      }
      smem.pipeline_bias[warpgroup].consumer_release_by_warp(state);
      state.advance();
    }
    // Releases the bias of a key tile that no row of the warpgroup sees.
    HSTU_DEVICE void skip_tile(typename Traits::SharedMemory& smem, int warpgroup) {
      smem.pipeline_bias[warpgroup].consumer_wait(state);
      smem.pipeline_bias[warpgroup].consumer_release_by_warp(state);
      state.advance();
    }

   private:
    HSTU_DEVICE const cutlass::half_t* times(typename Traits::SharedMemory& smem,
                                             int warpgroup) const {
      return smem.bias[state.index()] + warpgroup * (kWarpgroupRows * Traits::kKeys);
    }

    template <bool kHasTime, typename Scores>
    HSTU_DEVICE void load_with_position(typename Traits::SharedMemory& smem, int warpgroup,
                                        Scores& scores) const {
      constexpr int kKeys = Traits::kKeys;
      const int lane = static_cast<int>(threadIdx.x) % 32;
      const int row = warpgroup * kWarpgroupRows + static_cast<int>(threadIdx.x) / 32 % 4 * 16;
      // The lane's second row, which is 8 behind its first one, has the pairs of the keys 8 before.
      const uint32_t* const from =
          smem.bias_windows[0].position[state.count % 3].of_row(row + lane / 4 + 8, lane % 4 * 2);
      uint32_t pairs[kKeys / 8 + 1];
#pragma unroll
      for (int n = 0; n <= kKeys / 8; ++n) pairs[n] = from[4 * n];
      uint32_t words[kKeys / 16][4] = {};
#pragma unroll
      for (int part = 0; part < kKeys / 16 && kHasTime; ++part) {
        load_bias_part(times(smem, warpgroup), part, words[part]);
      }
#pragma unroll
      for (int n = 0; n < kKeys / 4; ++n) {
        uint32_t weights = pairs[n / 2 + 1 - n % 2];
        if (kHasTime) weights = add_half_pairs(weights, words[n / 4][n % 4]);
        scores(n * 2) = low_half<cutlass::half_t>(weights);
        scores(n * 2 + 1) = high_half<cutlass::half_t>(weights);
      }
    }
  };

  // The inputs of the tile that a warpgroup computes, and of its next tile, which are being copied.
  template <int kRows, int kKeys>
  struct Windows {
    KeyTimes<kKeys> keys[2];
    // NOTE: while consumers read one and the next is ready for them, a third one is being copied.
    PositionPairs<kRows, kKeys> position[3];
    NarrowCells cells;
    MixedBlocks<kKeys / 8> mixed[4];  // of the warps
  };

  // Computes the tiles of all work tiles of the block. Called by a warpgroup, in which each thread
  // has one row.
  template <typename Traits>
  static HSTU_DEVICE void run(const ForwardParams& params, typename Traits::SharedMemory& smem) {
    constexpr int kRows = Traits::kRows;
    constexpr int kKeys = Traits::kKeys;
    static_assert(kRows == kWarpgroup, "each thread has one row");
    using WorkTile = typename Traits::WorkTile;
    using Source = typename Traits::Source;
    const int row = static_cast<int>(threadIdx.x) % kRows;
    auto& windows = smem.bias_windows[0];
    auto& pipeline = smem.pipeline_bias[row / kWarpgroupRows];
    typename Traits::BiasState state;
    for_each_work_tile(smem.work_tiles, smem.pipeline_work, [&](const WorkTile& work_tile) {
      const SequenceTile& tile = work_tile.tile;
      const int first_row = tile.index * kRows;
      const HeadBias bias(params.relative_bias, params.mask, tile.sequence, tile.sequence_index,
                          params.heads, work_tile.head);
      const auto key_of = [&](int first) {
        return Source::template key_of<kKeys>(tile.sequence, first);
      };
      // Starts copying what key tile number `count` of the block needs.
      const auto start_copy = [&](int first, uint32_t count) {
        if (first == Traits::kNoKey) return;
        const int key = key_of(first);
        bias.template start_copy_keys<kWarpgroup>(row, key, windows.keys[count % 2]);
        bias.template start_copy_position<kWarpgroup>(row, first_row, key,
                                                      windows.position[count % 3]);
      };
      const RowTimes times = bias.times_of_row(first_row + row);
      int first = work_tile.tile_from(0);
      sync_warpgroup(Traits::kConsumers);  // the windows have been read
      bias.template start_copy_cells<kWarpgroup>(row, windows.cells);
      start_copy(first, state.count);
      while (first != Traits::kNoKey) {
        ptx::cp_async_wait_all();
        // This window is written, and all warps have acquired the stage before, so that consumers
        // have read the window of the tile two before.
        sync_warpgroup(Traits::kConsumers);
        const int next = work_tile.tile_from(first + kKeys);
        start_copy(next, state.count + 1);
        pipeline.producer_acquire(state);
        if (params.relative_bias.time.data) {
          find_tile<Traits>(bias, times, key_of(first), row, windows, state.count % 2,
                            smem.bias[state.index()]);
        }
        pipeline.producer_commit_by_warp(state);
        state.advance();
        first = next;
      }
    });
  }

 private:
  // Writes a warp's rows of a tile, in the layout of load_bias().
  template <typename Traits>
  static HSTU_DEVICE void find_tile(const HeadBias& bias, const RowTimes& times, int first, int row,
                                    Windows<Traits::kRows, Traits::kKeys>& windows, int parity,
                                    cutlass::half_t* tile) {
    const auto& keys = windows.keys[parity];
    cutlass::half_t* const rows = tile + row / kWarpgroupRows * (kWarpgroupRows * Traits::kKeys);
    const int first_row = row % kWarpgroupRows / 32 * 32;  // of the warp
    const auto chunk_at = [&](int own, int chunk) {
      return rows + (chunk / 8 * kWarpgroupRows + first_row + own) * 64 + (chunk % 8 ^ own % 8) * 8;
    };
    bias.template find<Traits::kKeys / 8, NoPosition>(
        times, first, keys.times, keys.ranges, nullptr, windows.cells, windows.mixed[row / 32],
        [&](int own, int chunk, const float (&x)[8]) {
          *reinterpret_cast<uint4*>(chunk_at(own, chunk)) = half_chunk(x);
        },
        [&](int own, int key) { chunk_at(own, key / 8)[key % 8] = cutlass::half_t(0); });
  }
};

}  // namespace hstu::sm90
