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
#include "../common/ptx.h"
#include "../common/static_switch.h"
#include "codes.h"
#include "paged.h"

namespace hstu {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 5;
constexpr int kUsualRows = 32;       // the most rows of a block, unless one round has more
constexpr int kMostRows = kThreads;  // one head, and a lane for each row

enum class Part { kQ, kK, kV };

// A piece of a row of 16-bit numbers, which a thread quantizes. Neighboring threads have a row.
template <typename Element>
struct RowPiece {
  static constexpr int kElements = 16;
  static constexpr uint32_t kInfinity = std::is_same_v<Element, cutlass::half_t> ? 0x7c00 : 0x7f80;

  alignas(16) uint32_t words[kElements / 2];

  // Loads elements from column `column` of a row on. They are zeros from head_dim on, a multiple of
  // 8, or if the row does not exist.
  HSTU_DEVICE void load(const Element* row, int column, int head_dim, bool exists) {
    const auto* const from = reinterpret_cast<const uint4*>(row + column);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is_inside = exists && column + 8 * half < head_dim;
      reinterpret_cast<uint4*>(words)[half] = is_inside ? __ldg(from + half) : uint4{};
    }
  }

  HSTU_DEVICE float operator[](int n) const {
    return n % 2 ? high_half<Element>(words[n / 2]) : low_half<Element>(words[n / 2]);
  }

  // Keeps the compiler from holding unpacked elements in registers until it needs them again.
  HSTU_DEVICE void forget_values() {
#pragma unroll
    for (uint32_t& word : words) asm volatile("" : "+r"(word));
  }

  // Returns the largest magnitude, as an integer in the same order.
  HSTU_DEVICE uint32_t largest_magnitude() const {
    uint32_t largest = 0;
#pragma unroll
    for (const uint32_t word : words) largest = __vmaxu2(largest, word & twice_half(0x7fff));
    return max(largest & 0xffff, largest >> 16);
  }

  HSTU_DEVICE bool is_zero() const {
    uint32_t bits = 0;
#pragma unroll
    for (const uint32_t word : words) bits |= word;
    return (bits & twice_half(0x7fff)) == 0;
  }

  // Replaces NaN and infinity by zero. Bit n of the result says that element n was one of these.
  HSTU_DEVICE uint32_t replace_nonfinite() {
    uint32_t found = 0;
#pragma unroll
    for (int n = 0; n < kElements; ++n) {
      const int shift = n % 2 * 16;
      if ((words[n / 2] >> shift & 0x7fff) < kInfinity) continue;
      words[n / 2] &= ~(0xffffu << shift);
      found |= 1u << n;
    }
    return found;
  }

  // Returns the codes of the elements times `scale`.
  HSTU_DEVICE uint4 codes(float scale) const {
    const auto four = [&](int n) {
      return ptx::cvt_e4m3x4((*this)[n] * scale, (*this)[n + 1] * scale, (*this)[n + 2] * scale,
                             (*this)[n + 3] * scale);
    };
    return {four(0), four(4), four(8), four(12)};
  }
};

// Replaces those of 16 codes by NaN whose bits are set.
HSTU_DEVICE void set_nan(uint4& codes, uint32_t is_nan) {
  const auto bytes = [is_nan](int n) {
    const uint32_t bits = is_nan >> n;
    return (bits & 1 | (bits & 2) << 7 | (bits & 4) << 14 | (bits & 8) << 21) * 0x7f;
  };
  codes.x |= bytes(0);
  codes.y |= bytes(4);
  codes.z |= bytes(8);
  codes.w |= bytes(12);
}

// Returns in all lanes of a row the sum, or the maximum, of their values of x.
template <typename Value, typename Combine>
HSTU_DEVICE Value combine_lanes(Value x, int lanes, Combine combine) {
#pragma unroll 1
  for (int step = lanes / 2; step > 0; step /= 2) {
    x = combine(x, __shfl_xor_sync(0xffffffff, x, step));
  }
  return x;
}

// Returns 1 / x for x from 2^-60 on. The quotient of large numbers is subnormal.
HSTU_DEVICE float reciprocal(float x) { return __fdividef(1.0f, x * 0x1p-8f) * 0x1p-8f; }

// The rows of a block that may be targets, whose k and v attention reads from here: bit n % 32 of
// word n / 32 is for row `first` + n.
struct TargetsOfBlock {
  uint32_t words[kMostRows / 32];

  // Called by all threads of a block.
  HSTU_DEVICE void find(const BatchParams& batch, int64_t first, int rows) {
    for (int n = static_cast<int>(threadIdx.x); n * 32 < rows; n += kThreads) words[n] = 0;
    __syncthreads();
#pragma unroll 1
    for (int b = static_cast<int>(threadIdx.x); b < batch.batch; b += kThreads) {
      // NOTE: this has few instructions, and clamps as load_sequence() does.
      const int64_t q_begin = clamp(batch.cu_seqlens_q[b], 0, batch.total_q);
      const int64_t room = clamp(batch.cu_seqlens_q[b + 1], q_begin, batch.total_q) - q_begin;
      const int64_t q_len = batch.seqused_q ? clamp(batch.seqused_q[b], 0, room) : room;
      const int64_t targets = batch.num_targets ? clamp(batch.num_targets[b], 0, q_len) : 0;
      const auto end = static_cast<int>(clamp(q_begin + q_len - first, 0, rows));
      const auto begin = static_cast<int>(clamp(q_begin + q_len - targets - first, 0, end));
#pragma unroll 1
      for (int n = begin; n < end; n = (n | 31) + 1) {
        const uint32_t behind = end - (n & ~31) < 32 ? ~0u << end % 32 : 0;
        atomicOr(&words[n / 32], ~0u << n % 32 & ~behind);
      }
    }
    __syncthreads();
  }
  HSTU_DEVICE bool has(int n) const { return words[n / 32] >> n % 32 & 1; }
};

// Returns the largest magnitude of a row.
template <typename Element>
HSTU_DEVICE uint32_t largest_magnitude(const RowPiece<Element>& piece, int lanes) {
  return combine_lanes(piece.largest_magnitude(), lanes,
                       [](uint32_t a, uint32_t b) { return max(a, b); });
}

// Returns the sum of the squares of a row, times scale^2.
template <typename Element>
HSTU_DEVICE float sum_of_squares(const RowPiece<Element>& piece, float scale, int lanes) {
  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < RowPiece<Element>::kElements; ++n) {
    const float x = scale * piece[n];
    sum += x * x;
  }
  return combine_lanes(sum, lanes, [](float a, float b) { return a + b; });
}

// True if squares of a row with this norm did not over- or underflow. The norm of a row with NaN or
// infinity is kSmallestDescale here.
HSTU_DEVICE bool is_usual_norm(float norm) { return norm >= 0x1p-45f && norm <= 0x1p60f; }

// How the threads of a block divide its rows.
struct RowsOfBlock {
  int rows;         // of all heads
  int log2_lanes;   // 2^log2_lanes neighboring threads have a row of a head
  int at_once;      // rows of a head that the threads have in a round
  int step, heads;  // at_once = step * params.heads + heads
};

// Quantizes `rows` rows of Q, or of targets of K or V, from row `first` on. NaN and infinity become
// NaN. Called by all threads of a block.
template <typename Element>
HSTU_DEVICE void quantize_rows(const PagedQuantizeParams& params, const RowsOfBlock& block,
                               Part part, int64_t first, int rows) {
  using Piece = RowPiece<Element>;
  static_assert(Piece::kElements == kQuantizedHeadDimUnit);
  __shared__ TargetsOfBlock targets;
  const PackedTensor& from = part == Part::kQ ? params.q : part == Part::kK ? params.k : params.v;
  const int lanes = 1 << block.log2_lanes;
  const int column = (static_cast<int>(threadIdx.x) & (lanes - 1)) * Piece::kElements;
  const int head_dim = params.q.head_dim;  // that of k and v, too
  const int columns = round_up(head_dim, kQuantizedHeadDimUnit);
  int row = (static_cast<int>(threadIdx.x) >> block.log2_lanes) / params.heads;
  int head = (static_cast<int>(threadIdx.x) >> block.log2_lanes) - row * params.heads;
  const auto* const data = static_cast<const Element*>(from.data) + first * from.row_stride;
  Piece next;
  const auto load = [&](bool exists) {
    next.load(data + row * from.row_stride + head * from.head_stride, column, head_dim, exists);
  };
  // The piece of each round is loaded one round earlier, and the first one before targets are
  // found, so that fewer loads wait for each other.
  load(row < rows);
  if (part != Part::kQ) targets.find(params.batch, first, rows);
  const auto exists = [&] { return row < rows && (part == Part::kQ || targets.has(row)); };
#pragma unroll 1
  for (int begin = 0; begin < rows * params.heads; begin += block.at_once) {
    Piece piece = next;
    const int this_row = row, this_head = head;
    const bool is_wanted = exists() && column < columns;
    row += block.step;
    head += block.heads;
    if (head >= params.heads) {
      head -= params.heads;
      ++row;
    }
    load(exists());
    if (__any_sync(0xffffffff, is_wanted)) {
      float descale;
      uint32_t is_nan = 0;
      bool is_usual;
      if (part == Part::kQ) {  // the descale is the norm
        const float squares = sum_of_squares(piece, 1.0f, lanes);
        descale = fmaxf(squares * rsqrtf(fmaxf(squares, 0x1p-120f)), kSmallestDescale);
        is_usual = is_usual_norm(descale) || piece.is_zero();
      } else {
        const uint32_t magnitude = largest_magnitude(piece, lanes);
        is_usual = magnitude < Piece::kInfinity;
        descale = fmaxf(low_half<Element>(magnitude) * (1 / kLargestCode), kSmallestDescale);
      }
      const bool all_usual = __all_sync(0xffffffff, is_usual);
      if (!all_usual) {
        is_nan = piece.replace_nonfinite();
        const float largest = low_half<Element>(largest_magnitude(piece, lanes));
        if (part != Part::kQ) {
          descale = fmaxf(largest * (1 / kLargestCode), kSmallestDescale);
        } else {
          const float unit = fmaxf(largest, kSmallestDescale);
          const float squares = fmaxf(sum_of_squares(piece, reciprocal(unit), lanes), 1.0f);
          // NOTE: the bits of a row must not depend on the other rows of the warp.
          if (!is_usual_norm(descale)) descale = fminf(unit * (squares * rsqrtf(squares)), FLT_MAX);
        }
      }
      piece.forget_values();
      uint4 of_piece = piece.codes(reciprocal(descale));
      if (!all_usual) set_nan(of_piece, is_nan);
      if (is_wanted) {
        const int64_t to = first + this_row;
        uint8_t* const codes = part == Part::kQ   ? params.q8
                               : part == Part::kK ? params.k8
                                                  : params.v8;
        float* const descales = part == Part::kQ   ? params.q_descale
                                : part == Part::kK ? params.k_descale
                                                   : params.v_descale;
        *reinterpret_cast<uint4*>(codes + (to * params.heads + this_head) * columns + column) =
            of_piece;
        if (column == 0) descales[this_head * params.batch.total_q + to] = descale;
      }
    }
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
// `blocks_of_part` blocks quantize Q, as many K, and as many V.
template <typename Element>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    quantize_paged_kernel(const __grid_constant__ PagedQuantizeParams params, int gathers,
                          int blocks_of_part, const RowsOfBlock rows) {
  let_next_kernel_start();
  int block = static_cast<int>(blockIdx.x);
  if (block < gathers) {
    const int warp = block * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
    if (warp < params.paged.num_page_ids * 2 * params.heads) gather_scales(params, warp);
    return;
  }
  block -= gathers;
  const int part = block / blocks_of_part;
  const int64_t first = int64_t{block - part * blocks_of_part} * rows.rows;
  const auto count = static_cast<int>(clamp(params.batch.total_q - first, 0, rows.rows));
  quantize_rows<Element>(params, rows, static_cast<Part>(part), first, count);
  // One block that waits delays the end of the kernel. The others make room for the next kernel.
  if (blockIdx.x == gridDim.x - 1) wait_for_previous_kernel();
}

}  // namespace

void quantize_paged_call(const PagedQuantizeParams& params, const CudaLaunch& launch,
                         bool starts_early) {
  RowsOfBlock rows = {};
  while ((kQuantizedHeadDimUnit << rows.log2_lanes) < params.q.head_dim) ++rows.log2_lanes;
  rows.at_once = kThreads >> rows.log2_lanes;
  rows.step = rows.at_once / params.heads;
  rows.heads = rows.at_once % params.heads;
  const int64_t total_q = params.batch.total_q;
  const int64_t warps = params.paged.num_page_ids * 2 * params.heads;
  const int64_t gathers = ceil_div(warps, kThreads / 32);
  // A block has the rows of whole rounds, of one or of so many that all blocks are resident at
  // once.
  const int64_t resident = int64_t{launch.device.multiprocessors} * kBlocksPerSm;
  const int64_t left = std::max(resident - gathers, resident / 4);
  const int64_t of_round = std::max(rows.step, 1);
  const int64_t rounds = clamp(ceil_div(ceil_div(3 * total_q, left), of_round), 1,
                               std::max(kUsualRows / of_round, int64_t{1}));
  rows.rows = static_cast<int>(of_round * rounds);
  const int64_t blocks_of_part = ceil_div(total_q, int64_t{rows.rows});
  const int64_t blocks = gathers + 3 * blocks_of_part;
  bool_switch(params.dtype == DType::kBFloat16, [&](auto is_bf16) {
    using Element = std::conditional_t<is_bf16, cutlass::bfloat16_t, cutlass::half_t>;
    launch_kernel(quantize_paged_kernel<Element>,
                  {.blocks = static_cast<unsigned>(blocks),
                   .threads = kThreads,
                   .starts_early = starts_early},
                  launch, "quantize_paged_call", params, static_cast<int>(gathers),
                  static_cast<int>(blocks_of_part), rows);
  });
}

}  // namespace hstu
