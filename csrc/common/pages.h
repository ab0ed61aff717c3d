// Finds the keys and values of a sequence in a paged cache.
#pragma once

#include "mask.h"

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

// Converts between keys and padded keys of a sequence, for tiles of kKeys keys.
//
// The history is in pages and targets are in packed rows, so a key tile holds keys of one kind: the
// first target begins a new tile. Padded keys are key indices that count the gap between the end of
// the history and the first target.
template <int kKeys>
struct PaddedKeys {
  int history_end;

  HSTU_HOST_DEVICE explicit PaddedKeys(const Sequence& sequence)
      : history_end(sequence.history_end) {}

  HSTU_HOST_DEVICE int first_target() const { return round_up(history_end, kKeys); }
  HSTU_HOST_DEVICE bool is_target(int padded_key) const { return padded_key >= first_target(); }
  HSTU_HOST_DEVICE int key(int padded_key) const {
    return is_target(padded_key) ? padded_key - first_target() + history_end : padded_key;
  }
  // Converts the end of an interval of keys.
  HSTU_HOST_DEVICE int padded_end(int key) const {
    return key > history_end ? key - history_end + first_target() : key;
  }
  // NOTE: intervals may end at INT_MAX; the limit k_len avoids an overflow.
  HSTU_HOST_DEVICE Interval to_padded(Interval keys, int k_len) const {
    const int begin = smaller(keys.begin, k_len);
    return {begin < history_end ? begin : begin - history_end + first_target(),
            padded_end(smaller(keys.end, k_len))};
  }
  // Clears the bits of padded keys in the gap; bit n is for padded key `first` + n.
  HSTU_HOST_DEVICE uint64_t without_gap(uint64_t visible, int first) const {
    const int count = is_target(first) ? 64 : history_end - first;
    if (count >= 64) return visible;
    return count <= 0 ? 0 : visible & ((uint64_t{1} << count) - 1);
  }
};

}  // namespace hstu
