// Keys and values in pages: the tiles that they make, and copies of them.
//
// History lies in pages and targets in packed rows, so a tile holds keys of one kind: the first
// target begins a tile of its own. Tiles are counted in columns, which are keys but for the gap
// between the end of the history and that tile.
#pragma once

#include "../common/mask.h"
#include "../common/pages.h"
#include "tensor_map.h"

namespace hstu::sm90 {

template <int kKeys>
struct PaddedKeys {
  int history_end;

  HSTU_DEVICE explicit PaddedKeys(const Sequence& sequence) : history_end(sequence.history_end) {}

  HSTU_DEVICE int first_target() const { return (history_end + kKeys - 1) / kKeys * kKeys; }
  HSTU_DEVICE bool is_target(int padded_key) const { return padded_key >= first_target(); }
  HSTU_DEVICE int key(int padded_key) const {
    return is_target(padded_key) ? padded_key - first_target() + history_end : padded_key;
  }
  // Where keys that end with `key` end.
  HSTU_DEVICE int padded_end(int key) const {
    return key > history_end ? key - history_end + first_target() : key;
  }
  // NOTE: keys past those of the sequence are nobody's, and would be too many to count on.
  HSTU_DEVICE Interval to_padded(Interval keys, int k_len) const {
    const int begin = min(keys.begin, k_len);
    return {begin < history_end ? begin : begin - history_end + first_target(),
            padded_end(min(keys.end, k_len))};
  }
  // Of what is seen of 64 keys from column `first` on, what the tile has.
  HSTU_DEVICE uint64_t without_gap(uint64_t visible, int first) const {
    const int count = is_target(first) ? 64 : history_end - first;
    if (count >= 64) return visible;
    return count <= 0 ? 0 : visible & ((uint64_t{1} << count) - 1);
  }
};

// How copies find a page: rows of [num_pages, 2, page_size] in the tensor map's order.
struct PageMap {
  CUtensorMap map;  // for boxes of a page's rows, or a tile's where they are fewer
  int page_rows;    // from a page to the next
  int value_rows;   // from a page's keys to its values
};

template <int kHeadDim>
PageMap make_page_map(const PagedParams& paged, int head_dim, int heads, int keys, DType dtype) {
  const PackedTensor rows = {const_cast<void*>(paged.kv_cache), paged.slot_stride,
                             paged.head_stride, head_dim};
  PageMap pages;
  const int box_rows = std::min(paged.page_size, keys);
  pages.map = paged.scales ? make_quantized_map<kHeadDim>(rows, heads, box_rows)
                           : make_ragged_map<kHeadDim>(rows, heads, box_rows, dtype);
  pages.page_rows = static_cast<int>(paged.page_stride / paged.slot_stride);
  pages.value_rows = static_cast<int>(paged.kv_stride / paged.slot_stride);
  return pages;
}

// The page ids of 32 pages in a row, one in each lane of a warp that copies.
class PageWindow {
 public:
  // To be called before others, by all lanes: which sequence's pages.
  HSTU_DEVICE void enter(const PageList& list) {
    if (list.first == list_.first && list.count == list_.count) return;
    list_ = list;
    first_ = INT_MIN;
  }
  // Makes sure of pages [begin, end), no more than 32. By all lanes.
  HSTU_DEVICE void show(const PagedParams& paged, int begin, int end) {
    if (begin >= first_ && end <= first_ + 32) return;
    first_ = begin;
    const int n = begin + static_cast<int>(threadIdx.x) % 32;
    id_ = n < list_.count ? static_cast<int>(list_.page(paged, n)) : -1;
  }
  // The id of a page that is shown; -1: the sequence has none. By all lanes.
  HSTU_DEVICE int page(int n) const { return __shfl_sync(0xffffffff, id_, n - first_); }

 private:
  PageList list_;
  int first_ = INT_MIN;
  int id_ = -1;
};

// Starts copying a tile of kKeys rows of history from key `first` on to shared memory; those past
// its end, or in no page, become zeros. By a warp: a lane takes a box.
template <PagePart kPart, int kKeys, int kHeadDim, typename Element>
HSTU_DEVICE void start_copy_pages(const PagedParams& paged, const PageMap& pages,
                                  PageWindow& window, const Sequence& sequence, int head, int first,
                                  Element* to, cutlass::arch::ClusterTransactionBarrier& barrier) {
  constexpr int kPanels = kHeadDim / kPanel<kHeadDim>;
  constexpr int kFar = kRaggedRows;
  const int page_size = paged.page_size;
  const int box_rows = min(page_size, kKeys);
  const int boxes = kKeys / box_rows * kPanels;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  window.show(paged, first / page_size, (first + kKeys - 1) / page_size + 1);
  for (int n = 0; n < boxes; n += 32) {
    const int box = min(n + lane, boxes - 1);
    const int row = box / kPanels * box_rows;  // of the tile
    const int panel = box % kPanels;
    const int key = first + row;
    const int page = key / page_size;
    const int id = window.page(page);
    // NOTE: a count of 0 puts all rows behind the end.
    const int count = id < 0 ? 0 : clamp(sequence.history_end - page * page_size, 0, page_size);
    const int begin =
        max(id, 0) * pages.page_rows + (kPart == PagePart::kValues ? pages.value_rows : 0);
    if (n + lane >= boxes) continue;
    cute::SM90_TMA_LOAD_5D::copy(&pages.map, reinterpret_cast<uint64_t*>(&barrier),
                                 static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                 to + (panel * kKeys + row) * kPanel<kHeadDim>,
                                 panel * kPanel<kHeadDim>, kFar - count + key % page_size, head,
                                 begin + count, kFar);
  }
}

// The packed rows of a sequence's targets.
HSTU_DEVICE RaggedRows target_rows(const Sequence& sequence, int head) {
  const TargetRows rows(sequence);
  return {rows.begin, rows.count, head};
}

}  // namespace hstu::sm90
