// Scatters new keys and values into the pages of a cache.
//
// A warp takes a few rows of all heads. First each lane finds the slot of one row, because that
// takes many dependent loads; then all lanes copy.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>

#include "../common/cuda_check.h"
#include "../common/math.h"
#include "../common/static_switch.h"
#include "append.h"

namespace hstu {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 4;  // with 64 registers per thread
constexpr int kMostRows = 8;     // rows of a warp
constexpr int kRowsAtOnce = 4;   // rows loaded before the first one is stored

template <typename Piece>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    append_kernel(const __grid_constant__ AppendParams params, int rows) {
  const PackedTensor& k = params.k;
  const PackedTensor& v = params.v;
  const PagedParams& paged = params.paged;
  const int lane = threadIdx.x % 32;
  const int head_pieces = k.head_dim * params.element_bytes / int{sizeof(Piece)};
  const auto at = [&](const void* data, int64_t elements) {
    return reinterpret_cast<Piece*>(static_cast<char*>(const_cast<void*>(data)) +
                                    elements * params.element_bytes);
  };
  const int64_t warps = int64_t{gridDim.x} * kThreads / 32;
  for (int64_t begin = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32 * rows;
       begin < params.batch.total_q; begin += warps * rows) {
    const bool has_row = lane < rows && begin + lane < params.batch.total_q;
    const int64_t own_slot = has_row ? find_slot(params, begin + lane).element : -1;
    for (int first = 0; first < rows; first += kRowsAtOnce) {
      int64_t slots[kRowsAtOnce];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) slots[r] = __shfl_sync(~0u, own_slot, first + r);
      for (int n = lane; n < params.heads * head_pieces; n += 32) {
        const int head = n / head_pieces;
        const int piece = n % head_pieces;
        Piece keys[kRowsAtOnce], values[kRowsAtOnce];
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
          if (slots[r] < 0) continue;
          const int64_t row = begin + first + r;
          keys[r] = __ldg(at(k.data, row * k.row_stride + head * k.head_stride) + piece);
          values[r] = __ldg(at(v.data, row * v.row_stride + head * v.head_stride) + piece);
        }
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
          if (slots[r] < 0) continue;
          const int64_t to = slots[r] + head * paged.head_stride;
          at(paged.kv_cache, to)[piece] = keys[r];
          at(paged.kv_cache, to + paged.kv_stride)[piece] = values[r];
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------- an e4m3 cache

constexpr int kPiece = 8;  // elements of a lane: 16 bytes of a row, 8 bytes of the cache

HSTU_DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
HSTU_DEVICE float to_float(__half x) { return __half2float(x); }

// A lane's piece of a row of a head; the first `count` of its elements exist.
template <typename Element>
struct Piece {
  alignas(16) Element elements[kPiece];

  template <bool kAligned>
  HSTU_DEVICE void load(const Element* from, int count) {
    if constexpr (kAligned) {
      if (count > 0) {
        *reinterpret_cast<uint4*>(elements) = __ldg(reinterpret_cast<const uint4*>(from));
        return;
      }
    }
#pragma unroll
    for (int n = 0; n < kPiece; ++n) elements[n] = n < count ? from[n] : Element(0.0f);
  }

  HSTU_DEVICE float largest() const {
    float largest = 0.0f;
#pragma unroll
    for (int n = 0; n < kPiece; ++n) {
      const float x = to_float(elements[n]);
      if (is_finite(x)) largest = fmaxf(largest, fabsf(x));
    }
    return largest;
  }

  template <bool kAligned>
  HSTU_DEVICE void store(uint8_t* to, int count, float scale) const {
    alignas(8) uint16_t pairs[kPiece / 2];
#pragma unroll
    for (int n = 0; n < kPiece; n += 2) {
      const auto code = [&](int m) {
        const float x = to_float(elements[m]);
        return is_finite(x) ? x / scale : __int_as_float(0x7fffffff);
      };
      pairs[n / 2] = __nv_cvt_float2_to_fp8x2({code(n), code(n + 1)}, __NV_SATFINITE, __NV_E4M3);
    }
    if constexpr (kAligned) {
      if (count > 0) *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(pairs);
    } else {
#pragma unroll
      for (int n = 0; n < kPiece; ++n) {
        if (n < count) to[n] = pairs[n / 2] >> n % 2 * 8;
      }
    }
  }
};

// append_kernel() for an e4m3 cache. A row of a head is divided among 2^n neighboring lanes, kPiece
// elements each, which compute its largest magnitude together. If kAligned, 80 registers per thread
// are enough.
template <typename Element, bool kAligned>
__global__ void __launch_bounds__(kThreads, kAligned ? 3 : 2)
    append_quantized_kernel(const __grid_constant__ AppendParams params, int rows, int head_lanes) {
  const PackedTensor* const tensors[] = {&params.k, &params.v};
  const PagedParams& paged = params.paged;
  auto* const cache = static_cast<uint8_t*>(const_cast<void*>(paged.kv_cache));
  auto* const scales = const_cast<float*>(paged.scales);
  const int lane = threadIdx.x % 32;
  const int column = lane % head_lanes * kPiece;
  const int64_t warps = int64_t{gridDim.x} * kThreads / 32;
  for (int64_t begin = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32 * rows;
       begin < params.batch.total_q; begin += warps * rows) {
    const bool has_row = lane < rows && begin + lane < params.batch.total_q;
    const Slot own_slot = has_row ? find_slot(params, begin + lane) : Slot{};
    for (int first = 0; first < rows; first += kRowsAtOnce) {
      int64_t slots[kRowsAtOnce];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        slots[r] = __shfl_sync(~0u, own_slot.element, first + r);
      }
      for (int first_head = 0; first_head < params.heads; first_head += 32 / head_lanes) {
        const int head = first_head + lane / head_lanes;
        const int count = head < params.heads ? params.k.head_dim - column : 0;
        Piece<Element> pieces[kRowsAtOnce][2];
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            const PackedTensor& tensor = *tensors[part];
            const int64_t at = (begin + first + r) * tensor.row_stride + head * tensor.head_stride;
            pieces[r][part].template load<kAligned>(
                static_cast<const Element*>(tensor.data) + at + column, slots[r] < 0 ? 0 : count);
          }
        }
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
          const int64_t scale_slot = __shfl_sync(~0u, own_slot.scale, first + r);
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            float largest = pieces[r][part].largest();
            for (int step = head_lanes / 2; step > 0; step /= 2) {
              largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
            }
            if (slots[r] < 0 || count <= 0) continue;
            const float scale = e4m3_scale(largest);
            uint8_t* to = cache + slots[r] + part * paged.kv_stride + head * paged.head_stride;
            pieces[r][part].template store<kAligned>(to + column, count, scale);
            if (column == 0) scales[scale_slot + part * paged.scale_kv_stride + head] = scale;
          }
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------------- launches

// True if every row of every head begins at a multiple of 16 bytes, in an e4m3 cache at a multiple
// of 8 bytes.
bool is_aligned(const AppendParams& params) {
  const PagedParams& paged = params.paged;
  const int cache_unit = paged.scales ? kPiece : 16 / params.element_bytes;
  const auto begins = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  const auto rows = [&](const PackedTensor& tensor) {
    return begins(tensor.data) && tensor.row_stride * params.element_bytes % 16 == 0 &&
           tensor.head_stride * params.element_bytes % 16 == 0 &&
           tensor.head_dim * params.element_bytes % 16 == 0;
  };
  return rows(params.k) && rows(params.v) && begins(paged.kv_cache) &&
         paged.page_stride % cache_unit == 0 && paged.kv_stride % cache_unit == 0 &&
         paged.slot_stride % cache_unit == 0 && paged.head_stride % cache_unit == 0;
}

}  // namespace

void append_on_gpu(const AppendParams& params, int multiprocessors, void* stream) {
  // A warp gets several rows only if there are enough for all warps.
  const int64_t most_blocks = int64_t{multiprocessors} * kBlocksPerSm;
  const int64_t total = params.batch.total_q;
  const int rows =
      static_cast<int>(std::clamp<int64_t>(total / (most_blocks * kThreads / 32), 1, kMostRows));
  const int64_t block_rows = kThreads / 32 * rows;
  const auto grid = static_cast<unsigned>(std::min(ceil_div(total, block_rows), most_blocks));
  if (grid == 0) return;
  if (params.paged.scales) {
    int head_lanes = 1;
    while (head_lanes * kPiece < params.k.head_dim) head_lanes *= 2;
    bool_switch(params.dtype == DType::kBFloat16, [&](auto is_bf16) {
      using Element = std::conditional_t<is_bf16, __nv_bfloat16, __half>;
      bool_switch(is_aligned(params), [&](auto aligned) {
        append_quantized_kernel<Element, aligned>
            <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params, rows, head_lanes);
      });
    });
  } else {
    bool_switch(is_aligned(params), [&](auto aligned) {
      append_kernel<std::conditional_t<aligned, uint4, uint16_t>>
          <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params, rows);
    });
  }
  check_launch("append_paged_kv");
}

}  // namespace hstu
