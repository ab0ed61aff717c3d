// Hands out aligned pieces of a call's workspace. Without memory it only counts their bytes.
#pragma once

#include "work_list.h"

namespace hstu {

class Workspace {
 public:
  explicit Workspace(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <typename T>
  T* take(int64_t count) {
    T* piece = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    used_ += bytes<T>(count);
    return piece;
  }

  // The bytes that take() uses.
  template <typename T>
  static int64_t bytes(int64_t count) {
    return (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
  }

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

  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kAlignment = 256;

  char* memory_;
  int64_t used_ = 0;
};

}  // namespace hstu
