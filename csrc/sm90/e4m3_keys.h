// The source of e4m3 keys and values, with the factors that turn their products into scores and
// weights: the policy of ForwardTraits::Source for e4m3.
//
// For row i and key j of block b, with descales q_i, k_b and v_b:
//
//   x / 2 = alpha / 2 * (q_i * k_b * (Q K^T)_ij + mean_i)
//   P_ij  = silu(x) * p_i * v_b / v_max     rounded to e4m3
//   O_i   = v_max / p_i * (P V)_i           V without its descale
//
// v_max is the largest v_b of the work tile, and p_i the largest power of two with which P cannot
// overflow: |silu(x)| <= |x| <= |alpha| * (|Q_i| * max |K_j| + |mean_i|). Both are the same for all
// key tiles of a work tile, so that wgmma can accumulate O over them. A bias adds alpha / 2 * bias
// to x / 2, and its bound (bias/bias_bounds.h) is added to that of |silu(x)|.
#pragma once

#include <cfloat>

#include "../bias/bias_bounds.h"
#include "key_source.h"

namespace hstu::sm90 {

// The factors of a row, which a work tile keeps in shared memory.
struct alignas(16) RowFactors {
  float score;   // alpha / 2 * q_i
  float mean;    // alpha / 2 * mean_i
  float weight;  // p_i / v_max
  float out;     // v_max / p_i
};

struct BlockDescales {
  float k;
  float v;
};

// The largest of the finite magnitudes. NaN and infinity are left out, so that rows that do not see
// the keys that have them keep a good scale.
HSTU_DEVICE float larger_finite(float largest, float x) {
  return fabsf(x) <= FLT_MAX ? fmaxf(largest, fabsf(x)) : largest;
}

// Returns in all lanes the largest value of a warp. No value may be negative.
HSTU_DEVICE float largest_of_warp(float x) {
  return __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(x)));
}

// The largest power of two that keeps weights of at most `bound` within the range of e4m3, or 1 if
// the bound is not finite. It is limited so that no factor over- or underflows.
HSTU_DEVICE float weight_scale(float bound) {
  constexpr float kLargest = 448;  // in e4m3
  if (!(bound <= FLT_MAX)) return 1;
  const float scale = fminf(fmaxf(kLargest / bound, 0x1p-90f), 0x1p46f);
  return __uint_as_float(__float_as_uint(scale) & 0x7f800000);
}

// ScoreSum is float, or half_t for calls with Fp8Params::half_sums.
template <typename ScoreSum_>
struct E4m3Keys : PackedKeys {
  static constexpr bool kIsFp8 = true;
  using ScoreSum = ScoreSum_;
  static constexpr int kQueryCopyLanes = 32;

  // The first block of the sequence in k_descale, v_descale and k_norm.
  template <typename WorkTile>
  static HSTU_DEVICE int64_t first_block(const ForwardParams& params, const WorkTile& work_tile) {
    const SequenceTile& tile = work_tile.tile;
    return work_tile.head * params.fp8.blocks +
           first_tile(tile.sequence.k_begin, tile.sequence_index, Fp8Params::kBlock);
  }

  template <typename Traits, PagePart kPart>
  struct Loader {
    HSTU_DEVICE void load(const ForwardParams& params, const typename Traits::Maps& maps,
                          typename Traits::SharedMemory& smem,
                          const typename Traits::WorkTile& work_tile, int first, int stage) {
      static_assert(Traits::kKeys == Fp8Params::kBlock);
      const SequenceTile& tile = work_tile.tile;
      auto& full = kv_full<kPart>(smem, stage);
      if constexpr (kPart == PagePart::kKeys) {
        const int64_t block = first_block(params, work_tile) + first / Fp8Params::kBlock;
        BlockDescales& descales = smem.block_descales[stage];
        ptx::cp_async_4(params.fp8.k_descale + block, &descales.k);
        ptx::cp_async_4(params.fp8.v_descale + block, &descales.v);
        cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<uint64_t*>(&full));
        copy_rows<Traits::kKeys, Traits::kHeadDim>(
            maps.k, {tile.sequence.k_begin, tile.sequence.k_len, work_tile.head}, first,
            smem.k[stage], full);
      } else {
        const int64_t block =
            first_tile(tile.sequence.k_begin, tile.sequence_index, Fp8Params::kBlock) +
            first / Fp8Params::kBlock;
        full.arrive_and_expect_tx(sizeof(smem.v[stage]));
        cute::SM90_TMA_LOAD_4D::copy(&maps.v, reinterpret_cast<uint64_t*>(&full),
                                     static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                     smem.v[stage], 0, 0, work_tile.head, static_cast<int>(block));
      }
    }
  };

  // Computes the factors of the rows of a work tile.
  template <typename Traits>
  struct QueryWarpLoader {
    typename Traits::QState state;

    // Called by a warp for each work tile, when the copy of Q has been started.
    HSTU_DEVICE void load(const ForwardParams& params, const typename Traits::Maps&,
                          typename Traits::SharedMemory& smem,
                          const typename Traits::WorkTile& work_tile) {
      if constexpr (!Traits::kFindsFactorsFirst) {
        find_factors(params, smem, work_tile);
        smem.pipeline_q[0].producer_commit_by_warp(state);
      }
      state.advance();
    }

    HSTU_DEVICE void find_factors(const ForwardParams& params, typename Traits::SharedMemory& smem,
                                  const typename Traits::WorkTile& work_tile) {
      auto& factors = smem.work_tiles[&work_tile - smem.work_tiles].row_factors;
      start_copy(params, work_tile, factors);
      const BlockDescales largest = find_largest(params, work_tile);
      ptx::cp_async_wait_all();
      const auto alpha = static_cast<float>(params.alpha);
#pragma unroll 1
      for (int n = static_cast<int>(threadIdx.x) % 32; n < Traits::kRows; n += 32) {
        const RowFactors copied = factors[n];
        float bound = fabsf(alpha) * (copied.weight * largest.k + fabsf(copied.mean));
        if constexpr (Traits::kHasBias) bound += copied.out;
        const float scale = weight_scale(bound);
        factors[n] = {0.5f * alpha * copied.score, 0.5f * alpha * copied.mean, scale / largest.v,
                      largest.v / scale};
      }
    }

   private:
    // Starts copying the descale, the mean product and the norm of each row to the fields `score`,
    // `mean` and `weight`, and the bound of the bias to `out`. Rows past the end of the sequence
    // get zeros.
    static HSTU_DEVICE void start_copy(const ForwardParams& params,
                                       const typename Traits::WorkTile& work_tile,
                                       RowFactors (&factors)[Traits::kRows]) {
      const Fp8Params& fp8 = params.fp8;
      const Sequence& sequence = work_tile.tile.sequence;
      const int64_t begin = work_tile.head * params.batch.total_q + sequence.q_begin;
#pragma unroll 1
      for (int n = static_cast<int>(threadIdx.x) % 32; n < Traits::kRows; n += 32) {
        const int row = work_tile.tile.index * Traits::kRows + n;
        const bool exists = row < sequence.q_len;
        const int64_t at = begin + (exists ? row : 0);
        const bool has_mean = exists && fp8.q_mean_product;
        ptx::cp_async_4_or_zeros(fp8.q_descale + at, &factors[n].score, exists);
        ptx::cp_async_4_or_zeros((has_mean ? fp8.q_mean_product : fp8.q_norm) + at,
                                 &factors[n].mean, has_mean);
        ptx::cp_async_4_or_zeros(fp8.q_norm + at, &factors[n].weight, exists);
        if constexpr (Traits::kHasBias) {
          ptx::cp_async_4_or_zeros(
              fp8.bias_bounds + index_of_bias_bound(params, work_tile.head,
                                                    sequence.q_begin + (exists ? row : 0)),
              &factors[n].out, exists);
        }
      }
    }

    // Finds the largest norm of a row of K and the largest descale of V among the blocks that the
    // work tile may see.
    static HSTU_DEVICE BlockDescales find_largest(const ForwardParams& params,
                                                  const typename Traits::WorkTile& work_tile) {
      const int64_t begin = first_block(params, work_tile);
      BlockDescales largest = {};
      for (const Interval& keys : work_tile.summary.hull) {
        // NOTE: an empty interval begins at INT_MAX.
        const int end = ceil_div(keys.end, Fp8Params::kBlock);
#pragma unroll 1
        for (int block = keys.begin / Fp8Params::kBlock + static_cast<int>(threadIdx.x) % 32;
             block < end; block += 32) {
          largest.k = larger_finite(largest.k, params.fp8.k_norm[begin + block]);
          largest.v = larger_finite(largest.v, params.fp8.v_descale[begin + block]);
        }
      }
      // NOTE: the limit keeps the factors from over- and underflow.
      return {largest_of_warp(largest.k), fmaxf(largest_of_warp(largest.v), 0x1p-80f)};
    }
  };
};

}  // namespace hstu::sm90
