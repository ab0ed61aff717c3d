// The kernels of this folder: two forwards and a backward for each head dim and dtype. setup.py
// writes a source for each that instantiates them.
#pragma once

#include <algorithm>
#include <climits>

#include "../dispatch.h"

namespace hstu::sm80 {

// The larger of the call's max_seqlen_q and max_seqlen_k, if a kernel for short sequences can
// compute the call; else INT_MAX.
inline int longest_if_short(const ForwardParams& params, const CudaLaunch& launch) {
  const BatchParams& batch = params.batch;
  if (launch.sm_margin > 0) return INT_MAX;  // short kernels use all multiprocessors
  if (batch.batch == 0 || params.paged.kv_cache || params.relative_bias) return INT_MAX;
  if (params.heads > 65535) return INT_MAX;  // a grid has no more blocks in its second dimension
  return std::max(batch.max_seqlen_q, batch.max_seqlen_k);
}

// longest_if_short() for the backward.
inline int longest_if_short(const BackwardParams& params, const CudaLaunch& launch) {
  if (params.drab.data && params.drab.heads != params.heads) return INT_MAX;
  return longest_if_short(static_cast<const ForwardParams&>(params), launch);
}

// Row tiles of the forward kernel for up to 512 tokens, which has a block for each row tile.
inline int64_t short_row_tiles(const ForwardParams& params) {
  return int64_t{params.batch.batch} * params.heads * ((params.batch.max_seqlen_q + 63) / 64);
}

// True if the forward kernel for up to 512 tokens is faster than a work list of larger tiles.
// Measured on an H200.
inline bool gains_by_short_forward(const ForwardParams& params, const CudaLaunch& launch) {
  const int longest = longest_if_short(params, launch);
  const int multiprocessors = launch.device.multiprocessors;
  const int head_dim = std::max(params.q.head_dim, params.v.head_dim);
  const int64_t tiles = short_row_tiles(params);
  if (head_dim <= 64) return longest <= 128 || (longest <= 512 && tiles <= 16 * multiprocessors);
  return head_dim <= 128 && longest <= 192 && tiles <= 2 * multiprocessors;
}

// True if a block for each sequence and head is faster in the backward than a work list of key
// tiles.
inline bool gains_by_short_backward(const BackwardParams& params, const CudaLaunch& launch) {
  const int longest = longest_if_short(params, launch);
  if (longest <= 64) return true;
  const int64_t sequences = int64_t{params.batch.batch} * params.heads;
  const bool is_wide = std::max(params.q.head_dim, params.v.head_dim) > 128;
  return longest <= 128 && (!is_wide || 2 * sequences > launch.device.multiprocessors);
}

template <int kHeadDim, DType kDType>
ForwardKernel forward();

// The forward with a paged KV cache.
template <int kHeadDim, DType kDType>
ForwardKernel paged_forward();

template <int kHeadDim, DType kDType>
BackwardKernel backward();

}  // namespace hstu::sm80
