// The kernels of this folder: two forwards and a backward for each head dim and dtype. setup.py
// writes a source for each that instantiates them.
#pragma once

#include <algorithm>
#include <climits>

#include "../dispatch.h"

namespace hstu::sm80 {

// Most rows or keys of a sequence, by the call's max_seqlen_q and max_seqlen_k, if a kernel for
// short sequences can compute the call; else INT_MAX.
inline int longest_if_short(const ForwardParams& params) {
  const BatchParams& batch = params.batch;
  if (batch.batch == 0 || params.paged.kv_cache || params.relative_bias) return INT_MAX;
  return std::max(batch.max_seqlen_q, batch.max_seqlen_k);
}

// The same for the backward.
inline int longest_if_short(const BackwardParams& params) {
  if (params.drab.data && params.drab.heads != params.heads) return INT_MAX;
  return longest_if_short(static_cast<const ForwardParams&>(params));
}

template <int kHeadDim, DType kDType>
ForwardKernel forward();

// The forward with a paged KV cache.
template <int kHeadDim, DType kDType>
ForwardKernel paged_forward();

template <int kHeadDim, DType kDType>
BackwardKernel backward();

}  // namespace hstu::sm80
