// The kernels of this folder: two forwards and a backward for each head dim and dtype. setup.py
// writes a source for each that instantiates them.
#pragma once

#include <climits>

#include "../common/math.h"
#include "../dispatch.h"
#include "tile_config.h"

namespace hstu::sm90 {

// True if a tensor map can describe the rows of the tensor; see tensor_map.h.
inline bool can_map(const PackedTensor& tensor, int64_t rows, int heads) {
  constexpr int64_t kLargestStride = int64_t{1} << 32;
  const bool steps = tensor.row_stride > 0 && (heads == 1 || tensor.head_stride > 0);
  return steps && tensor.row_stride < kLargestStride && tensor.head_stride < kLargestStride &&
         rows < INT_MAX - kRaggedRows;
}

// True if a tensor map can describe the bias of a call whose q has type `dtype`. The bias has the
// same type, or bf16 or fp16 if q is e4m3.
inline bool can_map(const DenseBias& bias, int batch, DType dtype) {
  const auto is_step = [](int64_t stride, int64_t count) {
    return count == 1 || (stride >= 0 && stride % 8 == 0 && stride < int64_t{1} << 39);
  };
  const bool good_dtype =
      bias.dtype == dtype || (dtype == DType::kFloat8E4M3 &&
                              (bias.dtype == DType::kBFloat16 || bias.dtype == DType::kFloat16));
  return good_dtype && reinterpret_cast<uintptr_t>(bias.data) % 16 == 0 && bias.row_stride > 0 &&
         bias.row_stride % 8 == 0 && is_step(bias.head_stride, bias.heads) &&
         is_step(bias.batch_stride, batch);
}

// True if a tensor map can describe the pages as rows.
inline bool can_map(const PagedParams& paged, int heads) {
  const PackedTensor rows = {const_cast<void*>(paged.kv_cache), paged.slot_stride,
                             paged.head_stride, 0};
  const bool steps = paged.slot_stride > 0 && paged.page_stride % paged.slot_stride == 0 &&
                     paged.kv_stride % paged.slot_stride == 0 && paged.page_stride > 0 &&
                     paged.kv_stride > 0;
  // NOTE: this checks the rows of e4m3 bytes; the caller aligns 16-bit rows.
  const bool aligned =
      !paged.scales || (paged.page_stride % 16 == 0 && paged.kv_stride % 16 == 0 &&
                        paged.slot_stride % 16 == 0 && paged.head_stride % 16 == 0);
  return steps && aligned &&
         can_map(rows, paged.num_pages * (paged.page_stride / paged.slot_stride), heads);
}

// The reason why these kernels do not support the call, which then runs the sm80 kernels; null if
// they support it.
inline const char* unsupported_reason(const CudaDevice& device, const ForwardParams& params) {
  const BatchParams& batch = params.batch;
  const int64_t key_rows = params.paged.kv_cache ? batch.total_q : batch.total_k;
  if (device.shared_memory_bytes < kSharedMemory) return "less than 227 KB of shared memory";
  if (!can_map(params.q, batch.total_q, params.heads) ||
      !can_map(params.k, key_rows, params.heads) || !can_map(params.v, key_rows, params.heads)) {
    return "strides of q, k or v that no tensor map can have";
  }
  if (params.rab.data && !can_map(params.rab, batch.batch, params.dtype)) {
    return "a rab in another dtype than q, or whose rows are not aligned to 16 bytes";
  }
  if (params.paged.kv_cache && !can_map(params.paged, params.heads)) {
    return "strides of kv_cache that no tensor map can have";
  }
  if (params.paged.scales && params.rab.data) return "a rab and a cache of e4m3";
  if (params.paged.scales && params.relative_bias) return "a relative bias and a cache of e4m3";
  return nullptr;
}

// unsupported_reason() for the backward.
inline const char* backward_unsupported_reason(const CudaDevice& device,
                                               const BackwardParams& params) {
  if (!can_map(params.dout, params.batch.total_q, params.heads)) {
    return "strides of dout that no tensor map can have";
  }
  return unsupported_reason(device, params);
}

// True if the backward runs a kernel for masks in closed form, which can find its work tiles
// without a list, see WorkList::sequence_tiles. There are none with a bias or for a deterministic
// backward, so that there are fewer kernels to compile.
inline bool runs_closed_form(const BackwardParams& params, const CudaLaunch& launch) {
  return !params.rab.data && !params.relative_bias && !launch.deterministic &&
         !is_given_by_row(params.mask);
}

// True if no sequence has more than one tile of keys: then dQ of a row is complete after a step,
// and the backward stores it without sums in device memory.
inline bool has_one_key_tile(const BackwardParams& params, const CudaLaunch& launch) {
  return runs_closed_form(params, launch) && params.batch.max_seqlen_k <= kBackwardKeys;
}

// Returns the layout of a copy of `bias` that a tensor map can describe. A stride of 0 (heads or
// sequences share a bias) stays 0.
inline DenseBias aligned_copy(const DenseBias& bias) {
  DenseBias copy = bias;
  copy.data = nullptr;
  copy.row_stride = round_up(int64_t{bias.length}, 8);
  copy.head_stride = bias.head_stride ? bias.length * copy.row_stride : 0;
  copy.batch_stride =
      bias.batch_stride ? (bias.head_stride ? bias.heads : 1) * bias.length * copy.row_stride : 0;
  return copy;
}

// Returns whether copying params.rab takes less time than these kernels gain on the sm80 kernels.
// Both times are in fs (1e-15 s), as on an H200. Copying takes 2,000 per element, and 1e10 to
// allocate and launch. These kernels save 4 in the forward and 10 in the backward per score of the
// whole square and column of K, as for 16 sequences of 2048 rows with a causal mask.
inline bool gains_by_aligned_copy(const ForwardParams& params, bool is_backward) {
  const DenseBias& bias = params.rab;
  const double square = double(bias.length) * bias.length;
  const double copied =
      square * (bias.head_stride ? bias.heads : 1) * (bias.batch_stride ? params.batch.batch : 1);
  const double scores = double(params.batch.total_q) * bias.length * params.heads;
  return scores * params.q.head_dim * (is_backward ? 10 : 4) > copied * 2000 + 1e10;
}

template <int kHeadDim, DType kDType>
ForwardKernel forward();

// The forward with a paged KV cache.
template <int kHeadDim, DType kDType>
ForwardKernel paged_forward();

template <int kHeadDim, DType kDType>
BackwardKernel backward();

// The backward with products in e4m3, for q, k, v and dO of type kDType.
template <int kHeadDim, DType kDType>
BackwardKernel backward_e4m3();

// The e4m3 linear maps of a layer whose heads have kHeadDim columns; kDType is e4m3.
using ProjectionKernel = void (*)(const ProjectionParams& params, const CudaLaunch& launch);
template <int kHeadDim, DType kDType>
ProjectionKernel projection();
template <int kHeadDim, DType kDType>
ProjectionKernel output_map();

}  // namespace hstu::sm90
