// The kernel that runs before the attention kernel of e4m3 with a bias: it finds how much the bias
// can add to a weight of each row.
//
// The bound of a row is at least |silu(s + b)| - |s| for any s and each b = alpha * bias that the
// row may see. It is the largest b or, since silu is at least -0.2785, the largest -b up to 0.2785.
// NaN and infinity do not count. So a bias of -1e9, which hides a key, costs weights no precision.
#pragma once

#include "../dispatch.h"
#include "../scheduler/workspace.h"

namespace hstu {

// The index in Fp8Params::bias_bounds of row `row` of the packed q.
HSTU_HOST_DEVICE int64_t index_of_bias_bound(const ForwardParams& params, int head, int64_t row) {
  if (!params.rab.data) return head;
  return head / (params.heads / params.rab.heads) * params.batch.total_q + row;
}

inline float* take_bias_bounds(Workspace& workspace, const ForwardParams& params) {
  const int64_t count = params.rab.data ? params.rab.heads * params.batch.total_q : params.heads;
  return workspace.take<float>(count);
}

// Writes params.fp8.bias_bounds. A relative bias has been prepared; a dense one is of 16 bits and
// its rows are aligned to 16 bytes.
void find_bias_bounds(const ForwardParams& params, const CudaLaunch& launch);

}  // namespace hstu
