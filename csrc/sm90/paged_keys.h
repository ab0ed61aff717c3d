// Keys and values in pages: how they are counted, where a sequence's pages are, and how they are
// copied.
//
// The history is in pages and targets are in packed rows, so a key tile holds keys of one kind: the
// first target begins a tile of its own. Padded keys count this gap between the end of the history
// and the first target, and key tiles consist of padded keys.
#pragma once

#include "../common/mask.h"
#include "../common/pages.h"
#include "../scheduler/work_list.h"
#include "tensor_map.h"

namespace hstu::sm90 {

// Converts between keys and padded keys of a sequence, for tiles of kKeys keys.
template <int kKeys>
struct PaddedKeys {
  int history_end;

  HSTU_DEVICE explicit PaddedKeys(const Sequence& sequence) : history_end(sequence.history_end) {}

  HSTU_DEVICE int first_target() const { return round_up(history_end, kKeys); }
  HSTU_DEVICE bool is_target(int padded_key) const { return padded_key >= first_target(); }
  HSTU_DEVICE int key(int padded_key) const {
    return is_target(padded_key) ? padded_key - first_target() + history_end : padded_key;
  }
  // The end of padded keys, from the end of keys.
  HSTU_DEVICE int padded_end(int key) const {
    return key > history_end ? key - history_end + first_target() : key;
  }
  // NOTE: intervals may end at INT_MAX; clamping to k_len avoids an overflow.
  HSTU_DEVICE Interval to_padded(Interval keys, int k_len) const {
    const int begin = min(keys.begin, k_len);
    return {begin < history_end ? begin : begin - history_end + first_target(),
            padded_end(min(keys.end, k_len))};
  }
  // Clears the bits of padded keys in the gap; bit n is for padded key `first` + n.
  HSTU_DEVICE uint64_t without_gap(uint64_t visible, int first) const {
    const int count = is_target(first) ? 64 : history_end - first;
    if (count >= 64) return visible;
    return count <= 0 ? 0 : visible & ((uint64_t{1} << count) - 1);
  }
};

// The tensor map of the cache, whose rows are [num_pages, 2, page_size], and distances in rows.
struct PageMap {
  CUtensorMap map;  // a box has the rows of a page or of a tile, whichever are fewer
  int page_rows;    // from one page to the next
  int value_rows;   // from the keys of a page to its values
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

// The ids of 32 consecutive pages of a sequence, one in each lane of a warp that copies. All
// methods are called by all lanes.
class PageWindow {
 public:
  // Chooses the sequence. Called before the other methods.
  HSTU_DEVICE void enter(const PageList& list) {
    if (list.first == list_.first && list.count == list_.count) return;
    list_ = list;
    first_ = INT_MIN;
  }
  // Loads the ids of pages [begin, end), at most 32, unless the lanes have them.
  HSTU_DEVICE void show(const PagedParams& paged, int begin, int end) {
    if (begin >= first_ && end <= first_ + 32) return;
    first_ = begin;
    const int n = begin + static_cast<int>(threadIdx.x) % 32;
    id_ = n < list_.count ? static_cast<int>(list_.page(paged, n)) : -1;
  }
  // The id of page n, which show() has loaded; -1: the sequence has no such page.
  HSTU_DEVICE int page(int n) const { return __shfl_sync(0xffffffff, id_, n - first_); }

 private:
  PageList list_;
  int first_ = INT_MIN;
  int id_ = -1;
};

// Starts copying a tile of kKeys rows of history, from key `first` on, to shared memory. Rows past
// the end of the history, or in no page, become zeros. Called by a warp, each lane of which copies
// a box.
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
    // NOTE: with a count of 0, all rows of the box are past the end.
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

// Returns in all lanes of a warp the value that one lane has.
template <typename Value>
HSTU_DEVICE Value of_lane(Value value, int lane) {
  static_assert(sizeof(Value) % sizeof(uint32_t) == 0);
  uint32_t words[sizeof(Value) / sizeof(uint32_t)];
  memcpy(words, &value, sizeof(Value));
#pragma unroll
  for (uint32_t& word : words) word = __shfl_sync(0xffffffff, word, lane);
  memcpy(&value, words, sizeof(Value));
  return value;
}

// find_row_tile() for a warp, which also finds the pages of the sequence. `found` has no rows if
// the result is false. NOTE: each lane looks at one sequence, because the loads of a binary search
// would wait for each other, which takes long in calls with few work tiles.
HSTU_DEVICE bool find_paged_tile(const ForwardParams& params, int tile_index, int size,
                                 SequenceTile& found, PageList& pages) {
  const BatchParams& batch = params.batch;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  bool exists = false;
  if (lane == 0) found = {};  // NOTE: inconsistent offsets may begin behind the tile
  for (int first = 0; first < batch.batch; first += 32) {
    const int b = min(first + lane, batch.batch - 1);
    const Sequence sequence = load_sequence(batch, b);
    const PageList list(params.paged, b);
    const int64_t tile = tile_index - first_tile(sequence.q_begin, b, size);
    // The tile belongs to the last sequence whose first tile is not behind it.
    const unsigned begun = __ballot_sync(0xffffffff, first + lane < batch.batch && tile >= 0);
    if (begun == 0) break;
    const int owner = 31 - __clz(begun);
    const SequenceTile last = of_lane(SequenceTile{sequence, b, static_cast<int>(tile)}, owner);
    const PageList last_pages = of_lane(list, owner);
    exists = int64_t{last.index} * size < last.sequence.q_len;
    if (lane == 0) {
      found = exists ? last : SequenceTile{};
      pages = last_pages;
    }
    if (owner < 31) break;
  }
  return exists;
}

// The packed rows of the targets of a sequence.
HSTU_DEVICE RaggedRows target_rows(const Sequence& sequence, int head) {
  const TargetRows rows(sequence);
  return {rows.begin, rows.count, head};
}

}  // namespace hstu::sm90
