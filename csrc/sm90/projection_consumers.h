// The consumers of the e4m3 linear maps: the products of a work tile, and their epilogue.
#pragma once

#include "../common/activation.h"
#include "../common/opaque.h"
#include "../quantize/codes.h"
#include "projection_traits.h"

namespace hstu::sm90 {

// The rows and columns that a thread has in its warpgroup.
struct ProjectionPlace {
  // NOTE: in each function it is computed again, which takes fewer registers.
  const uint32_t thread = static_cast<uint32_t>(reload_thread_idx());
  const int lane = thread % 32;
  const int warp = thread / 32 % 4;
  const int row = warp * 16 + lane / 4;  // of the 64; there is another one 8 rows further
  const int column = lane % 4 * 8;       // the first of eight, of each 32
};

// A warpgroup of consumers.
template <typename Traits>
struct ProjectionConsumer : Traits {
  using Largest = typename Traits::Largest;
  using Mma = typename Traits::Mma;
  using SharedMemory = typename Traits::SharedMemory;
  using Traits::kClusterSize;
  using Traits::kColumns;
  using Traits::kDepth;
  using Traits::kHeadDim;
  using Traits::kHeads;
  using Traits::kIsOutput;
  using Traits::kSlots;
  using Traits::kStages;
  using Traits::kTileSlots;

  static constexpr int kGroups = kColumns / 32;  // of 32 columns

  const ProjectionParams& params;
  SharedMemory& smem;
  int warpgroup;

  // SiLU of the work tile before, which is not quantized yet: four words have eight columns of
  // row lane / 4 + 8 r of the warp.
  uint32_t kept[kGroups][2][4];
  // The sum of squares of each row and head: of this thread's columns, then, after publish(), of
  // all columns.
  float squares[kHeads][2];

  HSTU_DEVICE ProjectionConsumer(const ProjectionParams& params, SharedMemory& smem, int warpgroup)
      : params(params), smem(smem), warpgroup(warpgroup) {}

  HSTU_DEVICE void run() {
    const int steps = ceil_div(params.depth, kDepth);
    const WarpSchedulerBarrier<2, true> turns{warpgroup};
    turns.init();
    const int cluster = static_cast<int>(blockIdx.x) / kClusterSize;
    const int clusters = static_cast<int>(gridDim.x) / kClusterSize;
    int count = 0;
    for (; cluster + count * clusters < smem.work_tiles; ++count) {
      PipelineState<kStages> state{static_cast<uint32_t>((2 * count + warpgroup) * steps)};
      auto sum = partition_fragment_C(Mma{}, Shape<Int<kWarpgroupRows>, Int<kColumns>>{});
      turns.sync();
      multiply(steps, state, sum);
      turns.arrive();
      const ProjectionTile& tile = smem.tiles[count % kTileSlots];
      float descale[2];
      uint4 residual[kGroups][2];  // of kIsOutput
      const ProjectionPlace place;
#pragma unroll
      for (int r = 0; r < 2; ++r) {  // the loads run beside the last products
        const int row = warpgroup * kWarpgroupRows + place.row + 8 * r;
        const bool exists = row < tile.count;
        descale[r] = exists ? params.x_descale[tile.begin + row] : 0.0f;
        if constexpr (kIsOutput) {
          const auto* const from = reinterpret_cast<const uint4*>(
              params.residual + int64_t{tile.begin + row} * params.columns + tile.column +
              place.column);
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            residual[group][r] = ptx::ld_global_nc_if(exists, from + 4 * group);
          }
        }
      }
      wait_for_wgmma<0>(sum);
      release(state.prev());
      if constexpr (kIsOutput) {
        finish<false>(count, descale, residual, sum);
      } else {
        if (count > 0) quantize(count - 1);
        if (tile.column >= params.u_columns) {
          finish<true>(count, descale, residual, sum);
        } else {
          finish<false>(count, descale, residual, sum);
        }
      }
    }
    if constexpr (!kIsOutput) {
      if (count > 0) quantize(count - 1);
    }
    if (warpgroup == 0) turns.sync();  // so that each arrival has its wait
  }

  template <typename Sum>
  HSTU_DEVICE void multiply(int steps, PipelineState<kStages>& state, Sum& sum) {
    const auto x = rows_tensors<kStages, kWarpgroupRows, kDepth>(smem.x[0]);
    const auto weight = rows_tensors<kStages, kColumns, kDepth>(smem.weight[0]);
    Mma mma;
    const auto start = [&](GMMA::ScaleOut scale) {
      smem.pipeline.consumer_wait(state);
      start_gemm_of_tiles(mma, x, state.index(), weight, state.index(), sum, scale);
      state.advance();
    };
    start(GMMA::ScaleOut::Zero);
    for (int step = 1; step < steps; ++step) {
      start(GMMA::ScaleOut::One);
      wait_for_wgmma<1>(sum);
      release({state.count - 2});
    }
  }

  // The stages of both blocks have rows of the weight that this one has copied.
  HSTU_DEVICE void release(const PipelineState<kStages>& state) {
    __syncwarp();
    const int lane = ProjectionPlace().lane;
    auto& empty = smem.pipeline.empty[state.index()];
    if constexpr (kArrivalsOfWarp == 1) {
      empty.arrive(lane, lane < kClusterSize);
    } else {
      for (int rank = 0; rank < kClusterSize; ++rank) empty.arrive(rank);
    }
  }

  // Returns the index of the accumulator of column n of the eight of a group.
  static HSTU_DEVICE constexpr int element(int group, int r, int n) {
    return 16 * group + n / 2 * 4 + 2 * r + n % 2;
  }

  // Writes z of work tile `count`. With kQuantizes, also keeps SiLU of it and publishes the
  // magnitudes.
  template <bool kQuantizes, typename Sum>
  HSTU_DEVICE void finish(int count, const float (&descale)[2], const uint4 (&residual)[kGroups][2],
                          Sum& sum) {
    const int slot = count % kSlots;
    const ProjectionTile& tile = smem.tiles[count % kTileSlots];
    const ProjectionPlace place;
    bool stores[2];
    uint16_t* z[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warpgroup * kWarpgroupRows + place.row + 8 * r;
      stores[r] = row < tile.count && (!kQuantizes || tile.column < params.z_columns);
      z[r] = params.z + int64_t{tile.begin + row} * params.z_columns + tile.column + place.column;
    }
    const float* const descales = smem.weight_descale[slot] + place.column;
    const float* const biases = smem.bias[slot] + place.column;
    uint32_t largest[kHeads][2] = {};
    clear(squares);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int n = 0; n < 8; n += 4) {
        const float4 factor = *reinterpret_cast<const float4*>(descales + 32 * group + n);
        const float4 bias = *reinterpret_cast<const float4*>(biases + 32 * group + n);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const auto value = [&](int index, float factor, float bias) {
            float& x = sum(element(group, r, n + index));
            x = fmaf(x, descale[r] * factor, bias);
          };
          value(0, factor.x, bias.x);
          value(1, factor.y, bias.y);
          value(2, factor.z, bias.z);
          value(3, factor.w, bias.w);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if constexpr (kIsOutput) {
          using Bf16 = cutlass::bfloat16_t;
          const uint4& added = residual[group][r];
#pragma unroll
          for (int n = 0; n < 8; ++n) {
            const uint32_t word = n < 2 ? added.x : n < 4 ? added.y : n < 6 ? added.z : added.w;
            sum(element(group, r, n)) += n % 2 ? high_half<Bf16>(word) : low_half<Bf16>(word);
          }
        }
        uint32_t words[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          words[n] =
              ptx::cvt_bf16x2(sum(element(group, r, 2 * n)), sum(element(group, r, 2 * n + 1)));
        }
        st_global_if(stores[r], z[r] + 32 * group, words);
      }
    }
    if constexpr (kQuantizes) {
      __syncwarp();  // the compiler does not delay the stores
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int head = group * 32 / kHeadDim;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const uint32_t word = activated(sum(element(group, r, 2 * n)),
                                            sum(element(group, r, 2 * n + 1)), squares[head][r]);
            kept[group][r][n] = word;
            largest[head][r] = larger_magnitudes<cutlass::bfloat16_t>(largest[head][r], word);
          }
        }
      }
      publish(slot, tile, place, largest);
    }
    __syncwarp();
    if (arrives_for_warp()) smem.has_largest[slot][warpgroup].arrive();
  }

  // Publishes the magnitudes of the rows that are kept. `largest` has a number with the largest
  // magnitude of each row in each half.
  HSTU_DEVICE void publish(int slot, const ProjectionTile& tile, const ProjectionPlace& place,
                           const uint32_t (&largest)[kHeads][2]) {
    const int row = warpgroup * kWarpgroupRows + place.row;
    float magnitude[kHeads][2];
    bool is_finite_tile = true;
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        magnitude[head][r] = ptx::max_nan(fabsf(low_half<cutlass::bfloat16_t>(largest[head][r])),
                                          fabsf(high_half<cutlass::bfloat16_t>(largest[head][r])));
        is_finite_tile &= is_finite(magnitude[head][r]);
      }
    }
    if (!is_finite_tile) leave_out_nan(magnitude);
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      float most = 0.0f, most_squares = 0.0f;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool counts = row + 8 * r < tile.count;
        if (!counts) magnitude[head][r] = squares[head][r] = 0.0f;
        float& total = squares[head][r];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        most = fmaxf(most, magnitude[head][r]);
        most_squares = fmaxf(most_squares, total);
      }
      most = max_of_warp(most);
      most_squares = max_of_warp(most_squares);
      if (place.lane == 0) smem.largest[slot][warpgroup][place.warp][head] = {most, most_squares};
    }
  }

  static HSTU_DEVICE void clear(float (&x)[kHeads][2]) {
#pragma unroll
    for (auto& rows : x) rows[0] = rows[1] = 0.0f;
  }

  // Returns the largest number of the lanes. None is negative, so their bits have their order.
  static HSTU_DEVICE float max_of_warp(float x) {
    return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(x)));
  }

  static HSTU_DEVICE void st_global_if(bool condition, uint16_t* address,
                                       const uint32_t (&words)[4]) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v4.b32 [%1], {%2, %3, %4, %5};}" ::"r"(
            static_cast<int>(condition)),
        "l"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
        : "memory");
  }

  // Returns SiLU of two numbers, rounded, and adds the squares.
  static HSTU_DEVICE uint32_t activated(float x, float y, float& squares) {
    const float half_x = 0.5f * x, half_y = 0.5f * y;
    const float a = silu_of_half(half_x, ptx::tanh_approx(half_x));
    const float b = silu_of_half(half_y, ptx::tanh_approx(half_y));
    squares = fmaf(a, a, squares);
    squares = fmaf(b, b, squares);
    return ptx::cvt_bf16x2(a, b);
  }

  // Replaces numbers that are not finite by NaN, and computes the magnitudes and the sums of
  // squares of the others.
  HSTU_DEVICE void leave_out_nan(float (&magnitude)[kHeads][2]) {
    clear(magnitude);
    clear(squares);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int head = group * 32 / kHeadDim;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (uint32_t& word : kept[group][r]) {
          const float x = low_half<cutlass::bfloat16_t>(word);
          const float y = high_half<cutlass::bfloat16_t>(word);
          if (!is_finite(x)) word |= 0x7fffu;
          if (!is_finite(y)) word |= 0x7fff0000u;
          const float low = is_finite(x) ? x : 0.0f, high = is_finite(y) ? y : 0.0f;
          magnitude[head][r] = fmaxf(magnitude[head][r], fmaxf(fabsf(low), fabsf(high)));
          squares[head][r] = fmaf(low, low, fmaf(high, high, squares[head][r]));
        }
      }
    }
  }

  // Quantizes the rows of work tile `count`, which are kept, and stores codes, descales and
  // norms.
  HSTU_DEVICE void quantize(int count) {
    const ProjectionTile& tile = smem.tiles[count % kTileSlots];
    if (!tile.is_quantized) return;
    const int slot = count % kSlots;
    for (const auto& barrier : smem.has_largest[slot]) barrier.wait(count / kSlots % 2);
    const int columns = params.u_columns;
    const int part = tile.column / columns;  // 1: v, 2: q, 3: k
    const int first_head = tile.column % columns / kHeadDim;
    const ProjectionPlace place;
    const int row = warpgroup * kWarpgroupRows + place.row;
    float descale[kHeads], scale[kHeads];
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      Largest most = smem.largest[slot][0][0][head];
#pragma unroll
      for (int n = 1; n < 8; ++n) {
        const Largest& other = smem.largest[slot][n / 4][n % 4][head];
        most.magnitude = fmaxf(most.magnitude, other.magnitude);
        most.squares = fmaxf(most.squares, other.squares);
      }
      float base = descale_of(most.magnitude);
      descale[head] = base;
      if (part != 1) {
        descale[head] *= growth_of_descale(scaled_squares(most.squares, base));
        store_factors(tile, place, row, part == 2, first_head + head, base, descale[head], head,
                      most.squares);
      } else if (row == 0 && place.column == 0) {
        params.v_descale[(first_head + head) * key_blocks() + tile.number] = base;
      }
      scale[head] = 1.0f / descale[head];
    }
    if (part == 1) {
      store_values(tile, place, row, first_head, scale);
    } else {
      store_rows(tile, place, row, part == 2 ? params.q8 : params.k8, first_head, scale);
    }
  }

  // Returns the sum of squares of a row divided by twice `base`: an upper bound, although the
  // numbers are rounded to 16 bits after they are squared.
  // NOTE: an infinite sum stays infinite, because no factor is 0.
  static HSTU_DEVICE float scaled_squares(float squares, float base) {
    return squares * (0.5f / base) * (0.5f / base) * (1.0f + 0x1p-7f);
  }

  // Returns an upper bound of the norm of codes times their descale.
  static HSTU_DEVICE float norm_bound(float squares, float base, float descale) {
    // Subnormal codes are rounded by up to 2^-10.
    const float bound = sqrtf(scaled_squares(squares, base)) * (2.0f * base) * kRounding;
    return fminf(bound + descale * 0x1p-6f, descale * Fp8Params::kHalfSumNorm);
  }

  HSTU_DEVICE int64_t key_blocks() const {
    return params.batch.total_k / Fp8Params::kBlock + params.batch.batch;
  }

  HSTU_DEVICE void store_factors(const ProjectionTile& tile, const ProjectionPlace& place, int row,
                                 bool is_q, int to_head, float base, float descale, int head,
                                 float most_squares) {
    if (!is_q) {
      if (row != 0 || place.column != 0) return;
      const int64_t to = to_head * key_blocks() + tile.number;
      params.k_descale[to] = descale;
      params.k_norm[to] = norm_bound(most_squares, base, descale);
      return;
    }
    if (place.column != 0) return;
    const int64_t to = to_head * params.batch.total_k + tile.begin + row;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r >= tile.count) continue;
      params.q_descale[to + 8 * r] = descale;
      params.q_norm[to + 8 * r] = norm_bound(squares[head][r], base, descale);
    }
  }

  // The codes of the eight columns of a group.
  HSTU_DEVICE uint2 codes(int group, int r, float scale) const {
    using Bf16 = cutlass::bfloat16_t;
    const auto four = [&](uint32_t low, uint32_t high) {
      return ptx::cvt_e4m3x4(low_half<Bf16>(low) * scale, high_half<Bf16>(low) * scale,
                             low_half<Bf16>(high) * scale, high_half<Bf16>(high) * scale);
    };
    const auto& words = kept[group][r];
    return {four(words[0], words[1]), four(words[2], words[3])};
  }

  HSTU_DEVICE void store_rows(const ProjectionTile& tile, const ProjectionPlace& place, int row,
                              uint8_t* to, int first_head, const float (&scale)[kHeads]) const {
    const int64_t stride = params.u_columns;
    uint8_t* const first = to + (tile.begin + row) * stride + first_head * kHeadDim + place.column;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r >= tile.count) continue;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        *reinterpret_cast<uint2*>(first + 8 * r * stride + 32 * group) =
            codes(group, r, scale[group * 32 / kHeadDim]);
      }
    }
  }

  // Stores the codes transposed, in the order of key_at(): a word has two neighboring rows, and
  // the two that are 8 rows further. A thread exchanges four columns with that of the other row.
  HSTU_DEVICE void store_values(const ProjectionTile& tile, const ProjectionPlace& place, int row,
                                int first_head, const float (&scale)[kHeads]) const {
    const bool is_odd = place.row % 2;
    const uint32_t low = is_odd ? 0x1504 : 0x5140, high = is_odd ? 0x3726 : 0x7362;
    const int64_t block = int64_t{tile.number} * params.heads + first_head;
    uint8_t* const to = params.v8 +
                        (block * kHeadDim + place.column + is_odd * 4) * Fp8Params::kBlock +
                        row / 16 * 16 + row % 8 / 2 * 4;
    const uint32_t exists[2] = {row < tile.count ? ~0u : 0, row + 8 < tile.count ? ~0u : 0};
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      uint32_t pairs[2][2];  // columns 0 and 1, columns 2 and 3 of two rows
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const auto [x, y] = codes(group, r, scale[group * 32 / kHeadDim]);
        const uint32_t own = exists[r] & (is_odd ? y : x);
        const uint32_t other = __shfl_xor_sync(~0u, exists[r] & (is_odd ? x : y), 4);
        pairs[r][0] = __byte_perm(own, other, low);
        pairs[r][1] = __byte_perm(own, other, high);
      }
      uint8_t* const at = to + 32 * group * Fp8Params::kBlock;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        *reinterpret_cast<uint32_t*>(at + n * Fp8Params::kBlock) =
            __byte_perm(pairs[0][n / 2], pairs[1][n / 2], n % 2 == 0 ? 0x5410 : 0x7632);
      }
    }
  }
};

}  // namespace hstu::sm90
