// The kernels of this folder, a forward and a backward for each head dim and dtype; those that are
// built are instantiated in instantiations/.
#pragma once

#include <climits>

#include "../dispatch.h"
#include "tile_config.h"

namespace hstu::sm90 {

// Whether a tensor map can describe rows of the tensor; see tensor_map.h.
inline bool can_map(const PackedTensor& tensor, int64_t rows, int heads) {
  constexpr int64_t kLargestStride = int64_t{1} << 32;
  const bool steps = tensor.row_stride > 0 && (heads == 1 || tensor.head_stride > 0);
  return steps && tensor.row_stride < kLargestStride && tensor.head_stride < kLargestStride &&
         rows < INT_MAX - kRaggedRows;
}

// Whether one can describe the bias.
inline bool can_map(const DenseBias& bias, int batch, DType dtype) {
  const auto is_step = [](int64_t stride, int64_t count) {
    return count == 1 || (stride > 0 && stride % 8 == 0 && stride < int64_t{1} << 39);
  };
  return bias.dtype == dtype && reinterpret_cast<uintptr_t>(bias.data) % 16 == 0 &&
         bias.row_stride > 0 && bias.row_stride % 8 == 0 && is_step(bias.head_stride, bias.heads) &&
         is_step(bias.batch_stride, batch);
}

// What keeps the kernels from taking the call, which those of sm80 then take; null: nothing.
inline const char* obstacle(const CudaDevice& device, const ForwardParams& params) {
  const BatchParams& batch = params.batch;
  if (device.shared_memory_bytes < kSharedMemory) return "less than 227 KB of shared memory";
  if (!can_map(params.q, batch.total_q, params.heads) ||
      !can_map(params.k, batch.total_k, params.heads) ||
      !can_map(params.v, batch.total_k, params.heads)) {
    return "strides of q, k or v that no tensor map can have";
  }
  if (params.rab.data && !can_map(params.rab, batch.batch, params.dtype)) {
    return "a rab in another dtype than q, or whose rows are not aligned to 16 bytes";
  }
  return nullptr;
}

// Likewise for the backward.
inline const char* backward_obstacle(const CudaDevice& device, const BackwardParams& params) {
  if (!can_map(params.dout, params.batch.total_q, params.heads)) {
    return "strides of dout that no tensor map can have";
  }
  return obstacle(device, params);
}

template <int kHeadDim, DType kDType>
ForwardKernel forward();

template <int kHeadDim, DType kDType>
BackwardKernel backward();

}  // namespace hstu::sm90
