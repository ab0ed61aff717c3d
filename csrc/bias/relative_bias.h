// The kernel that runs before an attention kernel with a relative bias: it copies the tables in the
// form that the attention kernels read, and finds the ranges of the keys' and of the rows' times.
#pragma once

#include "../common/relative_bias.h"
#include "../common/table_sum.h"
#include "../dispatch.h"
#include "../scheduler/workspace.h"

namespace hstu {

// Takes the memory of PreparedBias. With tile_keys > 0 it has time_blocks in place of ranges:
// enough of them that a tile of tile_keys keys can be read anywhere. With has_row_blocks it has
// row_blocks in place of row_ranges.
inline PreparedBias take_prepared_bias(Workspace& workspace, const RelativeBias& bias,
                                       const BatchParams& batch, int position_margin = 8,
                                       int tile_keys = 0, bool has_row_blocks = false) {
  PreparedBias prepared;
  prepared.position_margin = position_margin;
  if (bias.position.data) {
    prepared.reach = (bias.position.size + 1) / 2;
    prepared.position_copy_stride = round_up(bias.position.size + 2 * position_margin, 4);
    prepared.position_head_stride = int64_t{4} * prepared.position_copy_stride;
    prepared.position = workspace.take<float>(bias.position.heads * prepared.position_head_stride);
  }
  if (bias.time.data) {
    prepared.time = workspace.take<float>(int64_t{bias.time.heads} * bias.time.size);
    prepared.cells = workspace.take<BucketCell>(kDifferenceCells);
    prepared.weight_cells = workspace.take<WeightCell>(int64_t{bias.time.heads} * kDifferenceCells);
    prepared.narrow_cells = workspace.take<NarrowCell>(int64_t{bias.time.heads} * kNarrowCells);
    const int64_t blocks = WorkList::max_tiles(batch.total_k, batch.batch, 8);
    if (tile_keys > 0) {
      prepared.time_blocks = workspace.take<KeyBlockTimes>(blocks + tile_keys / 8 + 1);
    } else {
      prepared.ranges = workspace.take<TimeRange>(blocks);
    }
    const int64_t row_blocks = WorkList::max_tiles(batch.total_q, batch.batch, 8);
    if (has_row_blocks) {
      prepared.row_blocks = workspace.take<KeyBlockTimes>(row_blocks);
    } else {
      prepared.row_ranges = workspace.take<TimeRange>(row_blocks);
    }
  }
  return prepared;
}

// The sums that become the gradients of the tables. A sum without entries is not wanted. Entry head
// * table.size + n is the sum of dS over the scores that read entry n of the head's table.
struct TableSums {
  TableSum position;
  TableSum time;
};

// Takes the memory of TableSums, which must be zeroed.
inline TableSums take_table_sums(Workspace& workspace, const BackwardParams& params) {
  const auto take = [&](const float* gradient, const BiasTable& table) {
    TableSum sum;
    if (!gradient) return sum;
    sum.entries = int64_t{table.heads} * table.size;
    sum.words = workspace.take<int64_t>(TableSum::kWords * sum.entries);
    return sum;
  };
  return {take(params.dpos_weight, params.relative_bias.position),
          take(params.dts_weight, params.relative_bias.time)};
}

// Writes params.dpos_weight and params.dts_weight: the sums, multiplied by alpha and the scale. If
// each row has its own scale, `rest_of_scale` is the factor that the kernel has not applied to dS.
void round_table_sums(const BackwardParams& params, const TableSums& sums, double rest_of_scale,
                      const CudaLaunch& launch);

// Writes bias.prepared.
void prepare_relative_bias(const RelativeBias& bias, const BatchParams& batch,
                           const CudaLaunch& launch);

}  // namespace hstu
