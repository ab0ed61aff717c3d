// The weights P of the forward: policies of its consumers for 16 bits and for e4m3.
#pragma once

#include "../common/activation.h"
#include "../common/device_math.h"
#include "../common/ptx.h"
#include "e4m3_pages.h"
#include "masking.h"
#include "tensors.h"

namespace hstu::sm90 {

// P in 16 bits.
template <typename Traits, typename Scores>
struct PlainWeights {
  using Element = typename Traits::Element;
  static constexpr int kKeys = Traits::kKeys;

  decltype(make_tensor_like<Element>(Scores{})) fragment;

  struct Factors {
    // x / 2 of score n, from alpha / 2 times its bias.
    HSTU_DEVICE float half_x(int, float half_alpha, float score, float half_bias) const {
      return fmaf(half_alpha, score, half_bias);
    }
  };
  HSTU_DEVICE Factors load_factors(const typename Traits::SharedMemory&, const RowFactors*,
                                   int) const {
    return {};
  }

  // scores = silu(alpha * scores), or silu(x) if Bias::kIsAddedAfter, where they are x / 2.
  HSTU_DEVICE void activate(const ForwardParams& params, const Factors&, Scores& scores) const {
    const float half_alpha = 0.5f * static_cast<float>(params.alpha);
#pragma unroll
    for (int n = 0; n < size(scores); ++n) {
      const float x = Traits::Bias::kIsAddedAfter ? scores(n) : half_alpha * scores(n);
      scores(n) = silu_of_half(x, ptx::tanh_approx(x));
    }
  }
  HSTU_DEVICE void round(const Scores& scores) { round_to(scores, fragment); }
  HSTU_DEVICE void mask(uint64_t visible) { apply_mask<kKeys>(visible, fragment); }
};

// The parts that both forms of P in e4m3 share.
template <typename Traits>
struct E4m3Fragment {
  using Element = typename Traits::Element;
  static constexpr int kKeys = Traits::kKeys;

  Tensor<ArrayEngine<Element, kKeys / 2>, Layout<Int<kKeys / 2>>> fragment;

  HSTU_DEVICE void mask(uint64_t visible) {
    Tensor words = recast<uint32_t>(fragment);
    apply_mask_to_e4m3<kKeys>(visible, words);
  }
};

// P in e4m3, scaled as e4m3_keys.h says, from fp32 scores.
template <typename Traits, typename Scores>
struct E4m3Weights : E4m3Fragment<Traits> {
  using E4m3Fragment<Traits>::fragment;

  // For the two rows of a thread: x / 2 = score * S + mean, and P is multiplied by `weight`.
  struct Factors {
    float score[2];
    float mean[2];
    float weight[2];

    // x / 2 of score n, from alpha / 2 times its bias.
    HSTU_DEVICE float half_x(int n, float, float sum, float half_bias) const {
      const int m = n / 2 % 2;
      return fmaf(score[m], sum, mean[m] + half_bias);
    }
  };

  // Reads the factors of a key tile. Called before its stage of K is released. `rows` are those of
  // the work tile, from the first row of the thread on.
  HSTU_DEVICE Factors load_factors(const typename Traits::SharedMemory& smem,
                                   const RowFactors* rows, int stage) const {
    const BlockDescales& descales = smem.block_descales[stage];
    Factors factors;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const RowFactors& row = rows[8 * m];
      factors.score[m] = row.score * descales.k;
      factors.mean[m] = row.mean;
      factors.weight[m] = row.weight * descales.v;
    }
    return factors;
  }

  HSTU_DEVICE void activate(const ForwardParams&, const Factors& factors, Scores& scores) const {
#pragma unroll
    for (int n = 0; n < size(scores); ++n) {
      const float x = Traits::Bias::kIsAddedAfter ? scores(n) : factors.half_x(n, 0, scores(n), 0);
      scores(n) = silu_of_half(factors.weight[n / 2 % 2] * x, ptx::tanh_approx(x));
    }
  }

  // A word has the values of row m of the thread in two groups of 8 keys. Blocks of V have their
  // keys in the same order, see Fp8Params.
  HSTU_DEVICE void round(const Scores& scores) {
    Tensor words = recast<uint32_t>(fragment);
#pragma unroll
    for (int n = 0; n < size(words); ++n) {
      const int first = n / 2 * 8 + n % 2 * 2;
      words(n) =
          ptx::cvt_e4m3x4(scores(first), scores(first + 1), scores(first + 4), scores(first + 5));
    }
  }
};

// tanh(x / 2) by a polynomial for |x| < 5, and beyond it +-1, in fp16. With w = x / 10, it is w *
// q(w^2), where q(1 / 4) is 2 without a rounding error, and q is fitted to the least error of
// tanh(x / 2) / (x + 1 / 5). silu(x) is off by at most .053 near x = -5, by .001 x at x < 1, and
// its mean over scores by .2 %, while the rounding of P is off by up to 6 %.
struct SaturatedTanh {
  static constexpr uint32_t kSlope = twice_half(0x3266);  // 1 / 5, from x / 2 to w

  // `u` is w + 1 / 2, limited to [0, 1].
  static HSTU_DEVICE uint32_t of(uint32_t u) {
    const uint32_t w = ptx::add_f16x2(u, twice_half(0xb800));  // -0.5
    const uint32_t z = ptx::mul_f16x2(w, w);
    uint32_t q = twice_half(0xdad6);               // -218.75
    q = ptx::fma_f16x2(q, z, twice_half(0x583b));  // 135.375
    q = ptx::fma_f16x2(q, z, twice_half(0xcffa));  // -31.90625
    q = ptx::fma_f16x2(q, z, twice_half(0x44ef));  // 4.93359375
    return ptx::mul_f16x2(w, q);
  }
};

// The base of both forms of P from fp16 scores: it rounds P to e4m3.
template <typename Traits, typename Scores>
struct HalfE4m3Fragment : E4m3Fragment<Traits> {
  using E4m3Fragment<Traits>::fragment;
  static constexpr int kQuarters =
      fp8_polynomial_quarters(Traits::kHeadDim, Traits::Source::kIsPaged);

  // The order is that of E4m3Weights::round().
  HSTU_DEVICE void round(const Scores& scores) {
    const Tensor pairs = recast<const uint32_t>(scores);
    Tensor words = recast<uint32_t>(fragment);
#pragma unroll
    for (int n = 0; n < size(words); ++n) {
      const int first = n / 2 * 4 + n % 2;
      words(n) = ptx::cvt_e4m3x4(pairs(first), pairs(first + 2));
    }
  }
};

// P in e4m3 from fp16 scores S of at most 57600, see Fp8Params::half_sums. P is computed in fp16:
//
//   h = (p_i * v_b / v_max) * x / 2 = weight * S + weight_mean, of at most 224
//   P = h + h * tanh(x / 2)
//
// A factor below 2^-14 is subnormal and off by up to 2^-25, and its product with S by up to 1.7e-3.
// In h, that is less than the smallest number of e4m3, 2^-9; in x / 2, it is harmless. Scores x / 2
// beyond 65504 become infinity, whose tanh is 1.
template <typename Traits, typename Scores>
struct HalfE4m3Weights : HalfE4m3Fragment<Traits, Scores> {
  using HalfE4m3Fragment<Traits, Scores>::kQuarters;

  // The fp16 factors of the two rows of a thread, which are 8 apart. A word has that of the first
  // row in its low half, and that of the second one in its high half.
  struct Factors {
    uint32_t score;
    uint32_t mean;
    uint32_t weight;
    uint32_t weight_mean;
    uint32_t score_of_polynomial;
    uint32_t mean_of_polynomial;
  };

  // As E4m3Weights::load_factors().
  HSTU_DEVICE Factors load_factors(const typename Traits::SharedMemory& smem,
                                   const RowFactors* rows, int stage) const {
    const BlockDescales& descales = smem.block_descales[stage];
    float score[2];
    float mean[2];
    float weight[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      score[m] = rows[8 * m].score * descales.k;
      mean[m] = rows[8 * m].mean;
      weight[m] = rows[8 * m].weight * descales.v;
    }
    Factors factors;
    factors.score = ptx::cvt_satfinite_f16x2(score[0], score[1]);
    factors.mean = ptx::cvt_satfinite_f16x2(mean[0], mean[1]);
    factors.weight = ptx::cvt_satfinite_f16x2(weight[0] * score[0], weight[1] * score[1]);
    factors.weight_mean = ptx::cvt_satfinite_f16x2(weight[0] * mean[0], weight[1] * mean[1]);
    factors.score_of_polynomial = ptx::mul_f16x2(factors.score, SaturatedTanh::kSlope);
    factors.mean_of_polynomial =
        ptx::fma_f16x2(factors.mean, SaturatedTanh::kSlope, twice_half(0x3800));  // + 0.5
    return factors;
  }

  HSTU_DEVICE void activate(const ForwardParams&, const Factors& factors, Scores& scores) const {
    Tensor pairs = recast<uint32_t>(scores);  // of 2 keys, for row m = 0, then for row m = 1
#pragma unroll
    for (int n = 0; n < size(pairs); ++n) {
      const auto of_row = [m = n % 2](uint32_t factor) { return ptx::broadcast_half(factor, m); };
      const uint32_t s = pairs(n);
      const uint32_t h = ptx::fma_f16x2(s, of_row(factors.weight), of_row(factors.weight_mean));
      uint32_t t;
      if (n / 2 % 4 < kQuarters) {
        t = SaturatedTanh::of(ptx::fma_sat_f16x2(s, of_row(factors.score_of_polynomial),
                                                 of_row(factors.mean_of_polynomial)));
      } else {
        t = ptx::tanh_approx_f16x2(ptx::fma_f16x2(s, of_row(factors.score), of_row(factors.mean)));
      }
      pairs(n) = ptx::fma_f16x2(h, t, h);
    }
  }
};

// P in e4m3 from fp16 scores, with factors of keys as in e4m3_pages.h.
template <typename Traits, typename Scores>
struct PagedE4m3Weights : HalfE4m3Fragment<Traits, Scores> {
  using HalfE4m3Fragment<Traits, Scores>::kQuarters;

  // The fp16 factors of the two rows of a thread, which are 8 apart. A word has that of the first
  // row in its low half, and that of the second one in its high half.
  struct Factors {
    uint32_t score;
    uint32_t score_of_polynomial;
    const KeyFactors<Traits::kKeys>& keys;
  };

  HSTU_DEVICE Factors load_factors(const typename Traits::SharedMemory& smem,
                                   const RowFactors* rows, int stage) const {
    const uint32_t score = ptx::cvt_satfinite_f16x2(rows[0].score, rows[8].score);
    return {score, ptx::mul_f16x2(score, SaturatedTanh::kSlope), smem.key_factors[stage]};
  }

  HSTU_DEVICE void activate(const ForwardParams&, const Factors& factors, Scores& scores) const {
    Tensor pairs = recast<uint32_t>(scores);  // of 2 keys, for row m = 0, then for row m = 1
#pragma unroll
    for (int i = 0; i < size(pairs) / 8; ++i) {
      const uint4 of_scores = factors.keys.score.of_thread(i);
      const uint4 of_weights = factors.keys.weight.of_thread(i);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const auto of_row = [m = n % 2](uint32_t factor) { return ptx::broadcast_half(factor, m); };
        const uint32_t s = ptx::mul_f16x2(pairs(8 * i + n), word(of_scores, n / 2));
        const uint32_t h = ptx::mul_f16x2(s, word(of_weights, n / 2));
        uint32_t t;
        if (n / 2 < kQuarters) {
          t = SaturatedTanh::of(ptx::fma_sat_f16x2(s, of_row(factors.score_of_polynomial),
                                                   twice_half(0x3800)));  // + 0.5
        } else {
          t = ptx::tanh_approx_f16x2(ptx::mul_f16x2(s, of_row(factors.score)));
        }
        pairs(8 * i + n) = ptx::fma_f16x2(h, t, h);
      }
    }
  }

 private:
  static HSTU_DEVICE uint32_t word(const uint4& words, int n) {
    return n == 0 ? words.x : n == 1 ? words.y : n == 2 ? words.z : words.w;
  }
};

}  // namespace hstu::sm90
