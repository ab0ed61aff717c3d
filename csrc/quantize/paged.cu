// The kernel that runs before attention over pages of e4m3. Some of its blocks quantize rows, 16
// elements of a row per thread. In the other blocks, each warp gathers the scales of one page and
// head. In short calls, the time is that of loads that wait for each other and of instructions that
// are fetched for the first time, so there are few of both.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "../common/device_math.h"
#include "../common/launch.h"
#include "../common/math.h"
#include "../common/pages.h"
#include "../common/static_switch.h"
#include "codes.h"
#include "paged.h"

namespace hstu {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 6;
constexpr int kPiece = 16;    // elements of a row in a thread
constexpr int kMaxRows = 32;  // of a block
constexpr int kWords = kPiece / 2;
static_assert(kQuantizedHeadDimUnit == kPiece);

enum class Part { kQ, kK, kV };

// Returns 1 / x for x from 2^-60 on. The quotient of large numbers is subnormal.
HSTU_DEVICE float reciprocal(float x) { return __fdividef(1.0f, x * 0x1p-8f) * 0x1p-8f; }

// Returns in all lanes of a row the sum, or the maximum, of their values of x.
template <typename Value, typename Combine>
HSTU_DEVICE Value combine_lanes(Value x, int lanes, Combine combine) {
#pragma unroll 1
  for (int step = lanes / 2; step > 0; step /= 2) {
    x = combine(x, __shfl_xor_sync(0xffffffff, x, step));
  }
  return x;
}

// The magnitudes of two 16-bit numbers, as integers in the same order.
HSTU_DEVICE uint32_t magnitudes(uint32_t word) { return word & twice_half(0x7fff); }

// Returns the largest magnitude of a row.
HSTU_DEVICE uint32_t largest_magnitude(const uint32_t (&words)[kWords], int lanes) {
  uint32_t largest = 0;
#pragma unroll
  for (const uint32_t word : words) largest = __vmaxu2(largest, magnitudes(word));
  largest = max(largest & 0xffff, largest >> 16);
  return combine_lanes(largest, lanes, [](uint32_t a, uint32_t b) { return max(a, b); });
}

template <typename Element>
constexpr uint32_t kInfinity = std::is_same_v<Element, cutlass::half_t> ? 0x7c00 : 0x7f80;

// Replaces NaN and infinity by zero. Returns which elements these were.
template <typename Element>
HSTU_DEVICE uint32_t replace_nonfinite(uint32_t (&words)[kWords]) {
  uint32_t found = 0;
#pragma unroll
  for (int n = 0; n < kPiece; ++n) {
    const int shift = n % 2 * 16;
    if ((words[n / 2] >> shift & 0x7fff) < kInfinity<Element>) continue;
    words[n / 2] &= ~(0xffffu << shift);
    found |= 1u << n;
  }
  return found;
}

// Sets bit n of the result in all threads if row `first` + n may be one of a sequence's targets,
// whose k and v attention reads from here. Called by all threads of a block.
HSTU_DEVICE uint32_t find_targets(const BatchParams& batch, int64_t first) {
  __shared__ uint32_t found;
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
#pragma unroll 1
  for (int b = static_cast<int>(threadIdx.x); b < batch.batch; b += kThreads) {
    // NOTE: this has few instructions, and clamps as load_sequence() does.
    const int64_t q_begin = clamp(batch.cu_seqlens_q[b], 0, batch.total_q);
    const int64_t room = clamp(batch.cu_seqlens_q[b + 1], q_begin, batch.total_q) - q_begin;
    const int64_t q_len = batch.seqused_q ? clamp(batch.seqused_q[b], 0, room) : room;
    const int64_t targets = batch.num_targets ? clamp(batch.num_targets[b], 0, q_len) : 0;
    const auto end = static_cast<int>(clamp(q_begin + q_len - first, 0, kMaxRows));
    const auto begin = static_cast<int>(clamp(q_begin + q_len - targets - first, 0, end));
    if (begin < end) atomicOr(&found, ~0u << begin & ~0u >> (kMaxRows - end));
  }
  __syncthreads();
  return found;
}

// Quantizes `count` rows of Q, or of targets of K or V, from row `first` on, all heads. NaN and
// infinity become NaN. 2^log2_lanes neighboring threads have a row of a head. Called by all threads
// of a block.
template <typename Element>
HSTU_DEVICE void quantize_rows(const PagedQuantizeParams& params, Part part, int64_t first,
                               int count, int log2_lanes) {
  const PackedTensor& from = part == Part::kQ ? params.q : part == Part::kK ? params.k : params.v;
  const auto* const data = static_cast<const Element*>(from.data) + first * from.row_stride;
  uint8_t* const codes = part == Part::kQ ? params.q8 : part == Part::kK ? params.k8 : params.v8;
  float* const descales = part == Part::kQ   ? params.q_descale
                          : part == Part::kK ? params.k_descale
                                             : params.v_descale;
  const int lanes = 1 << log2_lanes;
  const int column = (static_cast<int>(threadIdx.x) & (lanes - 1)) * kPiece;
  const int columns = round_up(from.head_dim, kQuantizedHeadDimUnit);
  // The piece of each round is loaded one round earlier, and the first one before targets are
  // found, so that fewer loads wait for each other.
  struct {
    int row, head;
    bool exists;
    alignas(16) uint32_t words[kWords];
  } next;
  const auto load = [&](int begin, uint32_t is_wanted) {
    const int n = begin + (static_cast<int>(threadIdx.x) >> log2_lanes);
    next.row = n / params.heads;
    next.head = n - next.row * params.heads;
    next.exists =
        n < count * params.heads && is_wanted >> next.row % kMaxRows & 1 && column < columns;
    const auto* const piece = reinterpret_cast<const uint4*>(data + next.row * from.row_stride +
                                                             next.head * from.head_stride + column);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is_inside = next.exists && column + 8 * half < from.head_dim;
      reinterpret_cast<uint4*>(next.words)[half] = is_inside ? __ldg(piece + half) : uint4{};
    }
  };
  load(0, ~0u);
  const uint32_t is_wanted = part == Part::kQ ? ~0u : find_targets(params.batch, first);
  next.exists &= is_wanted >> next.row % kMaxRows & 1;
#pragma unroll 1
  for (int begin = 0; begin < count * params.heads; begin += kThreads >> log2_lanes) {
    const int row = next.row, head = next.head;
    const bool exists = next.exists;
    uint32_t words[kWords];
#pragma unroll
    for (int n = 0; n < kWords; ++n) words[n] = next.words[n];
    load(begin + (kThreads >> log2_lanes), is_wanted);
    if (__all_sync(0xffffffff, !exists)) continue;
    uint32_t nonfinite = 0;
    uint32_t magnitude = largest_magnitude(words, lanes);
    const bool all_finite = __all_sync(0xffffffff, magnitude < kInfinity<Element>);
    if (!all_finite) {
      nonfinite = replace_nonfinite<Element>(words);
      magnitude = largest_magnitude(words, lanes);
    }
    float x[kPiece];
#pragma unroll
    for (int m = 0; m < kPiece; m += 2) {
      x[m] = low_half<Element>(words[m / 2]);
      x[m + 1] = high_half<Element>(words[m / 2]);
    }
    const float largest = low_half<Element>(magnitude);
    float descale = fmaxf(largest * (1 / kLargestCode), kSmallestDescale);
    if (part == Part::kQ) {  // the descale is the norm
      // NOTE: squares of quotients cannot overflow.
      const float unit = fmaxf(largest, kSmallestDescale);
      const float per_unit = reciprocal(unit);
      float squares = 0.0f;
#pragma unroll
      for (const float value : x) {
        const float quotient = value * per_unit;
        squares += quotient * quotient;
      }
      squares = combine_lanes(squares, lanes, [](float a, float b) { return a + b; });
      squares = fmaxf(squares, 1.0f);
      descale = fminf(unit * (squares * rsqrtf(squares)), FLT_MAX);
    }
    const float per_descale = reciprocal(descale);
    alignas(16) uint32_t packed[kPiece / 4];
#pragma unroll
    for (int m = 0; m < kPiece; m += 4) {
      const auto pair = [&](int i) -> uint32_t {
        const float2 two = {x[i] * per_descale, x[i + 1] * per_descale};
        return __nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3);
      };
      packed[m / 4] = pair(m) | pair(m + 2) << 16;
    }
    if (!all_finite) {
#pragma unroll
      for (int m = 0; m < kPiece; ++m) {
        if (nonfinite >> m & 1) packed[m / 4] |= 0x7fu << m % 4 * 8;
      }
    }
    if (!exists) continue;
    *reinterpret_cast<uint4*>(codes + ((first + row) * params.heads + head) * columns + column) =
        *reinterpret_cast<const uint4*>(packed);
    if (column == 0) descales[head * params.batch.total_q + first + row] = descale;
  }
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

// Returns the last sequence whose pages begin at entry `entry` of page_ids or before. Called by a
// warp.
HSTU_DEVICE int find_owner(const PagedParams& paged, int batch, int64_t entry) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int low = 0, count = batch;
#pragma unroll 1
  while (count > 1) {
    const int step = ceil_div(count, 32);
    const bool is_before =
        lane * step < count && (lane == 0 || paged.page_offsets[low + lane * step] <= entry);
    const int last = 31 - __clz(__ballot_sync(0xffffffff, is_before));
    low += last * step;
    count = min(step, count - last * step);
  }
  return low;
}

// Copies the scales of the rows of a page, and finds the largest. `index` is the index [entry of
// page_ids, part, head] in page_descales. Called by a warp.
HSTU_DEVICE void gather_scales(const PagedQuantizeParams& params, int index) {
  constexpr int kAtOnce = 4;
  const PagedParams& paged = params.paged;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int entry_part = index / params.heads;
  const int head = index - entry_part * params.heads, part = entry_part % 2, entry = entry_part / 2;
  const int64_t id = clamp(paged.page_ids[entry], 0, paged.num_pages - 1);
  const float* const from =
      paged.scales + id * paged.scale_page_stride + part * paged.scale_kv_stride + head;
  // Entries of a buffer behind the last sequence are in no list, unless offsets are inconsistent.
  const bool is_used = entry < paged.page_offsets[params.batch.batch];
  float scales[kAtOnce];
  const auto load = [&](int first) {
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int slot = first + 32 * n;
      const bool exists = slot < paged.page_size && is_used;
      scales[n] = exists ? __ldg(from + slot * paged.scale_slot_stride) : 0;
    }
  };
  load(lane);  // NOTE: these loads do not wait for what follows
  const int owner = find_owner(paged, params.batch.batch, entry);
  const PageList pages(paged, owner);
  const int history = load_sequence(params.batch, owner).history_end;
  const int64_t n = entry - pages.first;
  const auto rows = static_cast<int>(
      0 <= n && n < pages.count ? clamp(history - n * paged.page_size, 0, paged.page_size) : 0);
  float largest = 0.0f;
#pragma unroll 1
  for (int first = lane; first < paged.page_size; first += 32 * kAtOnce) {
    if (first > lane) load(first);
    bool has_one = false;
#pragma unroll
    for (const float scale : scales) has_one |= scale == 1.0f;
    uint32_t unneeded = 0;
    if (has_one) {
#pragma unroll 1
      for (int n = 0; n < kAtOnce; ++n) {
        const int slot = first + 32 * n;
        if (slot >= rows || from[slot * paged.scale_slot_stride] != 1.0f) continue;
        unneeded |= uint32_t{needs_no_scale(params, id, part, slot, head)} << n;
      }
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int slot = first + 32 * n;
      float scale = slot < rows && !(unneeded >> n & 1) ? scales[n] : 0;
      if (!is_finite(scale)) scale = __int_as_float(0x7fffffff);  // infinite weights would be 448
      largest = fmaxf(largest, fabsf(scale));  // of a number and NaN, this is the number
      if (slot < paged.page_size)
        params.page_scales[int64_t{index} * paged.page_size + slot] = scale;
    }
  }
  largest = combine_lanes(largest, 32, [](float a, float b) { return fmaxf(a, b); });
  if (lane == 0) params.page_descales[index] = largest;
}

// The first `gathers` blocks gather scales, a warp for each page, part and head. Then
// `blocks_of_part` blocks quantize Q, `rows` rows each, as many K, and as many V.
template <typename Element>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    quantize_paged_kernel(const __grid_constant__ PagedQuantizeParams params, int gathers,
                          int blocks_of_part, int rows, int log2_lanes) {
  let_next_kernel_start();
  int block = static_cast<int>(blockIdx.x);
  if (block < gathers) {
    const int warp = block * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
    if (warp < params.paged.num_page_ids * 2 * params.heads) gather_scales(params, warp);
    return;
  }
  block -= gathers;
  const int part = block / blocks_of_part;
  const int64_t first = int64_t{block - part * blocks_of_part} * rows;
  const auto count = static_cast<int>(clamp(params.batch.total_q - first, 0, rows));
  quantize_rows<Element>(params, static_cast<Part>(part), first, count, log2_lanes);
  // One block that waits delays the end of the kernel. The others make room for the next kernel.
  if (blockIdx.x == gridDim.x - 1) wait_for_previous_kernel();
}

}  // namespace

void quantize_paged_call(const PagedQuantizeParams& params, const CudaLaunch& launch,
                         bool starts_early) {
  int log2_lanes = 0;
  while ((kPiece << log2_lanes) < params.q.head_dim) ++log2_lanes;
  const int64_t total_q = params.batch.total_q;
  const int64_t warps = params.paged.num_page_ids * 2 * params.heads;
  const int64_t gathers = ceil_div(warps, kThreads / 32);
  // A block has as many rows as its threads have at once, and more if not all blocks would be
  // resident at once.
  const int64_t at_once = (kThreads >> log2_lanes) / params.heads;
  const int64_t resident = int64_t{launch.device.multiprocessors} * kBlocksPerSm;
  const int64_t left = std::max(resident - gathers, resident / 4);
  const int64_t rows = clamp(std::max(at_once, ceil_div(3 * total_q, left)), 1, kMaxRows);
  const int64_t blocks_of_part = ceil_div(total_q, rows);
  const int64_t blocks = gathers + 3 * blocks_of_part;
  bool_switch(params.dtype == DType::kBFloat16, [&](auto is_bf16) {
    using Element = std::conditional_t<is_bf16, cutlass::bfloat16_t, cutlass::half_t>;
    launch_kernel(quantize_paged_kernel<Element>,
                  {.blocks = static_cast<unsigned>(blocks),
                   .threads = kThreads,
                   .starts_early = starts_early},
                  launch, "quantize_paged_call", params, static_cast<int>(gathers),
                  static_cast<int>(blocks_of_part), static_cast<int>(rows), log2_lanes);
  });
}

}  // namespace hstu
