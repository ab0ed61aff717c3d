// The kernels of this folder: two forwards and a backward for each head dim and dtype. setup.py
// writes a source for each that instantiates them.
#pragma once

#include <algorithm>
#include <climits>

#include "../dispatch.h"
#include "tile_config.h"

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

// The number of blocks for each sequence and head in the backward for short sequences; 0 if a work
// list of key tiles is faster. Several blocks are a cluster and have 64 keys each; a single block
// takes one tile of 64 keys after another. Measured on an H200.
inline int blocks_of_sequence(const BackwardParams& params, const CudaLaunch& launch) {
  const int longest = longest_if_short(params, launch);
  if (longest <= 64) return 1;
  if (longest > kMaxClusterOfSequence * 64) return 0;

  const int head_dim = std::max(params.q.head_dim, params.v.head_dim);
  const bool has_clusters = launch.device.capability == 90;
  const int cluster = std::max(1, (params.batch.max_seqlen_k + 63) / 64);
  const int64_t multiprocessors = launch.device.multiprocessors;
  const int64_t resident = multiprocessors * (head_dim <= 64 ? 3 : head_dim <= 128 ? 2 : 1);
  const int64_t sequences = int64_t{params.batch.batch} * params.heads;
  if (longest <= 128) {
    // A block with two tiles takes 7/4 of the time of a block with one, and longer for wide heads.
    const auto rounds = [&](int64_t blocks) { return (blocks + resident - 1) / resident; };
    const bool gains = head_dim > 128 || 4 * rounds(2 * sequences) < 7 * rounds(sequences);
    if (has_clusters && gains) return cluster;
    return head_dim <= 128 || 2 * sequences > multiprocessors ? 1 : 0;
  }
  const int64_t blocks = sequences * cluster;
  const bool gains = head_dim > 128  ? cluster <= 3 && blocks <= resident
                     : head_dim > 64 ? cluster <= 4 && blocks <= resident
                     : cluster <= 4  ? blocks <= 2 * resident
                                     : blocks <= multiprocessors;
  return has_clusters && gains ? cluster : 0;
}

template <int kHeadDim, DType kDType>
ForwardKernel forward();

// The forward with a paged KV cache.
template <int kHeadDim, DType kDType>
ForwardKernel paged_forward();

template <int kHeadDim, DType kDType>
BackwardKernel backward();

}  // namespace hstu::sm80
