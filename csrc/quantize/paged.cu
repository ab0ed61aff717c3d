// The kernel that runs before attention over pages of e4m3. Some of its blocks quantize rows, 8
// elements of a row per thread. In the other blocks, each warp gathers the scales of one page and
// head.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "../common/cuda_check.h"
#include "../common/math.h"
#include "../common/pages.h"
#include "../common/static_switch.h"
#include "codes.h"
#include "paged.h"

namespace hstu {
namespace {

constexpr int kThreads = 256;
constexpr int kPiece = 8;  // elements of a row in a thread

HSTU_DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
HSTU_DEVICE float to_float(__half x) { return __half2float(x); }

// Returns in all lanes of a row the sum, or the maximum, of their values of x.
template <typename Combine>
HSTU_DEVICE float combine_lanes(float x, int lanes, Combine combine) {
  for (int step = lanes / 2; step > 0; step /= 2) {
    x = combine(x, __shfl_xor_sync(0xffffffff, x, step));
  }
  return x;
}

// A lane's piece of a row of q, k or v.
template <typename Element>
struct Piece {
  alignas(16) Element elements[kPiece] = {};

  HSTU_DEVICE void load(const PackedTensor& from, int64_t row, int head, int column) {
    if (column >= from.head_dim) return;
    const auto* data = static_cast<const Element*>(from.data) + row * from.row_stride +
                       head * from.head_stride + column;
    *reinterpret_cast<uint4*>(elements) = __ldg(reinterpret_cast<const uint4*>(data));
  }
};

// Quantizes a row of k or v, or of q, whose descale is its norm. NaN and infinity become NaN.
// Called by `lanes` neighboring lanes. `index` and `at` are the indices of the row and head in
// `codes` and in `descales`.
template <bool kIsQuery, typename Element>
HSTU_DEVICE void quantize_row(const Piece<Element>& piece, int lanes, int columns, int column,
                              int64_t index, int64_t at, bool exists, uint8_t* codes,
                              float* descales) {
  float x[kPiece];
  float largest = 0.0f;
#pragma unroll
  for (int n = 0; n < kPiece; ++n) {
    x[n] = to_float(piece.elements[n]);
    if (is_finite(x[n])) largest = fmaxf(largest, fabsf(x[n]));
  }
  largest = combine_lanes(largest, lanes, [](float a, float b) { return fmaxf(a, b); });
  float descale = descale_of(largest);
  if constexpr (kIsQuery) {
    // NOTE: squares of quotients cannot overflow.
    const float unit = fmaxf(largest, kSmallestDescale);
    const float per_unit = 1 / unit;
    float squares = 0.0f;
#pragma unroll
    for (int n = 0; n < kPiece; ++n) {
      const float quotient = x[n] * per_unit;
      if (is_finite(quotient)) squares += quotient * quotient;
    }
    squares = combine_lanes(squares, lanes, [](float a, float b) { return a + b; });
    descale = fmaxf(fminf(unit * sqrtf(squares), FLT_MAX), kSmallestDescale);
  }
  if (!exists || column >= columns) return;
  const float per_descale = 1 / descale;
  alignas(8) uint16_t pairs[kPiece / 2];
#pragma unroll
  for (int n = 0; n < kPiece; n += 2) {
    const auto code = [&](int m) {
      return is_finite(x[m]) ? x[m] * per_descale : __int_as_float(0x7fffffff);
    };
    pairs[n / 2] = __nv_cvt_float2_to_fp8x2({code(n), code(n + 1)}, __NV_SATFINITE, __NV_E4M3);
  }
  *reinterpret_cast<uint2*>(codes + index * columns + column) =
      *reinterpret_cast<const uint2*>(pairs);
  if (column == 0) descales[at] = descale;
}

// Quantizes row `row` of a head of q, k and v.
template <typename Element>
HSTU_DEVICE void quantize_rows(const PagedQuantizeParams& params, int64_t row, int head,
                               int lanes) {
  const bool exists = row < params.batch.total_q;
  if (!exists) row = 0;
  const int column = (static_cast<int>(threadIdx.x) & (lanes - 1)) * kPiece;
  Piece<Element> q, k, v;  // NOTE: all are loaded before one is needed
  q.load(params.q, row, head, column);
  k.load(params.k, row, head, column);
  v.load(params.v, row, head, column);
  const int columns = round_up(params.q.head_dim, kQuantizedHeadDimUnit);
  const int64_t index = row * params.heads + head, at = head * params.batch.total_q + row;
  quantize_row<true>(q, lanes, columns, column, index, at, exists, params.q8, params.q_descale);
  quantize_row<false>(k, lanes, columns, column, index, at, exists, params.k8, params.k_descale);
  quantize_row<false>(v, lanes, columns, column, index, at, exists, params.v8, params.v_descale);
}

// True if each code of a row of a page is zero or NaN. Such a row has the scale 1, but needs none.
HSTU_DEVICE bool needs_no_scale(const PagedQuantizeParams& params, int64_t page, int part, int slot,
                                int head) {
  const PagedParams& paged = params.paged;
  const auto* const codes = static_cast<const uint8_t*>(paged.kv_cache) + page * paged.page_stride +
                            part * paged.kv_stride + slot * paged.slot_stride +
                            head * paged.head_stride;
  const int columns = part == 0 ? params.k.head_dim : params.v.head_dim;
  for (int n = 0; n < columns; ++n) {
    const int magnitude = codes[n] & 0x7f;
    if (magnitude != 0 && magnitude != 0x7f) return false;
  }
  return true;
}

// Copies the scales of K (part 0) or V of the rows of entry `entry` of page_ids, and finds the
// largest. Called by a warp.
HSTU_DEVICE void gather_scales(const PagedQuantizeParams& params, int64_t entry, int part,
                               int head) {
  const PagedParams& paged = params.paged;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int owner =
      -1;  // NOTE: each lane looks at one sequence, so that loads do not wait for each other
  for (int first = 0; first < params.batch.batch && owner < 0; first += 32) {
    const int b = min(first + lane, params.batch.batch - 1);
    const PageList pages(paged, b);
    const bool has_it = entry >= pages.first && entry - pages.first < pages.count;
    const unsigned found = __ballot_sync(0xffffffff, has_it);
    if (found != 0) owner = min(first + __ffs(found) - 1, params.batch.batch - 1);
  }
  if (owner < 0) return;
  const Sequence sequence = load_sequence(params.batch, owner);
  const PageList pages(paged, owner);
  const int64_t n = entry - pages.first;
  const int64_t id = pages.page(paged, static_cast<int>(n));
  const int64_t rows = clamp(sequence.history_end - n * paged.page_size, 0, paged.page_size);
  const float* const scales =
      paged.scales + id * paged.scale_page_stride + part * paged.scale_kv_stride + head;
  const int64_t to = (entry * 2 + part) * params.heads + head;
  float largest = 0.0f;
#pragma unroll 4
  for (int slot = lane; slot < paged.page_size; slot += 32) {
    float scale = slot < rows ? scales[slot * paged.scale_slot_stride] : 0;
    if (scale == 1.0f && needs_no_scale(params, id, part, slot, head)) scale = 0;
    if (is_finite(scale)) {
      largest = fmaxf(largest, fabsf(scale));
    } else {
      scale = __int_as_float(0x7fffffff);  // NOTE: infinite weights would become 448
    }
    params.page_scales[to * paged.page_size + slot] = scale;
  }
  largest = combine_lanes(largest, 32, [](float a, float b) { return fmaxf(a, b); });
  if (lane == 0) params.page_descales[to] = largest;
}

// Blocks (n, head) quantize rows, in 2^log2_lanes lanes each, and blocks (n, (1 + part) * H + head)
// gather scales.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    quantize_paged_kernel(const __grid_constant__ PagedQuantizeParams params, int log2_lanes) {
  const int kind = static_cast<int>(blockIdx.y) / params.heads;
  const int head = static_cast<int>(blockIdx.y) % params.heads;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (kind == 0) {
    quantize_rows<Element>(params, thread >> log2_lanes, head, 1 << log2_lanes);
  } else if (thread / 32 < params.paged.num_page_ids) {
    gather_scales(params, thread / 32, kind - 1, head);
  }
}

}  // namespace

void quantize_paged_call(const PagedQuantizeParams& params, void* stream) {
  int log2_lanes = 0;
  while ((kPiece << log2_lanes) < round_up(params.q.head_dim, kQuantizedHeadDimUnit)) ++log2_lanes;
  const int64_t threads =
      std::max(params.batch.total_q << log2_lanes, params.paged.num_page_ids * 32);
  const dim3 grid(static_cast<unsigned>(ceil_div(threads, int64_t{kThreads})), 3 * params.heads);
  bool_switch(params.dtype == DType::kBFloat16, [&](auto is_bf16) {
    using Element = std::conditional_t<is_bf16, __nv_bfloat16, __half>;
    quantize_paged_kernel<Element>
        <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params, log2_lanes);
  });
  check_launch("quantize_paged_call");
}

}  // namespace hstu
