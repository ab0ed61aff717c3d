// The bias that is added to Q K^T before the activation: the policies of ForwardTraits::Bias and of
// BackwardTraits::Bias.
//
//   NoScoreBias        nothing
//   DenseScoreBias     a bias tensor in q's dtype, copied to shared memory tile by tile, except for
//                      tiles that TMA cannot copy
//   AddedDenseBias     a bias tensor in bf16 or fp16 for e4m3, added after Q K^T has been scaled
//   PositionScoreBias  the weights by position of a relative bias that has no weights by time
//   RelativeScoreBias  weights by position and by time, or either
//
// In the forward, a policy has a Producer, whose load() is called by the warp that copies K for
// each key tile, and a Consumer. The Consumer's init_accumulator() initializes the accumulator that
// Q K^T is added to. If kHasTime, find() computes the weights by time while the product runs. If
// kIsAddedAfter, scale() then computes x / 2 from the accumulator and the rest of the bias. If
// kIsRelative, windows of the position table are copied to shared memory. bias_head() is the head
// of the tensor or table whose tiles or windows are copied for a head of q. In the backward, if
// kIsRelative, further warpgroups compute the weights by time and sum dS for the gradients of the
// tables.
#pragma once

#include "bias.h"
#include "pipeline.h"
#include "position_score_bias.h"
#include "relative_score_bias.h"

namespace hstu::sm90 {

struct NoScoreBias {
  static constexpr bool kHasTiles = false;  // of the bias in shared memory
  static constexpr bool kIsAddedAfter = false;
  static constexpr bool kIsRelative = false;
  static constexpr bool kHasTime = false;
  template <typename Element>
  using TileElement = Element;  // for a call with tensors of Element
  static constexpr GMMA::ScaleOut kScaleOut = GMMA::ScaleOut::Zero;

  template <typename Maps>
  static HSTU_DEVICE void prefetch(const Maps&) {}
  static HSTU_DEVICE int bias_head(const ForwardParams&, int) { return 0; }

  template <typename Traits>
  struct Producer {
    HSTU_DEVICE void load(const ForwardParams&, const typename Traits::Maps&,
                          typename Traits::SharedMemory&, const typename Traits::WorkTile&, int,
                          typename Traits::KVState) {}
  };

  template <typename Traits>
  struct Consumer {
    HSTU_DEVICE explicit Consumer(const ForwardParams&) {}

    template <typename Scores>
    HSTU_DEVICE void init_accumulator(typename Traits::SharedMemory&, int, typename Traits::KVState,
                                      Scores&) {}
    HSTU_DEVICE void skip_tile(typename Traits::SharedMemory&) {}
  };
};

struct DenseScoreBias {
  static constexpr bool kHasTiles = true;
  static constexpr bool kIsAddedAfter = false;
  static constexpr bool kIsRelative = false;
  static constexpr bool kHasTime = false;
  template <typename Element>
  using TileElement = Element;
  // Q K^T is added to what the accumulator holds.
  static constexpr GMMA::ScaleOut kScaleOut = GMMA::ScaleOut::One;

  template <typename Maps>
  static HSTU_DEVICE void prefetch(const Maps& maps) {
    cute::prefetch_tma_descriptor(&maps.bias);
  }
  static HSTU_DEVICE int bias_head(const ForwardParams& params, int head) {
    return head / (params.heads / params.rab.heads);
  }

  // Returns whether consumers read the bias of the key tile that begins with padded key `first`
  // from device memory: TMA copies begin at a multiple of 16 bytes, and the first target of a paged
  // sequence begins a tile at any key.
  template <typename Traits>
  static HSTU_DEVICE bool is_unaligned(const typename Traits::WorkTile& work_tile, int first) {
    using Source = typename Traits::Source;
    const int key = Source::template key_of<Traits::kKeys>(work_tile.tile.sequence, first);
    return Source::kIsPaged && key % 8 != 0;
  }

  template <typename Traits>
  struct Producer {
    typename Traits::BiasState state;

    // Starts copying the tile of the bias of the key tile that begins with padded key `first`.
    // Called by all threads that copy K.
    HSTU_DEVICE void load(const ForwardParams& params, const typename Traits::Maps& maps,
                          typename Traits::SharedMemory& smem,
                          const typename Traits::WorkTile& work_tile, int first,
                          typename Traits::KVState) {
      constexpr int kRows = Traits::kRows;
      constexpr int kKeys = Traits::kKeys;
      using Source = typename Traits::Source;
      if (!Source::is_leader() || is_unaligned<Traits>(work_tile, first)) return;
      const Sequence& sequence = work_tile.tile.sequence;
      auto& pipeline = smem.pipeline_bias;
      pipeline.producer_acquire(state);
      auto& full = pipeline.full[state.index()];
      full.arrive_and_expect_tx(sizeof(smem.bias[0]));
      start_copy_bias<kRows, kKeys>(maps.bias, work_tile.tile.sequence_index, work_tile.bias_head,
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
                                      typename Traits::KVState, Scores& scores) {
      constexpr int kKeys = Traits::kKeys;
      auto& pipeline = smem.pipeline_bias;
      pipeline.consumer_wait(state);
      load_bias<kKeys>(smem.bias[state.index()] + warpgroup * (kWarpgroupRows * kKeys), scores);
      pipeline.consumer_release_by_warp(state);
      state.advance();
    }
    // init_accumulator() for an unaligned key tile, see is_unaligned().
    template <typename Scores>
    HSTU_DEVICE void load_unaligned(const ForwardParams& params,
                                    const typename Traits::WorkTile& work_tile, int warpgroup,
                                    int first, Scores& scores) const {
      using Element = typename Traits::Element;
      constexpr int kKeys = Traits::kKeys;
      const DenseBias& rab = params.rab;
      const SequenceTile& tile = work_tile.tile;
      const int row = tile.index * Traits::kRows + Traits::row_of_thread(warpgroup);
      load_bias<kKeys>(static_cast<const Element*>(rab.data) +
                           tile.sequence_index * rab.batch_stride +
                           work_tile.bias_head * rab.head_stride,
                       rab.row_stride, rab.length, row + tile.sequence.offset,
                       Traits::Source::template key_of<kKeys>(tile.sequence, first), scores);
    }
    // Releases the bias of a key tile that no row of the warpgroup sees.
    HSTU_DEVICE void skip_tile(typename Traits::SharedMemory& smem) {
      smem.pipeline_bias.consumer_wait(state);
      smem.pipeline_bias.consumer_release_by_warp(state);
      state.advance();
    }
  };
};

// A dense bias in bf16 or fp16 for q and k in e4m3. It is added after Q K^T has been multiplied by
// the factors of rows and keys.
struct AddedDenseBias : DenseScoreBias {
  static constexpr bool kIsAddedAfter = true;
  template <typename Element>
  using TileElement = cutlass::half_t;  // any 16 bits: Consumer::add() reads bf16 or fp16
  static constexpr GMMA::ScaleOut kScaleOut = GMMA::ScaleOut::Zero;

  template <typename Traits>
  struct Consumer {
    const ForwardParams& params;
    typename Traits::BiasState state;

    HSTU_DEVICE explicit Consumer(const ForwardParams& params) : params(params) {}

    template <typename Scores>
    HSTU_DEVICE void init_accumulator(typename Traits::SharedMemory&, int, typename Traits::KVState,
                                      Scores&) {}

    // scores = x / 2, from the scores and the bias. Called by a warpgroup.
    template <typename Factors, typename Scores>
    HSTU_DEVICE void scale(typename Traits::SharedMemory& smem, int warpgroup,
                           typename Traits::KVState, const Factors& factors, Scores& scores) {
      smem.pipeline_bias.consumer_wait(state);
      const auto* const from =
          smem.bias[state.index()] + warpgroup * (kWarpgroupRows * Traits::kKeys);
      if (params.rab.dtype == DType::kFloat16) {
        add<cutlass::half_t>(from, factors, scores);
      } else {
        add<cutlass::bfloat16_t>(from, factors, scores);
      }
      smem.pipeline_bias.consumer_release_by_warp(state);
      state.advance();
    }
    HSTU_DEVICE void skip_tile(typename Traits::SharedMemory& smem) {
      smem.pipeline_bias.consumer_wait(state);
      smem.pipeline_bias.consumer_release_by_warp(state);
      state.advance();
    }

   private:
    template <typename Element, typename Factors, typename Scores>
    HSTU_DEVICE void add(const cutlass::half_t* from, const Factors& factors,
                         Scores& scores) const {
      const float half_alpha = 0.5f * static_cast<float>(params.alpha);
      const int thread = reload_thread_idx();  // recomputed, so that addresses take no registers
#pragma unroll
      for (int part = 0; part < Traits::kKeys / 16; ++part) {
        uint32_t words[4];
        load_bias_part(from, part, words, thread);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const float bias =
              n % 2 ? high_half<Element>(words[n / 2]) : low_half<Element>(words[n / 2]);
          float& score = scores(part * 8 + n);
          score = factors.half_x(part * 8 + n, half_alpha, score, half_alpha * bias);
        }
      }
    }
  };
};

// Weights by position alone, in fp32. The accumulator is initialized from a window of the position
// table, and Q K^T is added to it.
struct PositionScoreBias {
  static constexpr bool kHasTiles = false;
  static constexpr bool kIsAddedAfter = false;
  static constexpr bool kIsRelative = true;
  static constexpr bool kHasTime = false;
  template <typename Element>
  using TileElement = Element;
  static constexpr GMMA::ScaleOut kScaleOut = GMMA::ScaleOut::One;

  template <typename Maps>
  static HSTU_DEVICE void prefetch(const Maps&) {}
  static HSTU_DEVICE int bias_head(const ForwardParams& params, int head) {
    return head / (params.heads / params.relative_bias.position.heads);
  }

  template <typename Traits>
  using Producer = PositionBiasProducer<Traits>;
  template <typename Traits>
  using Consumer = PositionBiasConsumer<Traits>;
};

// Weights by position and by time. In the forward, the accumulator is initialized with the weights
// by position, consumers compute the weights by time, and there are no bias tiles.
struct RelativeScoreBias {
  static constexpr bool kHasTiles = true;
  static constexpr bool kIsAddedAfter = true;
  static constexpr bool kIsRelative = true;
  static constexpr bool kHasTime = true;
  template <typename Element>
  using TileElement = cutlass::half_t;
  static constexpr GMMA::ScaleOut kScaleOut = GMMA::ScaleOut::One;

  template <typename Maps>
  static HSTU_DEVICE void prefetch(const Maps&) {}
  static HSTU_DEVICE int bias_head(const ForwardParams& params, int head) {
    const BiasTable& position = params.relative_bias.position;
    return position.data ? head / (params.heads / position.heads) : 0;
  }

  template <typename Traits>
  using Producer = RelativeBiasProducer<Traits>;
  template <typename Traits>
  using Consumer = RelativeBiasConsumer<Traits>;
};

}  // namespace hstu::sm90
