// Scatters new keys and values into the pages of a cache. A warp takes a row of all heads.
#include <algorithm>

#include "../common/cuda_check.h"
#include "append.h"

namespace hstu {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 2048 / kThreads;

template <typename Piece>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    append_kernel(const __grid_constant__ AppendParams params) {
  const int lane = threadIdx.x % 32;
  const int head_pieces = params.k.head_dim * params.element_bytes / int{sizeof(Piece)};
  const int pieces = params.heads * head_pieces;
  const auto at = [&](const void* data, int64_t elements) {
    return reinterpret_cast<Piece*>(static_cast<char*>(const_cast<void*>(data)) +
                                    elements * params.element_bytes);
  };
  const int64_t warps = int64_t{gridDim.x} * kThreads / 32;
  for (int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
       row < params.batch.total_q; row += warps) {
    const int64_t slot = find_slot(params, row);
    if (slot < 0) continue;
#pragma unroll 4
    for (int n = lane; n < pieces; n += 32) {
      const int head = n / head_pieces;
      const int piece = n % head_pieces;
      const int64_t to = slot + head * params.paged.head_stride;
      const PackedTensor& k = params.k;
      const PackedTensor& v = params.v;
      at(params.paged.kv_cache, to)[piece] =
          at(k.data, row * k.row_stride + head * k.head_stride)[piece];
      at(params.paged.kv_cache, to + params.paged.kv_stride)[piece] =
          at(v.data, row * v.row_stride + head * v.head_stride)[piece];
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
  const int64_t blocks = (params.batch.total_q + kThreads / 32 - 1) / (kThreads / 32);
  const auto grid =
      static_cast<unsigned>(std::min<int64_t>(blocks, int64_t{multiprocessors} * kBlocksPerSm));
  if (grid == 0) return;
  const auto kernel = is_aligned(params) ? append_kernel<uint4> : append_kernel<uint16_t>;
  kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  check_launch("append_paged_kv");
}

}  // namespace hstu
