// Tensor maps for rows of packed sequences ("ragged"): a copy reads zeros past the end of a
// sequence, and never a row of its neighbor.
//
// For a tensor [rows, heads, head_dim] with a stride of s bytes between rows, the map has two more
// dimensions, so that the bound of its row dimension is the end of whatever sequence the
// coordinates name:
//
//   dimension     size                  stride      coordinate of row r of [begin, begin + len)
//   column        head_dim                          column
//   row           2^30                  s           2^30 - len + r
//   head          heads                 of heads    head
//   end           2^31 - 1              s           begin + len
//   far           2^31 - 1              2^34 - s    2^30
//
// The coordinate of `row` adds 2^30 s too much, and that of `far` adds 2^64 - 2^30 s: both cancel
// modulo 2^64.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cutlass/arch/barrier.h>

#include <algorithm>
#include <cute/arch/copy_sm90_tma.hpp>
#include <stdexcept>
#include <string>

#include "../common/cuda_check.h"
#include "../common/math.h"
#include "../common/sequence.h"
#include "tile_config.h"

namespace hstu::sm90 {

// Columns of one copy: the 128 bytes that the widest swizzle spans, or 64 if rows are no multiple,
// or if the panels are to be narrow.
template <int kHeadDim, int kElementBytes = 2, bool kIsNarrow = false>
constexpr int kPanel =
    (kHeadDim * kElementBytes % 128 == 0 && !kIsNarrow ? 128 : 64) / kElementBytes;

// NOTE: the CUDA runtime looks the function up, so that nothing links against libcuda.
inline auto tensor_map_encoder() {
  static const auto encoder = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                cudaEnableDefault, &result),
               "cuTensorMapEncodeTiled");
    if (result != cudaDriverEntryPointSuccess) {
      throw std::runtime_error("cuTensorMapEncodeTiled: expected a driver that has it, got none");
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return encoder;
}

template <int kRank>
CUtensorMap encode_map(void* data, CUtensorMapDataType type, const cuuint64_t (&sizes)[kRank],
                       const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank],
                       CUtensorMapSwizzle swizzle) {
  cuuint32_t steps[kRank];
  std::fill_n(steps, kRank, 1);
  CUtensorMap map;
  const auto encode = [&] {
    return tensor_map_encoder()(
        &map, type, kRank, data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encode();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    // The thread has not called CUDA before. The driver needs a current context, which
    // cudaSetDevice() sets.
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cuTensorMapEncodeTiled");
    check_cuda(cudaSetDevice(device), "cuTensorMapEncodeTiled");
    result = encode();
  }
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled: expected success, got error " +
                             std::to_string(static_cast<int>(result)));
  }
  return map;
}

inline CUtensorMapDataType map_type(DType dtype) {
  return dtype == DType::kFloat8E4M3 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
         : dtype == DType::kFloat16  ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                     : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// Makes a map for copies of `box_rows` rows and `box_columns` columns.
inline CUtensorMap make_ragged_map(const PackedTensor& tensor, int heads, int box_rows,
                                   int box_columns, CUtensorMapDataType type, int element_bytes,
                                   CUtensorMapSwizzle swizzle) {
  const auto row_bytes = static_cast<cuuint64_t>(tensor.row_stride) * element_bytes;
  const auto head_bytes =
      heads == 1 ? row_bytes : static_cast<cuuint64_t>(tensor.head_stride) * element_bytes;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(tensor.head_dim), kRaggedRows,
                              static_cast<cuuint64_t>(heads), INT_MAX, INT_MAX};
  const cuuint64_t strides[] = {row_bytes, head_bytes, row_bytes, (uint64_t{1} << 34) - row_bytes};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows),
                            1, 1, 1};
  return encode_map<5>(tensor.data, type, sizes, strides, box, swizzle);
}

// Makes a map of a tensor in 16 bits or e4m3.
template <int kHeadDim, bool kIsNarrow = false>
CUtensorMap make_ragged_map(const PackedTensor& tensor, int heads, int box_rows, DType dtype) {
  const bool is_e4m3 = dtype == DType::kFloat8E4M3;
  const int element_bytes = is_e4m3 ? 1 : 2;
  const int columns = is_e4m3 ? kPanel<kHeadDim, 1, kIsNarrow> : kPanel<kHeadDim, 2, kIsNarrow>;
  return make_ragged_map(
      tensor, heads, box_rows, columns, map_type(dtype), element_bytes,
      columns * element_bytes < 128 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B);
}

// Makes a map of bytes; the rows of a panel are not swizzled.
template <int kHeadDim>
CUtensorMap make_quantized_map(const PackedTensor& tensor, int heads, int box_rows) {
  return make_ragged_map(tensor, heads, box_rows, kPanel<kHeadDim>, CU_TENSOR_MAP_DATA_TYPE_UINT8,
                         1, CU_TENSOR_MAP_SWIZZLE_NONE);
}

// Makes a map for copies of whole blocks of a head of v in e4m3, see Fp8Params, or of `count` of
// the 128 keys of a block.
template <int kHeadDim>
CUtensorMap make_value_block_map(const PackedTensor& tensor, int heads, int64_t blocks,
                                 int count = Fp8Params::kBlock) {
  const auto head_dim = static_cast<cuuint64_t>(tensor.head_dim);
  const cuuint64_t sizes[] = {Fp8Params::kBlock, head_dim, static_cast<cuuint64_t>(heads),
                              static_cast<cuuint64_t>(blocks)};
  const cuuint64_t head_bytes = head_dim * Fp8Params::kBlock;
  const cuuint64_t strides[] = {Fp8Params::kBlock, head_bytes, head_bytes * heads};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(count), kHeadDim, 1, 1};
  return encode_map<4>(tensor.data, CU_TENSOR_MAP_DATA_TYPE_UINT8, sizes, strides, box,
                       count < 128 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B);
}

// Makes a map for copies of 64 rows and 64 columns of a 16-bit bias.
inline CUtensorMap make_bias_map(const DenseBias& bias, int batch) {
  const auto length = static_cast<cuuint64_t>(bias.length);
  const cuuint64_t sizes[] = {length, length, static_cast<cuuint64_t>(bias.heads),
                              static_cast<cuuint64_t>(batch)};
  const auto row_bytes = static_cast<cuuint64_t>(bias.row_stride) * 2;
  const cuuint64_t strides[] = {
      row_bytes, bias.heads > 1 ? static_cast<cuuint64_t>(bias.head_stride) * 2 : row_bytes,
      batch > 1 ? static_cast<cuuint64_t>(bias.batch_stride) * 2 : row_bytes};
  const cuuint32_t box[] = {64, 64, 1, 1};
  return encode_map<4>(bias.data, map_type(bias.dtype), sizes, strides, box,
                       CU_TENSOR_MAP_SWIZZLE_128B);
}

// The rows of one sequence and head that copies read.
struct RaggedRows {
  int64_t begin;
  int count;
  int head;
};

// Calls visit(offset, column, row, head, end, far) for each box of kRows rows from row `first` on
// and kHeadDim columns from `first_column` on. `offset` is the element of shared memory where the
// box begins: kBoxRows rows are stored at a time, one panel after another. The other arguments are
// the coordinates of the box.
template <int kRows, int kHeadDim, int kBoxRows, int kElementBytes, bool kIsNarrow = false,
          typename Visit>
__device__ __forceinline__ void for_each_box(const RaggedRows& rows, int first, int first_column,
                                             Visit visit) {
  const int far = kRaggedRows;
  const int row = far - rows.count + first;
  const int end = static_cast<int>(rows.begin) + rows.count;
#pragma unroll
  for (int box = 0; box < kRows; box += kBoxRows) {
#pragma unroll
    for (int column = 0; column < kHeadDim; column += kPanel<kHeadDim, kElementBytes, kIsNarrow>) {
      visit(box * kHeadDim + column * kBoxRows, first_column + column, row + box, rows.head, end,
            far);
    }
  }
}

// Starts copying kRows rows from row `first` on to shared memory. Called by one thread, after
// arrive_and_expect_tx() on `barrier`.
template <int kRows, int kHeadDim, int kBoxRows = kRows, bool kIsNarrow = false, typename Element>
__device__ __forceinline__ void start_copy_rows(const CUtensorMap& map, const RaggedRows& rows,
                                                int first, Element* to,
                                                cutlass::arch::ClusterTransactionBarrier& barrier,
                                                int first_column = 0) {
  for_each_box<kRows, kHeadDim, kBoxRows, sizeof(Element), kIsNarrow>(
      rows, first, first_column, [&](int offset, auto... coordinates) {
        cute::SM90_TMA_LOAD_5D::copy(&map, reinterpret_cast<uint64_t*>(&barrier),
                                     static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                     to + offset, coordinates...);
      });
}

// start_copy_rows() after arrive_and_expect_tx() on `barrier`.
template <int kRows, int kHeadDim, int kBoxRows = kRows, bool kIsNarrow = false, typename Element>
__device__ __forceinline__ void copy_rows(const CUtensorMap& map, const RaggedRows& rows, int first,
                                          Element* to,
                                          cutlass::arch::ClusterTransactionBarrier& barrier) {
  barrier.arrive_and_expect_tx(kRows * kHeadDim * sizeof(Element));
  start_copy_rows<kRows, kHeadDim, kBoxRows, kIsNarrow>(map, rows, first, to, barrier);
}

// Starts copying kRows rows and kKeys columns of a bias, 64 rows at a time in panels of 64 columns.
// Elements outside the bias become zeros. Called by one thread, after arrive_and_expect_tx() on
// `barrier`.
template <int kRows, int kKeys, typename Element>
__device__ __forceinline__ void start_copy_bias(const CUtensorMap& map, int b, int head, int row,
                                                int column, Element* to,
                                                cutlass::arch::ClusterTransactionBarrier& barrier) {
#pragma unroll
  for (int m = 0; m < kRows; m += 64) {
#pragma unroll
    for (int n = 0; n < kKeys; n += 64) {
      cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&barrier),
                                   static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST),
                                   to + m * kKeys + n * 64, column + n, row + m, head, b);
    }
  }
}

}  // namespace hstu::sm90
