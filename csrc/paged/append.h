// Appends new keys and values to the pages of a cache.
#pragma once

#include "../common/pages.h"

namespace hstu {

struct AppendParams {
  PackedTensor k;  // [total_q, H, D]
  PackedTensor v;  // [total_q, H, D]
  BatchParams batch;
  PagedParams paged;  // written
  int heads = 0;
  DType dtype = DType::kFloat32;  // the dtype of k and v
  int element_bytes = 0;          // bytes of an element of k and v
};

// The slot of a row of the packed tensors: the offset of its K in the cache and of its scale in the
// scales, in elements. V is kv_stride and scale_kv_stride further. -1: the row has no slot, because
// it is a target, or because inconsistent offsets or ids give it no page of the sequence.
struct Slot {
  int64_t element = -1;
  int64_t scale = -1;
};

// An e4m3 cache holds x / scale for each row of a head, rounded to nearest, ties to even. The scale
// maps the largest finite magnitude of the row to kLargestE4m3. NaN and infinity are stored as NaN.
constexpr float kLargestE4m3 = 448.0f;

HSTU_HOST_DEVICE bool is_finite(float x) { return x - x == 0.0f; }

// NOTE: the quotient underflows to zero for the smallest magnitudes.
HSTU_HOST_DEVICE float e4m3_scale(float largest) {
  const float scale = largest / kLargestE4m3;
  return scale > 0.0f ? scale : 1.0f;
}

HSTU_HOST_DEVICE Slot find_slot(const AppendParams& params, int64_t row) {
  const BatchParams& batch = params.batch;
  int low = 0, high = batch.batch - 1;  // finds the last sequence that does not begin after the row
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
  if (r < 0 || r >= sequence.q_len || key < 0 || key >= sequence.history_end) return {};
  const PagedParams& paged = params.paged;
  const PageList list(paged, low);
  const int64_t n = paged.page_of(key);
  if (n >= list.count) return {};
  const int64_t page = paged.page_ids[list.first + n];
  if (page < 0 || page >= paged.num_pages) return {};
  const int64_t in_page = paged.slot_of(key);
  return {page * paged.page_stride + in_page * paged.slot_stride,
          page * paged.scale_page_stride + in_page * paged.scale_slot_stride};
}

void append_on_cpu(const AppendParams& params);

// Launches the kernel on `stream`. An e4m3 cache supports only 2-byte dtypes of k and v.
void append_on_gpu(const AppendParams& params, int multiprocessors, void* stream);

}  // namespace hstu
