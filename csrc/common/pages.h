// Finds the keys and values of a sequence in a paged cache.
#pragma once

#include "sequence.h"

namespace hstu {

// The place of keys and values. kPacked: all are in packed rows. kPaged: the history is in
// pages, and targets are in the last packed rows of the sequence's queries.
enum class KeySource { kPacked, kPaged };

enum class PagePart { kKeys, kValues };

constexpr int kSmallestPage = 16;  // rows

// The entries of page_ids that belong to a sequence.
struct PageList {
  int64_t first = 0;
  int count = 0;

  PageList() = default;
  // NOTE: inconsistent offsets are clamped, so that no access leaves the tensor.
  HSTU_HOST_DEVICE PageList(const PagedParams& paged, int b) {
    first = clamp(paged.page_offsets[b], 0, paged.num_page_ids);
    const int64_t end = clamp(paged.page_offsets[b + 1], first, paged.num_page_ids);
    count = static_cast<int>(clamp(end - first, 0, 1 << 30));
  }
  // The id of page n of the sequence, n < count, clamped to the pages of the cache.
  HSTU_HOST_DEVICE int64_t page(const PagedParams& paged, int n) const {
    return clamp(paged.page_ids[first + n], 0, paged.num_pages - 1);
  }
};

// The packed rows of a sequence's targets.
struct TargetRows {
  int64_t begin;
  int count;

  HSTU_HOST_DEVICE explicit TargetRows(const Sequence& sequence) {
    const int targets = sequence.k_len - sequence.history_end;
    count = targets < sequence.q_len ? targets : sequence.q_len;
    begin = sequence.q_begin + sequence.q_len - count;
  }
};

}  // namespace hstu
