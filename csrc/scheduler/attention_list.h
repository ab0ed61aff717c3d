// Host code that takes the memory of an attention kernel's work list and makes the list on the
// device.
#pragma once

#include "../common/attention_launch.h"
#include "prepare.h"
#include "workspace.h"

namespace hstu {

// Takes the memory of the work list of forward kernel Form, with `num_splits` work tiles for each
// tile of rows and head. A list takes time to make. There is no list if all work tiles of the batch
// are resident at once, or if sequences are short (WorkList::sequence_tiles), unless there are
// splits or the mask needs summaries.
template <typename Form>
WorkList take_forward_list(Workspace& workspace, const ForwardParams& params,
                           const CudaLaunch& launch, int num_splits = 1) {
  const BatchParams& batch = params.batch;
  const int work_per_tile = params.heads * num_splits;
  WorkList list;
  list.capacity = WorkList::max_tiles(batch.total_q, batch.batch, Form::kRows);
  const int64_t work_tiles = int64_t{list.capacity} * work_per_tile;
  const int64_t resident = resident_blocks<Form>(launch);
  const bool needs_list = is_given_by_row(params.mask) || num_splits > 1;
  if constexpr (Form::kBeginsUnlisted) {
    const int tiles = ceil_div(batch.max_seqlen_q, Form::kRows);
    const int64_t possible = int64_t{tiles} * batch.batch * params.heads;
    // Otherwise one block could have two work tiles, and another none.
    const bool is_even = work_tiles > resident || possible <= resident;
    const bool is_short =
        tiles > 0 && std::max(batch.max_seqlen_q, batch.max_seqlen_k) <= Form::kUnlistedLength;
    const int64_t most = tiles == 1 ? INT32_MAX - resident : Form::kUnlistedRounds * resident;
    if (!needs_list && is_short && is_even && possible <= most) {
      list.sequence_tiles = tiles;
      list.capacity = tiles * batch.batch;
      list.work_per_tile = work_per_tile;
      return list;
    }
  }
  if (work_tiles > resident || needs_list) {
    list = workspace.take_list(batch.total_q, batch.batch, Form::kRows);
    if (is_given_by_row(params.mask)) {
      list.summaries = workspace.take_summaries(params.mask, batch, params.heads, Form::kRows);
    } else if (Form::kBeginsUnlisted) {
      // NOTE: the first row tiles of a long causal sequence are its cheapest. They stay in the
      // list, where they come last and let blocks end at the same time.
      const int count = static_cast<int>(resident_blocks<Form>(launch) / params.heads);
      const bool is_long = 2 * ceil_div(batch.max_seqlen_q, Form::kRows) > 3 * count;
      const int begin = is_long ? std::max(list.capacity - count, 0) : 0;
      list.unlisted = {begin, begin + count};
    }
    if (Form::kFollowsQuantization && !list.summaries.tiles) {
      list.prepared_tiles = workspace.take<PreparedTile>(list.capacity);
    }
  }
  list.work_per_tile = work_per_tile;
  return list;
}

// Returns the number of blocks to launch.
template <typename Form>
int64_t forward_blocks(const WorkList& list, const CudaLaunch& launch) {
  const int64_t work_tiles = int64_t{list.capacity} * list.work_per_tile;
  const bool is_persistent = list.sequence_tiles > 0 || list.tiles;
  return is_persistent ? persistent_blocks<Form>(launch, work_tiles) : work_tiles;
}

// Makes the list on the device, and zeroes `zero_bytes` of workspace. Returns false if there is no
// list, and then launches nothing.
template <typename Form>
bool prepare_forward(const WorkList& list, const ForwardParams& params, const CudaLaunch& launch,
                     void* zeros = nullptr, int64_t zero_bytes = 0) {
  if (!list.tiles) return false;
  PrepareParams prepared;
  prepared.batch = params.batch;
  prepared.mask = params.mask;
  prepared.paged = params.paged;
  prepared.list = list;
  prepared.tile_rows = Form::kRows;
  prepared.tile_keys = Form::kKeys;
  prepared.heads = params.heads;
  prepared.row_output = params.out;
  prepared.zeros = zeros;
  prepared.zero_bytes = zero_bytes;
  // K and V of a chunk take a third of the L2 cache; the rest is for data that is used once.
  const int element_bytes = params.dtype == DType::kFloat8E4M3 ? 1 : 2;
  const int64_t row_bytes =
      int64_t{params.heads} * (params.k.head_dim + params.v.head_dim) * element_bytes;
  prepared.set_chunks(params.batch.total_k, launch.device.l2_bytes / 3 / row_bytes);
  // If each block has few work tiles, finishing at the same time is worth more than the reuse
  // within chunks.
  const int64_t work_tiles = int64_t{list.capacity} * list.work_per_tile;
  const int64_t blocks = persistent_blocks<Form>(launch, work_tiles);
  if (Form::kWaitsForMemory && work_tiles >= 6 * blocks) prepared.tail_divisor = 3;
  prepare_scheduler(prepared, launch);
  return true;
}

// Returns the parameters that the backward kernels of all architectures set in the same way.
inline PrepareParams prepare_params(const BackwardParams& params) {
  PrepareParams prepared;
  prepared.batch = params.batch;
  prepared.mask = params.mask;
  prepared.by_keys = true;
  prepared.heads = params.heads;
  prepared.row_output = params.dq;
  prepared.key_outputs[0] = params.dk;
  prepared.key_outputs[1] = params.dv;
  return prepared;
}

// Sets chunks whose Q, K, V, dO and fp32 dQ take a third of the L2 cache. A deterministic backward
// has no chunks: blocks wait less for dq_semaphore if they are spread over more sequences.
inline void set_backward_chunks(PrepareParams& prepared, const BackwardParams& params,
                                const CudaLaunch& launch) {
  if (launch.deterministic) return;
  const int64_t row_bytes = int64_t{params.heads} * (8 * params.k.head_dim + 4 * params.v.head_dim);
  prepared.set_chunks(params.batch.total_k, launch.device.l2_bytes / 3 / row_bytes);
  prepared.tail_divisor = 3;
}

}  // namespace hstu
