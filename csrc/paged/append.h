// New keys and values into the pages of a cache.
#pragma once

#include "../common/pages.h"

namespace hstu {

struct AppendParams {
  PackedTensor k;  // [total_q, H, D]
  PackedTensor v;  // [total_q, H, D]
  BatchParams batch;
  PagedParams paged;  // written
  int heads = 0;
  int element_bytes = 0;
};

// Where row `row` of the packed tensors goes: K to element `k` of the cache, V by kv_stride
// further. -1: nowhere, since it is a target or, where offsets or ids lie, none of a page of the
// sequence.
HSTU_HOST_DEVICE int64_t find_slot(const AppendParams& params, int64_t row) {
  const BatchParams& batch = params.batch;
  int low = 0, high = batch.batch - 1;  // the last sequence that does not begin behind the row
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (batch.cu_seqlens_q[middle] <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const Sequence sequence = load_sequence(batch, low);
  const int64_t r = row - sequence.q_begin;
  const int64_t key = r + sequence.offset;
  if (r < 0 || r >= sequence.q_len || key < 0 || key >= sequence.history_end) return -1;
  const PagedParams& paged = params.paged;
  const PageList list(paged, low);
  const int64_t n = key / paged.page_size;
  if (n >= list.count) return -1;
  const int64_t page = paged.page_ids[list.first + n];
  if (page < 0 || page >= paged.num_pages) return -1;
  return page * paged.page_stride + key % paged.page_size * paged.slot_stride;
}

// The kernel, on the stream of the call; see append.cu.
void append_on_gpu(const AppendParams& params, int multiprocessors, void* stream);

}  // namespace hstu
