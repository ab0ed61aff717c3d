// The rows that a block of threads quantizes, in registers: 128 rows of a head of Q, K or V.
#pragma once

#include "../common/activation.h"
#include "../common/ptx.h"
#include "../scheduler/work_list.h"
#include "codes.h"
#include "quantize.h"

namespace hstu {

constexpr int kPiece = 8;  // elements of a row that a thread holds
constexpr int kSteps = 8;  // rows that a thread holds a piece of
constexpr int kRowsAtOnce = Fp8Params::kBlock / kSteps;

struct E4m3 {};

// ------------------------------------------------------------------------------------- blocks

enum class Part : int { kQ, kK, kV };

HSTU_DEVICE const PackedTensor& tensor_of(const QuantizeParams& params, Part part) {
  return part == Part::kQ ? params.q : part == Part::kK ? params.k : params.v;
}

// Rows of a sequence that a block of threads quantizes.
struct RowBlock {
  int sequence = 0;
  int64_t number = 0;  // see first_tile()
  int64_t begin = 0;   // the first row in the packed tensor
  int rows = 0;        // at most Fp8Params::kBlock; 0: there is no such block
};

// Finds block `number` of Q or of K and V. Called by all lanes of a warp.
HSTU_DEVICE RowBlock find_block(const BatchParams& batch, bool is_q, int64_t number) {
  const IndexArray& offsets = is_q ? batch.cu_seqlens_q : batch.cu_seqlens_k;
  const IndexArray& used = is_q ? batch.seqused_q : batch.seqused_k;
  const int64_t total = is_q ? batch.total_q : batch.total_k;
  const int lane = threadIdx.x % 32;
  // The last sequence that does not begin after the block is among the `count` from `low` on.
  int low = 0, count = batch.batch;
  while (count > 1) {
    const int step = ceil_div(count, 32);
    const int b = low + lane * step;
    const bool is_before =
        lane * step < count &&
        (lane == 0 || first_tile(clamp(offsets[b], 0, total), b, Fp8Params::kBlock) <= number);
    const int last = 31 - __clz(__ballot_sync(~0u, is_before));
    low += last * step;
    count = min(step, count - last * step);
  }
  const int64_t begin = clamp(offsets[low], 0, total);
  const int64_t room = clamp(offsets[low + 1], begin, total) - begin;
  const int64_t length = used ? clamp(used[low], 0, room) : room;
  const int64_t first = (number - first_tile(begin, low, Fp8Params::kBlock)) * Fp8Params::kBlock;
  if (first < 0 || first >= length) return {};
  return {low, number, begin + first,
          static_cast<int>(clamp(length - first, 0, Fp8Params::kBlock))};
}

// The part (Q, K or V), the head and the rows of a block of threads. A grid has the blocks of Q,
// then those of K, then those of V.
struct BlockOfPart {
  Part part = Part::kQ;
  int head;
  RowBlock block;

  HSTU_DEVICE explicit BlockOfPart(const QuantizeParams& params)
      : head(static_cast<int>(blockIdx.x) % params.heads) {
    const int64_t q_blocks = max_blocks(params.batch.total_q, params.batch.batch);
    const int64_t k_blocks = max_blocks(params.batch.total_k, params.batch.batch);
    int64_t number = blockIdx.x / params.heads;
    if (number >= q_blocks) {
      number -= q_blocks;
      part = number < k_blocks ? Part::kK : Part::kV;
      if (part == Part::kV) number -= k_blocks;
    }
    block = find_block(params.batch, part == Part::kQ, number);
  }
  HSTU_DEVICE bool has_rows() const { return block.rows > 0; }
};

// -------------------------------------------------------------------------------------- pieces

// kPiece elements of a row.
template <typename Element>
struct Piece {
  static constexpr bool kIsE4m3 = std::is_same_v<Element, E4m3>;
  static constexpr int kElementBytes = kIsE4m3 ? 1 : 2;
  using Words = std::conditional_t<kIsE4m3, uint2, uint4>;

  alignas(Words) uint32_t words[sizeof(Words) / 4];

  HSTU_DEVICE void load(const char* from, bool exists) {
    *reinterpret_cast<Words*>(words) =
        ptx::ld_global_nc_if(exists, reinterpret_cast<const Words*>(from));
  }

  HSTU_DEVICE float operator[](int n) const {
    return n % 2 ? high_half<Element>(words[n / 2]) : low_half<Element>(words[n / 2]);
  }

  // Applies SiLU, and rounds.
  HSTU_DEVICE void activate() {
    static_assert(!kIsE4m3);
#pragma unroll
    for (uint32_t& word : words) {
      const float low = low_half<Element>(word), high = high_half<Element>(word);
      word = rounded_pair<Element>(silu(low, ptx::sigmoid_approx(low)),
                                   silu(high, ptx::sigmoid_approx(high)));
    }
  }

  HSTU_DEVICE void set_nan(int n) { words[n / 2] |= n % 2 ? 0x7fff0000u : 0x7fffu; }

  // For each half of the words, a number with the largest magnitude of the four; NaN if one is NaN.
  HSTU_DEVICE uint32_t largest_pair() const {
    static_assert(!kIsE4m3);
    return larger_magnitudes<Element>(larger_magnitudes<Element>(words[0], words[1]),
                                      larger_magnitudes<Element>(words[2], words[3]));
  }
};

template <int kLanes, typename Combine>
HSTU_DEVICE float reduce_lanes(float x, Combine combine) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
struct Largest {
  HSTU_DEVICE float operator()(float x, float y) const { return fmaxf(x, y); }
};
struct Sum {
  HSTU_DEVICE float operator()(float x, float y) const { return x + y; }
};

HSTU_DEVICE float largest_of(const float (&x)[kSteps]) {
  float largest = x[0];
#pragma unroll
  for (int n = 1; n < kSteps; ++n) largest = fmaxf(largest, x[n]);
  return largest;
}

// Combines x[n] over the kLanes lanes of a row, for each n < 8. Lane l of the row returns the
// result for n = l / (kLanes / 8), and the first of the lanes with the same n owns n.
template <int kLanes, typename Combine>
HSTU_DEVICE float reduce_to_owners(float (&x)[kSteps], Combine combine) {
  static_assert(kSteps == 8 && kLanes >= 8);
  int lanes = kLanes / 2;
#pragma unroll
  for (int count = 4; count > 0; count /= 2, lanes /= 2) {
    const bool is_upper = threadIdx.x & lanes;
#pragma unroll
    for (int n = 0; n < count; ++n) {
      const float kept = is_upper ? x[n + count] : x[n];
      const float sent = is_upper ? x[n] : x[n + count];
      x[n] = combine(kept, __shfl_xor_sync(~0u, sent, lanes));
    }
  }
#pragma unroll
  for (int step = kLanes / 16; step > 0; step /= 2) {
    x[0] = combine(x[0], __shfl_xor_sync(~0u, x[0], step));
  }
  return x[0];
}
// The `x` of the lane that owns n.
template <int kLanes>
HSTU_DEVICE float read_from_owner(float x, int n) {
  return __shfl_sync(~0u, x, n * (kLanes / 8), kLanes);
}

// The largest `x` of a block of threads. `scratch` has 32 elements; all threads call it.
template <int kThreads>
HSTU_DEVICE float largest_of_block(float x, float* scratch) {
  x = reduce_lanes<32>(x, Largest());
  __syncthreads();  // an earlier call has read `scratch`
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) x = fmaxf(x, scratch[warp]);
  return x;
}

// ------------------------------------------------------------------------------------- a block

// The rows of a block of threads: each row of a head is divided among kLanes lanes.
template <typename Element, int kLanes>
struct Rows {
  static constexpr int kThreads = kLanes * kRowsAtOnce;

  const QuantizeParams& params;
  const PackedTensor& tensor;
  RowBlock block;
  int head;
  int row;     // the first row of this thread; the others follow in steps of kRowsAtOnce
  int column;  // of this thread's pieces
  Piece<Element> pieces[kSteps];
  float mean[kPiece];         // K's, where it is subtracted or multiplied with; else 0
  bool is_all_finite = true;  // of what find_largest() has read

  HSTU_DEVICE Rows(const QuantizeParams& params, const PackedTensor& tensor, const RowBlock& block,
                   int head)
      : params(params),
        tensor(tensor),
        block(block),
        head(head),
        row(threadIdx.x / kLanes),
        column(threadIdx.x % kLanes * kPiece) {
    constexpr int kBytes = Piece<Element>::kElementBytes;
    const int64_t first =
        (block.begin + row) * tensor.row_stride + head * tensor.head_stride + column;
    const char* from = static_cast<const char*>(tensor.data) + first * kBytes;
    const bool is_in_head = column < tensor.head_dim;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      pieces[step].load(from, has_row(step) && is_in_head);
      from += tensor.row_stride * (kRowsAtOnce * kBytes);
    }
    if constexpr (!Piece<Element>::kIsE4m3) {
      if (&tensor == &params.q ? params.silu_q : params.silu_kv) {
#pragma unroll
        for (Piece<Element>& piece : pieces) piece.activate();
      }
    }
#pragma unroll
    for (float& x : mean) x = 0.0f;
  }

  HSTU_DEVICE void load_mean(const float* means) {
    if (column >= tensor.head_dim) return;
    const int64_t at = (int64_t{block.sequence} * params.heads + head) * tensor.head_dim + column;
#pragma unroll
    for (int n = 0; n < kPiece; n += 4) {
      *reinterpret_cast<float4*>(mean + n) = *reinterpret_cast<const float4*>(means + at + n);
    }
  }

  HSTU_DEVICE bool has_row(int step) const { return row + step * kRowsAtOnce < block.rows; }

  // The step that this lane owns, see reduce_to_owners().
  static HSTU_DEVICE int own_step() {
    return static_cast<int>(threadIdx.x) % kLanes / (kLanes / 8);
  }
  HSTU_DEVICE bool is_owner() const {
    return threadIdx.x % (kLanes / 8) == 0 && has_row(own_step());
  }
  HSTU_DEVICE int64_t own_row() const { return block.begin + row + own_step() * kRowsAtOnce; }

  // The element, without the mean if kSubtracts.
  template <bool kSubtracts>
  HSTU_DEVICE float value(int step, int n) const {
    const float x = pieces[step][n];
    return kSubtracts ? x - mean[n] : x;
  }

  // Keeps the compiler from holding unpacked elements in registers until it needs them again.
  HSTU_DEVICE void forget_values() {
#pragma unroll
    for (Piece<Element>& piece : pieces) {
#pragma unroll
      for (uint32_t& word : piece.words) asm volatile("" : "+r"(word));
    }
  }

  // Finds the largest finite magnitude of each piece. Infinities in `pieces` become NaN.
  template <bool kSubtracts>
  HSTU_DEVICE void find_largest(float (&largest)[kSteps]) {
    float zero = 0.0f;  // NaN if a number is NaN or infinity
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      largest[step] = largest_or_nan<kSubtracts>(step);
      zero += 0.0f * largest[step];
    }
    is_all_finite = zero == 0.0f;
    if (__builtin_expect(!is_all_finite, 0)) find_largest_finite<kSubtracts>(largest);
  }
  // The codes of a piece, with reciprocal `scale` of the descale.
  template <bool kSubtracts>
  HSTU_DEVICE uint2 codes(int step, float scale) const {
    if constexpr (Piece<Element>::kIsE4m3) {
      return {pieces[step].words[0], pieces[step].words[1]};
    } else {
      const auto scaled = [&](int n) { return value<kSubtracts>(step, n) * scale; };
      return {ptx::cvt_e4m3x4(scaled(0), scaled(1), scaled(2), scaled(3)),
              ptx::cvt_e4m3x4(scaled(4), scaled(5), scaled(6), scaled(7))};
    }
  }

  // Finds the sums of squares of the norm rule, see codes.h, over each piece. The elements are
  // multiplied by the `scale` of the lane that owns their row. NaN does not count.
  template <bool kSubtracts>
  HSTU_DEVICE void find_squares(float scale, float (&sums)[kSteps]) const {
    float scales[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) scales[step] = read_from_owner<kLanes>(scale, step);
    if (__builtin_expect(is_all_finite, 1)) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        sums[step] = rounded_squares<kSubtracts, false>(step, scales[step]);
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        sums[step] = rounded_squares<kSubtracts, true>(step, scales[step]);
    }
    if constexpr (kSubtracts) {  // a row that does not exist has no mean to subtract
#pragma unroll
      for (int step = 0; step < kSteps; ++step) sums[step] = has_row(step) ? sums[step] : 0.0f;
    }
  }

 private:
  template <bool kSubtracts, bool kHasNan>
  HSTU_DEVICE float rounded_squares(int step, float scale) const {
    float sum = kSquaresBegin;
#pragma unroll
    for (int n = 0; n < kPiece; ++n) {
      const float x = value<kSubtracts>(step, n) * scale;
      sum = add_rounded_square(sum, !kHasNan || is_finite(x) ? x : 0.0f);
    }
    return sum - kSquaresBegin;
  }

  // Returns the largest magnitude of the piece of a step; NaN or infinity if it has one.
  template <bool kSubtracts>
  HSTU_DEVICE float largest_or_nan(int step) const {
    if constexpr (!kSubtracts) {
      const uint32_t pair = pieces[step].largest_pair();
      return ptx::max_nan(fabsf(low_half<Element>(pair)), fabsf(high_half<Element>(pair)));
    }
    float largest = 0.0f;
    if (!has_row(step)) return largest;  // a row without elements has no mean to subtract
#pragma unroll
    for (int n = 0; n < kPiece; ++n) {
      largest = ptx::max_nan(largest, fabsf(value<kSubtracts>(step, n)));
    }
    return largest;
  }

  // Does the work of find_largest() where some number is not finite.
  template <bool kSubtracts>
  HSTU_DEVICE void find_largest_finite(float (&largest)[kSteps]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      largest[step] = 0.0f;
#pragma unroll
      for (int n = 0; n < kPiece; ++n) {
        const float x = fabsf(value<kSubtracts>(step, n));
        if (!is_finite(x)) {
          pieces[step].set_nan(n);
        } else if (!kSubtracts || has_row(step)) {
          largest[step] = fmaxf(largest[step], x);
        }
      }
    }
  }
};

}  // namespace hstu
