// What is added to Q K^T before the activation: the policies of ForwardTraits::Bias.
//
//   NoScoreBias      nothing
//   DenseScoreBias   a bias tensor in q's dtype, copied to shared memory tile by tile
//
// A policy has a Producer, whose load() is called by the warp that copies K for each key tile, and
// a Consumer, whose init_accumulator() gives the scores the value that Q K^T is added to.
//
// A relative bias from tables would be one more policy: its Producer would copy the tables once and
// the timestamps of each key tile, and its init_accumulator() would look the weights up.
#pragma once

#include "bias.h"
#include "pipeline.h"

namespace hstu::sm90 {

struct NoScoreBias {
  static constexpr bool kHasTiles = false;  // of shared memory
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

}  // namespace hstu::sm90
