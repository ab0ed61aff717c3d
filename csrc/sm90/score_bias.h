// What is added to Q K^T before the activation: the policies of ForwardTraits::Bias.
//
//   NoScoreBias      nothing
//   DenseScoreBias   a bias tensor in q's dtype, copied to shared memory tile by tile
//   RelativeScoreBias  computed from tables by kWarpgroups further warpgroups, as such tiles
//
// A policy has a Producer, whose load() is called by the warp that copies K for each key tile, and
// a Consumer, whose init_accumulator() gives the scores the value that Q K^T is added to.
#pragma once

#include "../common/relative_bias.h"
#include "bias.h"
#include "pipeline.h"

namespace hstu::sm90 {

struct NoScoreBias {
  static constexpr bool kHasTiles = false;  // of shared memory
  static constexpr int kWarpgroups = 0;     // that compute tiles
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
    template <typename Scores>
    HSTU_DEVICE void init_accumulator(typename Traits::SharedMemory&, int, Scores&) {}
    HSTU_DEVICE void skip_tile(typename Traits::SharedMemory&) {}
  };
};

struct DenseScoreBias {
  static constexpr bool kHasTiles = true;
  static constexpr int kWarpgroups = 0;
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
      smem.pipeline_bias.producer_acquire(state);
      auto& full = smem.pipeline_bias.full[state.index()];
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

    // scores = bias of the next key tile. Called by a warpgroup.
    template <typename Scores>
    HSTU_DEVICE void init_accumulator(typename Traits::SharedMemory& smem, int warpgroup,
                                      Scores& scores) {
      constexpr int kKeys = Traits::kKeys;
      smem.pipeline_bias.consumer_wait(state);
      load_bias<kKeys>(smem.bias[state.index()] + warpgroup * (kWarpgroupRows * kKeys), scores);
      smem.pipeline_bias.consumer_release_by_warp(state);
      state.advance();
    }
    // Releases the bias of a key tile that no row of the warpgroup sees.
    HSTU_DEVICE void skip_tile(typename Traits::SharedMemory& smem) {
      smem.pipeline_bias.consumer_wait(state);
      smem.pipeline_bias.consumer_release_by_warp(state);
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

// kWarpgroups_ warpgroups compute one tile after another, in turn.
template <int kWarpgroups_>
struct RelativeScoreBias {
  static constexpr bool kHasTiles = true;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr GMMA::ScaleOut kScaleOut = GMMA::ScaleOut::One;
  template <typename Element>
  using TileElement = cutlass::half_t;

  template <typename Maps>
  static HSTU_DEVICE void prefetch(const Maps&) {}

  template <typename Traits>
  using Producer = NoScoreBias::Producer<Traits>;
  template <typename Traits>
  using Consumer = DenseScoreBias::Consumer<Traits>;

  // Computes the tiles of all work tiles of the block. Called by warpgroup n of kWarpgroups.
  template <typename Traits>
  static HSTU_DEVICE void run(const ForwardParams& params, typename Traits::SharedMemory& smem,
                              int n) {
    constexpr int kKeys = Traits::kKeys;
    static_assert(Traits::kRows == kWarpgroup, "each thread has one row");
    static_assert(Traits::BiasState::kStages % kWarpgroups == 0, "a warpgroup has its own stages");
    using WorkTile = typename Traits::WorkTile;
    using Source = typename Traits::Source;
    const int row = static_cast<int>(threadIdx.x) % Traits::kRows;
    typename Traits::BiasState state;
    for_each_work_tile(smem.work_tiles, smem.pipeline_work, [&](const WorkTile& work_tile) {
      const SequenceTile& tile = work_tile.tile;
      const BiasOfRows bias(params.relative_bias, tile.sequence, tile.sequence_index, params.heads,
                            work_tile.head, tile.index * Traits::kRows + row / 32 * 32);
      for (int first = work_tile.tile_from(0); first != Traits::kNoKey;) {
        const int next = work_tile.tile_from(first + kKeys);
        if (static_cast<int>(state.count % kWarpgroups) == n) {
          if (next != Traits::kNoKey) {
            bias.prefetch(Source::template key_of<kKeys>(tile.sequence, next), kKeys);
          }
          smem.pipeline_bias.producer_acquire(state);
          find_tile<Traits>(bias, Source::template key_of<kKeys>(tile.sequence, first), row,
                            smem.bias[state.index()]);
          smem.pipeline_bias.producer_commit_by_warp(state);
        }
        state.advance();
        first = next;
      }
    });
  }

 private:
  // Writes a row of a tile, in the layout of load_bias().
  template <typename Traits>
  static HSTU_DEVICE void find_tile(const BiasOfRows& bias, int first, int row,
                                    cutlass::half_t* tile) {
    const int own = row % kWarpgroupRows;
    cutlass::half_t* const rows = tile + row / kWarpgroupRows * (kWarpgroupRows * Traits::kKeys);
    bias.template find<Traits::kKeys / 8>(first, [&](int chunk, const float (&x)[8], uint2) {
      cutlass::half_t* const to =
          rows + (chunk / 8 * kWarpgroupRows + own) * 64 + (chunk % 8 ^ own % 8) * 8;
      *reinterpret_cast<uint4*>(to) = half_chunk(x);
    });
  }
};

}  // namespace hstu::sm90
