// Host side of the e4m3 linear maps: makes the tensor maps and launches the kernel.
#pragma once

#include "../common/attention_launch.h"
#include "kernels.h"
#include "projection.h"

namespace hstu::sm90 {

// Makes the maps of rows and of the weight. A copy of the weight has its rows in the order of
// accumulators: dimensions 1 to 4 are e, t, b and J.
inline ProjectionMaps make_projection_maps(const ProjectionParams& params) {
  const auto depth = static_cast<cuuint64_t>(params.depth);
  const auto total = static_cast<cuuint64_t>(params.batch.total_k);
  ProjectionMaps maps;
  maps.x =
      encode_map<2>(const_cast<uint8_t*>(params.x8), CU_TENSOR_MAP_DATA_TYPE_UINT8, {depth, total},
                    {depth}, {128, kWarpgroupRows}, CU_TENSOR_MAP_SWIZZLE_128B);
  const auto groups = static_cast<cuuint64_t>(params.columns / 32);
  maps.weight = encode_map<5>(const_cast<uint8_t*>(params.weight8), CU_TENSOR_MAP_DATA_TYPE_UINT8,
                              {depth, 2, 4, 4, groups}, {depth, 8 * depth, 2 * depth, 32 * depth},
                              {128, 2, 4, 4, 4}, CU_TENSOR_MAP_SWIZZLE_128B);
  return maps;
}

template <int kHeadDim>
void launch_projection(const ProjectionParams& params, const CudaLaunch& launch) {
  using Kernel = Projection<kHeadDim>;
  // Each sequence, the rows before them and the rows after them begin with a block of their own.
  const int64_t blocks = params.batch.total_k / Fp8Params::kBlock + params.batch.batch + 2;
  const int64_t work_tiles = ceil_div(blocks, Kernel::kClusterSize) * params.column_tiles();
  launch_attention<Kernel>(run_projection<Kernel>, launch,
                           persistent_blocks<Kernel>(launch, work_tiles), "FP8 linear map", params,
                           make_projection_maps(params));
}

template <int kHeadDim, DType>
ProjectionKernel projection() {
  return launch_projection<kHeadDim>;
}

// NOTE: each head dim has the same kernel, so that a build with any of them has it.
template <int kHeadDim, DType>
ProjectionKernel output_map() {
  return launch_projection<0>;
}

}  // namespace hstu::sm90
