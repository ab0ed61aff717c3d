// The weights P of the forward and the sums of P V: policies of its consumers for 16 bits and for
// e4m3.
#pragma once

#include "../common/activation.h"
#include "../common/e4m3.h"
#include "e4m3_keys.h"
#include "masking.h"
#include "split_reduction.h"
#include "tensors.h"

namespace hstu::sm90 {

// P in 16 bits.
template <typename Traits, typename Scores>
struct PlainWeights {
  using Element = typename Traits::Element;
  static constexpr int kKeys = Traits::kKeys;

  decltype(make_tensor_like<Element>(Scores{})) fragment;

  struct Factors {};
  HSTU_DEVICE Factors load_factors(const typename Traits::SharedMemory&,
                                   const typename Traits::WorkTile&, int, int) const {
    return {};
  }

  // scores = silu(alpha * scores). With a relative bias they have been multiplied by alpha / 2.
  HSTU_DEVICE void activate(const ForwardParams& params, const Factors&, Scores& scores) const {
    const float half_alpha = 0.5f * static_cast<float>(params.alpha);
#pragma unroll
    for (int n = 0; n < size(scores); ++n) {
      const float x = Traits::kHasRelativeBias ? scores(n) : half_alpha * scores(n);
      scores(n) = silu_of_half(x, tanh_approx(x));
    }
  }
  HSTU_DEVICE void round(const Scores& scores) { round_to(scores, fragment); }
  HSTU_DEVICE void mask(uint64_t visible) { apply_mask<kKeys>(visible, fragment); }

  // V as the second factor of P V.
  static HSTU_DEVICE auto values(Element* tile) {
    return transposed_tensor<kKeys, Traits::kHeadDim>(tile);
  }
};

// P in e4m3, scaled as e4m3_keys.h says.
template <typename Traits, typename Scores>
struct E4m3Weights {
  using Element = typename Traits::Element;
  static constexpr int kKeys = Traits::kKeys;

  Tensor<ArrayEngine<Element, kKeys / 2>, Layout<Int<kKeys / 2>>> fragment;

  // For the two rows of a thread: x / 2 = score * S + mean, and P is multiplied by `weight`.
  struct Factors {
    float score[2];
    float mean[2];
    float weight[2];
  };

  // Reads the factors of a key tile. Called before its stage of K is released.
  HSTU_DEVICE Factors load_factors(const typename Traits::SharedMemory& smem,
                                   const typename Traits::WorkTile& work_tile, int warpgroup,
                                   int stage) const {
    const BlockDescales& descales = smem.block_descales[stage];
    Factors factors;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const RowFactors& row = work_tile.row_factors[Traits::row_of_thread(warpgroup) + 8 * m];
      factors.score[m] = row.score * descales.k;
      factors.mean[m] = row.mean;
      factors.weight[m] = row.weight * descales.v;
    }
    return factors;
  }

  HSTU_DEVICE void activate(const ForwardParams&, const Factors& factors, Scores& scores) const {
#pragma unroll
    for (int n = 0; n < size(scores); ++n) {
      const int m = n / 2 % 2;
      const float x = factors.score[m] * scores(n) + factors.mean[m];
      scores(n) = silu_of_half(factors.weight[m] * x, tanh_approx(x));
    }
  }

  // Two groups of 8 keys of row m of the thread become a word, which is the order that the blocks
  // of V have, see Fp8Params.
  HSTU_DEVICE void round(const Scores& scores) {
    Tensor words = recast<uint32_t>(fragment);
#pragma unroll
    for (int n = 0; n < size(words); ++n) {
      const int first = n / 2 * 8 + n % 2 * 2;
      words(n) = e4m3_quad(scores(first), scores(first + 1), scores(first + 4), scores(first + 5));
    }
  }
  HSTU_DEVICE void mask(uint64_t visible) {
    Tensor words = recast<uint32_t>(fragment);
    apply_mask_to_e4m3<kKeys>(visible, words);
  }

  static HSTU_DEVICE auto values(Element* tile) {
    return rows_tensor<Traits::kHeadDim, kKeys>(tile);
  }
};

// ---------------------------------------------------------------------------------- sums of P V

// The accumulators of 16-bit products are fp32.
struct NoPromotion {
  HSTU_DEVICE NoPromotion(float*, int) {}
  template <typename Out>
  HSTU_DEVICE bool add_if_due(Out&) {
    return false;
  }
  template <typename Out>
  HSTU_DEVICE void finish(Out&) {}
};

// The accumulators of 8-bit products keep about 14 bits and cut off the rest, so after every 1024
// keys O is added to a total in fp32.
constexpr int kPromotedTiles = 1024 / Fp8Params::kBlock;

// The total is in registers.
template <typename Out>
struct RegisterPromotion {
  Out total;
  int tiles = 0;  // since the last one

  HSTU_DEVICE RegisterPromotion(float*, int) { clear(total); }

  // Called after each key tile but the last one of a work tile. If true, O has been added, and the
  // next products begin with 0.
  HSTU_DEVICE bool add_if_due(Out& out) {
    if (++tiles < kPromotedTiles) return false;
    add(out);
    tiles = 0;
    return true;
  }
  // Adds the total to O, before the epilogue.
  HSTU_DEVICE void finish(Out& out) {
    add(out);
#pragma unroll
    for (int n = 0; n < size(out); ++n) out(n) = total(n);
    clear(total);
    tiles = 0;
  }

 private:
  HSTU_DEVICE void add(const Out& out) {
#pragma unroll
    for (int n = 0; n < size(total); ++n) total(n) += out(n);
  }
};

// The total is in device memory, of which each consumer of a block has 64 rows. It stays in the L2
// cache.
template <typename Out>
struct WorkspacePromotion {
  float* const total;
  int tiles = 0;  // of the work tile

  HSTU_DEVICE WorkspacePromotion(float* totals, int index)
      : total(totals + index * (size(Out{}) * kWarpgroup)) {}

  HSTU_DEVICE bool add_if_due(Out& out) {
    if (++tiles % kPromotedTiles != 0) return false;
    if (tiles == kPromotedTiles) {
      store_partial(out, total);
    } else {
      add_to_partial(out, total);
    }
    return true;
  }
  HSTU_DEVICE void finish(Out& out) {
    if (tiles >= kPromotedTiles) add_partial<16>(total, out);
    tiles = 0;
  }
};

}  // namespace hstu::sm90
