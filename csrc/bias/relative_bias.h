// The kernel that runs before an attention kernel with a relative bias: it copies the tables in the
// form that the attention kernels read, and the times of the keys and of the rows by blocks of 8.
#pragma once

#include "../common/relative_bias.h"
#include "../common/table_sum.h"
#include "../dispatch.h"
#include "../scheduler/workspace.h"

namespace hstu {

// Takes the memory of PreparedBias. With tile_keys > 0, the position table has the layout of sm90,
// and a tile of tile_keys keys can be read anywhere in time_blocks. In the layout of sm80, a bias
// without weights by position has a table of one zero.
inline PreparedBias take_prepared_bias(Workspace& workspace, const RelativeBias& bias,
                                       const BatchParams& batch, int position_margin = 8,
                                       int tile_keys = 0) {
  PreparedBias prepared;
  prepared.position_margin = position_margin;
  prepared.has_position_of_blocks = tile_keys == 0;
  if (bias.position.data || prepared.has_position_of_blocks) {
    const int size = bias.position.data ? bias.position.size : 1;
    const int heads = bias.position.data ? bias.position.heads : 1;
    prepared.reach = (size + 1) / 2;
    prepared.position_copy_stride = round_up(size + 2 * position_margin, 4);
    prepared.position_head_stride = int64_t{4} * prepared.position_copy_stride;
    prepared.position = workspace.take<float>(heads * prepared.position_head_stride);
  }
  if (bias.time.data) {
    prepared.time = workspace.take<float>(int64_t{bias.time.heads} * bias.time.size);
    prepared.cells = workspace.take<BucketCell>(kDifferenceCells);
    prepared.weight_cells = workspace.take<WeightCell>(int64_t{bias.time.heads} * kDifferenceCells);
    prepared.narrow_cells = workspace.take<NarrowCell>(int64_t{bias.time.heads} * kNarrowCells);
    const int64_t more_blocks = tile_keys > 0 ? tile_keys / 8 + 1 : 0;
    prepared.time_blocks = workspace.take<KeyBlockTimes>(
        WorkList::max_tiles(batch.total_k, batch.batch, 8) + more_blocks);
    prepared.row_blocks =
        workspace.take<KeyBlockTimes>(WorkList::max_tiles(batch.total_q, batch.batch, 8));
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
