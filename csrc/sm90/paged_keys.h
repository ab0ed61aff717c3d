// Keys and values in pages: how a sequence's pages are found and copied. Key tiles consist of
// padded keys, see common/pages.h.
#pragma once

#include "../common/pages.h"
#include "../scheduler/work_list.h"
#include "tensor_map.h"

namespace hstu::sm90 {

// The tensor map of the cache, whose rows are [num_pages, 2, page_size], and distances in rows.
struct PageMap {
  CUtensorMap map;  // a box has the rows of a page or of a copy, whichever are fewer
  int page_rows;    // from one page to the next
  int value_rows;   // from the keys of a page to its values
};

template <int kHeadDim>
PageMap make_page_map(const PagedParams& paged, int head_dim, int heads, int keys, DType dtype) {
  const PackedTensor rows = {const_cast<void*>(paged.kv_cache), paged.slot_stride,
                             paged.head_stride, head_dim};
  PageMap pages;
  const int box_rows = std::min(paged.page_size, keys);
  const bool is_converted = paged.scales && dtype != DType::kFloat8E4M3;
  pages.map = is_converted ? make_quantized_map<kHeadDim>(rows, heads, box_rows)
                           : make_ragged_map<kHeadDim>(rows, heads, box_rows, dtype);
  pages.page_rows = static_cast<int>(paged.page_stride / paged.slot_stride);
  pages.value_rows = static_cast<int>(paged.kv_stride / paged.slot_stride);
  return pages;
}

// The ids of 32 consecutive pages of a sequence, one in each lane of a warp that copies. The ids of
// the next 32 are loaded in advance: key tiles ascend, so that no copy waits for that load. All
// methods are called by all lanes.
class PageWindow {
 public:
  // Chooses the sequence. Called before the other methods.
  HSTU_DEVICE void set_sequence(const PageList& list) {
    if (list.first == list_.first && list.count == list_.count) return;
    list_ = list;
    first_ = kNone;
  }
  // Loads the ids of pages [begin, end), at most 32, unless the lanes have them.
  HSTU_DEVICE void load_ids(const PagedParams& paged, int begin, int end) {
    if (begin >= first_ && end <= first_ + 32) return;
    if (begin != first_ + 32) next_ = load(paged, begin);
    const int64_t id = clamp(static_cast<int>(next_), 0, paged.num_pages - 1);
    id_ = begin + lane() < list_.count ? static_cast<int>(id) : -1;
    next_ = load(paged, begin + 32);
    first_ = begin;
  }
  // The id of page n, which load_ids() has loaded; -1: the sequence has no such page.
  HSTU_DEVICE int page(int n) const { return __shfl_sync(0xffffffff, id_, n - first_); }

 private:
  static constexpr int kNone = INT_MIN / 2;  // first_ without a window; may be added to

  static HSTU_DEVICE int lane() { return static_cast<int>(threadIdx.x) % 32; }
  // Loads the id of page begin + lane. NOTE: nothing may be computed from the id here, because that
  // would wait for the load.
  HSTU_DEVICE uint32_t load(const PagedParams& paged, int begin) const {
    const int n = begin + lane();
    return n < list_.count ? paged.page_ids.low_word(list_.first + n) : 0;
  }

  PageList list_;
  int first_ = kNone;
  int id_ = -1;
  uint32_t next_ = 0;  // the id of page first_ + 32 + lane
};

// Starts copying a tile of kKeys rows of history, from key `first` on, to shared memory. Rows past
// the end of the history, or in no page, become zeros. Called by a warp, each lane of which copies
// at most one box.
template <PagePart kPart, int kKeys, int kHeadDim, typename Element>
HSTU_DEVICE void start_copy_pages(const PagedParams& paged, const PageMap& pages,
                                  PageWindow& window, const Sequence& sequence, int head, int first,
                                  Element* to, cutlass::arch::ClusterTransactionBarrier& barrier) {
  constexpr int kPanels = kHeadDim / kPanel<kHeadDim>;
  constexpr int kFar = kRaggedRows;
  static_assert(kKeys / kSmallestPage * kPanels <= 32, "a lane has at most one box");
  const int lane = static_cast<int>(threadIdx.x) % 32;
  window.load_ids(paged, paged.page_of(first), paged.page_of(first + kKeys - 1) + 1);
  const int row = lane / kPanels * min(paged.page_size, kKeys);  // in the tile
  const int panel = lane % kPanels;
  const int key = first + row;
  const int page = paged.page_of(key);
  const int id = window.page(page);
  if (row >= kKeys) return;
  // NOTE: with a count of 0, all rows of the box are past the end.
  const int count =
      id < 0 ? 0 : clamp(sequence.history_end - (page << paged.page_size_log2), 0, paged.page_size);
  const int begin =
      max(id, 0) * pages.page_rows + (kPart == PagePart::kValues ? pages.value_rows : 0);
  cute::SM90_TMA_LOAD_5D::copy(&pages.map, reinterpret_cast<uint64_t*>(&barrier),
                               static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                               to + (panel * kKeys + row) * kPanel<kHeadDim>,
                               panel * kPanel<kHeadDim>, kFar - count + paged.slot_of(key), head,
                               begin + count, kFar);
}

// Returns in all lanes of a warp the value that one lane has.
template <typename Value>
HSTU_DEVICE Value broadcast_from_lane(Value value, int lane) {
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
    const SequenceTile last =
        broadcast_from_lane(SequenceTile{sequence, b, static_cast<int>(tile)}, owner);
    const PageList last_pages = broadcast_from_lane(list, owner);
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
