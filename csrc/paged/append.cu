// Scatters new keys and values into the pages of a cache.
//
// A warp takes a few rows of all heads: a lane each finds where a row goes, since that takes many
// loads one after another, and then all lanes copy.
#include <algorithm>

#include "../common/cuda_check.h"
#include "append.h"

namespace hstu {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 4;  // of 64 registers a thread
constexpr int kRows = 8;         // of a warp
constexpr int kRowsAtOnce = 4;   // asked for before the first one is written

template <typename Piece>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    append_kernel(const __grid_constant__ AppendParams params) {
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
  for (int64_t begin = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32 * kRows;
       begin < params.batch.total_q; begin += warps * kRows) {
    const bool has_row = lane < kRows && begin + lane < params.batch.total_q;
    const int64_t own_slot = has_row ? find_slot(params, begin + lane) : -1;
    for (int first = 0; first < kRows; first += kRowsAtOnce) {
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

// Whether every row of every head begins at a multiple of 16 bytes.
bool is_aligned(const AppendParams& params) {
  const PagedParams& paged = params.paged;
  const auto fits = [&](int64_t elements) { return elements * params.element_bytes % 16 == 0; };
  const auto begins = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  const auto rows = [&](const PackedTensor& tensor) {
    return begins(tensor.data) && fits(tensor.row_stride) && fits(tensor.head_stride);
  };
  return rows(params.k) && rows(params.v) && fits(params.k.head_dim) && begins(paged.kv_cache) &&
         fits(paged.page_stride) && fits(paged.kv_stride) && fits(paged.slot_stride) &&
         fits(paged.head_stride);
}

}  // namespace

void append_on_gpu(const AppendParams& params, int multiprocessors, void* stream) {
  constexpr int kBlockRows = kThreads / 32 * kRows;
  const int64_t blocks = (params.batch.total_q + kBlockRows - 1) / kBlockRows;
  const auto grid =
      static_cast<unsigned>(std::min<int64_t>(blocks, int64_t{multiprocessors} * kBlocksPerSm));
  if (grid == 0) return;
  const auto kernel = is_aligned(params) ? append_kernel<uint4> : append_kernel<uint16_t>;
  kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  check_launch("append_paged_kv");
}

}  // namespace hstu
