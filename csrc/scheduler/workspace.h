// The workspace of a call in device memory.
#pragma once

#include "../common/arena.h"
#include "work_list.h"

namespace hstu {

class Workspace : public Arena<256> {
 public:
  using Arena::Arena;

  WorkList take_list(int64_t total, int batch, int tile_size) {
    WorkList list;
    list.capacity = WorkList::max_tiles(total, batch, tile_size);
    list.next = take<int>(2);
    list.count = list.next + 1;
    list.tiles = take<SequenceTile>(list.capacity);
    return list;
  }

  // Summaries for tiles of `tile_size` rows of `batch`.
  SpanSummaries take_summaries(const MaskParams& mask, const BatchParams& batch, int heads,
                               int tile_size) {
    SpanSummaries summaries;
    const int64_t head_stride = mask.func ? mask.func_head_stride : mask.row_spans_head_stride;
    summaries.heads = head_stride == 0 ? 1 : heads;
    summaries.tiles = WorkList::max_tiles(batch.total_q, batch.batch, tile_size);
    summaries.data = take<SpanSummary>(int64_t{summaries.heads} * summaries.tiles);
    return summaries;
  }
};

}  // namespace hstu
