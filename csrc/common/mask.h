// The mask: which keys each query row sees. This is the only place in C++ that compares a row with
// a column.
//
// Every mask is, for each row, the union of at most two half-open key intervals (a RowSpan). Only a
// `func` mask may have more intervals: then its RowSpan is a hull, and row_bits() is exact.
//
//   class Mask   row(r)                      the span of query row r
//                row_bits(r, k0)             keys k0 .. k0 + 63 as bits
//                kv_intervals(r0, r1)        keys that some row of [r0, r1) sees
//                q_intervals(k0, k1)         rows that see some key of [k0, k1)
//                classify(r0, r1, k0, k1)    whether a tile is empty, partial or full
//                estimate(r0, r1)            one interval around kv_intervals(), cheaper to compute
//                fully_visible(r0, r1)       keys that every row of [r0, r1) sees
//                summarize(r)                the SpanSummary of row r
//   tiles(...)   an interval list in tiles of a given size
//
// Rows are query rows 0 .. Lq-1 of the sequence; positions i = r + offset and keys j are absolute.
#pragma once

#include <climits>

#include "math.h"
#include "sequence.h"

namespace hstu {

struct Interval {
  int begin = 0;
  int end = 0;

  HSTU_HOST_DEVICE bool empty() const { return end <= begin; }
};

// Keys [a0, a1) and [b0, b1). An empty interval has end <= begin.
struct RowSpan {
  int a0 = 0, a1 = 0, b0 = 0, b1 = 0;
};

// A short list of disjoint intervals in ascending order.
template <int kCapacity>
struct IntervalList {
  int count = 0;
  Interval interval[kCapacity];

  // Appends `next`, which must not begin before the last interval does, and merges the two if they
  // meet.
  // NOTE: no index depends on run-time values, so that GPUs keep the list in registers.
  HSTU_HOST_DEVICE void append(Interval next) {
    if (next.empty()) return;
    bool merged = false;
    for (int n = 0; n < kCapacity; ++n) {
      if (n == count - 1 && next.begin <= interval[n].end) {
        if (next.end > interval[n].end) interval[n].end = next.end;
        merged = true;
      } else if (n == count && !merged) {
        interval[n] = next;
      }
    }
    if (!merged) ++count;
  }
};

using KeyIntervals = IntervalList<2>;
using RowIntervals = IntervalList<4>;

// The tiles of `size` that the intervals touch.
template <int kCapacity>
HSTU_HOST_DEVICE IntervalList<kCapacity> tiles(const IntervalList<kCapacity>& list, int size) {
  IntervalList<kCapacity> result;
  for (int n = 0; n < kCapacity; ++n) {
    if (n >= list.count) break;
    result.append({list.interval[n].begin / size, ceil_div(list.interval[n].end, size)});
  }
  return result;
}

enum class TileKind : int { kEmpty, kPartial, kFull };

// Union (`hull`) and intersection (`fully_visible`) of the keys visible to a tile of rows. It is
// computed once, and then classifies any tile of keys as empty, partial or full.
struct SpanSummary {
  // No row sees a key outside both intervals.
  Interval hull[2] = {{INT_MAX, 0}, {INT_MAX, 0}};
  // Every row sees all keys inside either interval.
  Interval fully_visible[2] = {{0, INT_MAX}, {0, INT_MAX}};

  HSTU_HOST_DEVICE void set_hull(const KeyIntervals& keys) {
    for (int n = 0; n < 2; ++n) {
      if (n < keys.count) hull[n] = keys.interval[n];
    }
  }

  // Adds the rows that `other` summarizes.
  HSTU_HOST_DEVICE void add(const SpanSummary& other) {
    for (int n = 0; n < 2; ++n) {
      if (other.hull[n].begin < hull[n].begin) hull[n].begin = other.hull[n].begin;
      if (other.hull[n].end > hull[n].end) hull[n].end = other.hull[n].end;
      if (other.fully_visible[n].begin > fully_visible[n].begin) {
        fully_visible[n].begin = other.fully_visible[n].begin;
      }
      if (other.fully_visible[n].end < fully_visible[n].end) {
        fully_visible[n].end = other.fully_visible[n].end;
      }
    }
  }

  // May return kPartial for an empty or full tile: where the two intervals of a row meet inside the
  // tile, or where the hull holds keys that no row sees. kEmpty and kFull are always correct.
  HSTU_HOST_DEVICE TileKind classify(int k0, int k1) const {
    bool touched = false, full = false;
    for (int n = 0; n < 2; ++n) {
      touched |= hull[n].begin < k1 && k0 < hull[n].end;
      full |= fully_visible[n].begin <= k0 && k1 <= fully_visible[n].end;
    }
    return full ? TileKind::kFull : (touched ? TileKind::kPartial : TileKind::kEmpty);
  }
};

// Returns the parameters of a mask that is not given row by row, so that the compiler leaves out
// the code for masks that are.
HSTU_HOST_DEVICE MaskParams closed_form(MaskParams params) {
  params.row_spans = nullptr;
  params.func = nullptr;
  return params;
}

class Mask {
 public:
  HSTU_HOST_DEVICE Mask(const MaskParams& params, const Sequence& sequence, int head)
      : params_(params), sequence_(sequence) {
    if (params.row_spans) row_spans_ = params.row_spans + head * params.row_spans_head_stride;
    if (params.func) func_ = params.func + head * params.func_head_stride;
  }

  // True if the spans are given row by row and have no closed form.
  HSTU_HOST_DEVICE bool arbitrary() const { return row_spans_ || func_; }

  HSTU_HOST_DEVICE RowSpan row(int r) const {
    const int i = r + sequence_.offset;
    if (i < 0) return {};
    if (row_spans_) return given_span(r);
    if (func_) return func_hull(r);

    const int h = sequence_.history_end;
    if (i < sequence_.contexts) return {0, h, 0, 0};
    const int low = window_begin(i);
    if (i < h) return {low, window_end(i), 0, 0};
    return {low, h, group_begin(i), i + 1};
  }

  // Bit n is set if row r sees key k0 + n, n < 64.
  HSTU_HOST_DEVICE uint64_t row_bits(int r, int k0) const {
    if (!spans_are_exact()) return func_bits(r, k0);
    const RowSpan span = row(r);
    return bits({span.a0, span.a1}, k0) | bits({span.b0, span.b1}, k0);
  }

  // Keys outside the result are invisible to all rows of [r0, r1). For masks in closed form every
  // key inside is visible to one of them; for arbitrary masks it is a hull.
  HSTU_HOST_DEVICE KeyIntervals kv_intervals(int r0, int r1) const {
    KeyIntervals result;
    if (arbitrary()) {
      Interval a, b;
      for (int r = r0; r < r1; ++r) {
        const RowSpan span = row(r);
        widen(a, {span.a0, span.a1});
        widen(b, {span.b0, span.b1});
      }
      const bool a_first = !a.empty() && (b.empty() || a.begin <= b.begin);
      result.append(a_first ? a : b);
      result.append(a_first ? b : a);
      return result;
    }
    const Positions p = positions(r0, r1);
    Interval history, group;  // visible keys before and after history_end
    if (!p.context.empty()) widen(history, {0, sequence_.history_end});
    if (!p.history.empty()) widen(history, {lowest(p.history), window_end(p.history.end - 1)});
    if (!p.target.empty()) {
      widen(history, {window_begin(p.target.begin), sequence_.history_end});
      group = {group_begin(p.target.begin), p.target.end};
    }
    result.append(history);
    result.append(group);
    return result;
  }

  // An estimate of the keys that rows [r0, r1) see, in few instructions.
  HSTU_HOST_DEVICE Interval estimate(int r0, int r1) const {
    if (arbitrary()) return {0, sequence_.k_len};
    const int first = r0 + sequence_.offset;
    const int left = params_.window_left;
    const int right = params_.window_right;
    const bool is_windowed = left >= 0 && params_.min_full_attn_seq_len <= 0;
    int end = right < 0 ? sequence_.k_len : r1 + sequence_.offset + right;
    if (first < sequence_.contexts) end = larger(end, sequence_.history_end);
    return clip(is_windowed ? first - left : 0, end);
  }

  // Rows outside the result see no key of [k0, k1). For masks in closed form every row inside sees
  // at least one of these keys; for arbitrary masks the result is all rows, and classify() finds
  // the empty tiles.
  HSTU_HOST_DEVICE RowIntervals q_intervals(int k0, int k1) const {
    RowIntervals result;
    if (k1 > sequence_.k_len) k1 = sequence_.k_len;
    if (k1 <= k0) return result;
    if (arbitrary()) {
      append_rows(result, {0, sequence_.k_len});
      return result;
    }
    const int c = sequence_.contexts;
    const int h = sequence_.history_end;
    const int full = full_begin();
    const int left = params_.window_left;
    const int right = params_.window_right;
    if (k0 < h) {
      append_rows(result, {0, c});
      // History rows: the window's end passes k0, and its begin has not passed k1.
      const int first = larger(c, right < 0 ? 0 : k0 - right);
      const int last = left < 0 ? full : smaller(full, larger(k1, c) + left);
      append_rows(result, {first, last});
      append_rows(result, {larger(first, full), h});
    }
    // A window of 0 hides the whole history from targets.
    const int low = window_begin(h);
    const bool targets_see_history = low < h && k0 < h && k1 > low;
    if (targets_see_history) {
      append_rows(result, {h, sequence_.k_len});
    } else if (k1 > h) {
      const int group = params_.target_group_size;
      const int last_group_end = h + ((k1 - 1 - h) / group + 1) * group;
      append_rows(result, {larger(k0, h), smaller(last_group_end, sequence_.k_len)});
    }
    return result;
  }

  // Keys that all rows of [r0, r1) see, in at most two intervals; only for masks in closed form.
  HSTU_HOST_DEVICE void fully_visible(int r0, int r1, Interval (&result)[2]) const {
    const int h = sequence_.history_end;
    const Positions p = positions(r0, r1);
    Interval common = {0, r0 + sequence_.offset < 0 ? 0 : sequence_.k_len};
    result[1] = {};
    if (!p.context.empty()) common = intersect(common, {0, h});
    if (!p.history.empty()) {
      const int last_windowed = smaller(p.history.end, full_begin()) - 1;
      const int begin = last_windowed >= p.history.begin ? window_begin(last_windowed) : 0;
      common = intersect(common, {begin, window_end(p.history.begin)});
    }
    if (!p.target.empty()) {
      common = intersect(common, {window_begin(h), h});
      if (p.context.empty() && p.history.empty()) {
        result[1] = {group_begin(p.target.end - 1), p.target.begin + 1};
      }
    }
    result[0] = common;
  }

  HSTU_HOST_DEVICE SpanSummary summarize(int r) const {
    const RowSpan span = row(r);
    const Interval keys[2] = {{span.a0, span.a1}, {span.b0, span.b1}};
    SpanSummary summary;
    for (int n = 0; n < 2; ++n) {
      if (!keys[n].empty()) summary.hull[n] = keys[n];
      summary.fully_visible[n] = n == 0 || spans_are_exact() ? keys[n] : Interval{};
    }
    return summary;
  }

  // Exact for every mask, except that a tile of a `func` mask with more than two intervals may be
  // called partial although it is full or empty.
  HSTU_HOST_DEVICE TileKind classify(int r0, int r1, int k0, int k1) const {
    if (arbitrary()) return classify_by_row(r0, r1, k0, k1);
    const KeyIntervals visible = kv_intervals(r0, r1);
    bool touched = false;
    for (int n = 0; n < 2; ++n) {  // unused intervals are empty
      touched |= visible.interval[n].begin < k1 && k0 < visible.interval[n].end;
    }
    if (!touched) return TileKind::kEmpty;
    const bool is_full = r0 + sequence_.offset >= 0 && every_row_sees(positions(r0, r1), k0, k1);
    return is_full ? TileKind::kFull : TileKind::kPartial;
  }

 private:
  // The absolute positions of a range of rows by kind of token.
  struct Positions {
    Interval context, history, target;
  };

  // False if the second interval of a row() is only a hull.
  HSTU_HOST_DEVICE bool spans_are_exact() const { return !func_ || params_.func_length <= 3; }

  static HSTU_HOST_DEVICE Interval intersect(Interval x, Interval y) {
    return {larger(x.begin, y.begin), smaller(x.end, y.end)};
  }

  // Grows `hull` to include `other`.
  static HSTU_HOST_DEVICE void widen(Interval& hull, Interval other) {
    if (other.empty()) return;
    if (hull.empty()) {
      hull = other;
    } else {
      hull = {smaller(hull.begin, other.begin), larger(hull.end, other.end)};
    }
  }

  static HSTU_HOST_DEVICE uint64_t bits(Interval keys, int k0) {
    const int begin = larger(keys.begin - k0, 0);
    const int end = smaller(keys.end - k0, 64);
    if (begin >= end) return 0;
    const uint64_t below_end = end == 64 ? ~uint64_t{0} : (uint64_t{1} << end) - 1;
    return below_end & ~((uint64_t{1} << begin) - 1);
  }

  HSTU_HOST_DEVICE Interval clip(int begin, int end) const {
    return {larger(begin, 0), smaller(end, sequence_.k_len)};
  }

  HSTU_HOST_DEVICE void append_rows(RowIntervals& list, Interval positions) const {
    list.append({larger(positions.begin - sequence_.offset, 0),
                 smaller(positions.end - sequence_.offset, sequence_.q_len)});
  }

  HSTU_HOST_DEVICE Positions positions(int r0, int r1) const {
    const Interval all = {larger(r0 + sequence_.offset, 0), r1 + sequence_.offset};
    return {intersect(all, {0, sequence_.contexts}),
            intersect(all, {sequence_.contexts, sequence_.history_end}),
            intersect(all, {sequence_.history_end, sequence_.k_len})};
  }

  // First position whose row ignores the window; history_end if no history row does.
  HSTU_HOST_DEVICE int full_begin() const {
    const int h = sequence_.history_end;
    if (params_.min_full_attn_seq_len <= 0) return h;
    return larger(h - params_.min_full_attn_seq_len, 0);
  }

  // First key of the window of position i. A target has the window of the first target.
  HSTU_HOST_DEVICE int window_begin(int i) const {
    const int h = sequence_.history_end;
    const bool full = params_.min_full_attn_seq_len > 0 && i >= full_begin();
    if (params_.window_left < 0 || full) return 0;
    const int low = smaller(i, h) - params_.window_left;
    return low < larger(sequence_.contexts, 1) ? 0 : low;
  }

  // End of the window of position i, which is not a target.
  HSTU_HOST_DEVICE int window_end(int i) const {
    const int k_len = sequence_.k_len;
    const int right = params_.window_right;
    return right < 0 || right >= k_len - i ? k_len : i + right + 1;
  }

  // First key of the target group of position i >= h.
  HSTU_HOST_DEVICE int group_begin(int i) const {
    const int h = sequence_.history_end;
    return h + (i - h) / params_.target_group_size * params_.target_group_size;
  }

  // The lowest window_begin() of a range of history rows: it grows with the position up to the rows
  // that ignore the window.
  HSTU_HOST_DEVICE int lowest(Interval history) const {
    return smaller(window_begin(history.begin), window_begin(history.end - 1));
  }

  HSTU_HOST_DEVICE bool every_row_sees(const Positions& p, int k0, int k1) const {
    const int h = sequence_.history_end;
    if (!p.context.empty() && k1 > h) return false;
    if (!p.history.empty()) {
      if (k1 > window_end(p.history.begin)) return false;
      const int last_windowed = smaller(p.history.end, full_begin()) - 1;
      if (last_windowed >= p.history.begin && k0 < window_begin(last_windowed)) return false;
    }
    if (!p.target.empty()) {
      // The group of the last row begins last, and the keys of the first row end first.
      const int low = window_begin(h);
      const int own_begin = group_begin(p.target.end - 1);
      const int first_key = k0 < h ? low : own_begin;
      const int last_key = k1 > h ? p.target.begin + 1 : h;
      if (k0 < first_key || k1 > last_key) return false;
      if (k0 < h && k1 > h && own_begin > h) return false;
    }
    return true;
  }

  HSTU_HOST_DEVICE TileKind classify_by_row(int r0, int r1, int k0, int k1) const {
    bool any = false;
    bool all = spans_are_exact();
    for (int r = r0; r < r1; ++r) {
      const RowSpan span = row(r);
      const Interval a = intersect({span.a0, span.a1}, {k0, k1});
      const Interval b = intersect({span.b0, span.b1}, {k0, k1});
      any |= !a.empty() || !b.empty();
      Interval both = a;
      const bool connected = a.empty() || b.empty() || (b.begin <= a.end && a.begin <= b.end);
      widen(both, b);
      all &= connected && both.begin == k0 && both.end == k1;
    }
    return !any ? TileKind::kEmpty : (all ? TileKind::kFull : TileKind::kPartial);
  }

  HSTU_HOST_DEVICE RowSpan given_span(int r) const {
    const int32_t* span = row_spans_ + (sequence_.q_begin + r) * params_.row_spans_row_stride;
    const Interval a = clip(span[0], span[1]);
    const Interval b = clip(span[2], span[3]);
    return {a.begin, a.end, b.begin, b.end};
  }

  // Interval n of the func of row r: n = 0 is [0, F0), n > 0 is [F(2n-1), F(2n)).
  HSTU_HOST_DEVICE Interval func_interval(int r, int n) const {
    const int32_t* entry = func_ + sequence_.q_begin + r;
    const int64_t stride = params_.func_entry_stride;
    Interval keys =
        n == 0 ? clip(0, entry[0]) : clip(entry[(2 * n - 1) * stride], entry[2 * n * stride]);
    if (params_.func_causal) keys.end = smaller(keys.end, r + sequence_.offset + 1);
    return keys;
  }

  HSTU_HOST_DEVICE RowSpan func_hull(int r) const {
    const Interval a = func_interval(r, 0);
    Interval b;
    for (int n = 1; n <= params_.func_length / 2; ++n) widen(b, func_interval(r, n));
    return {a.begin, a.end, b.begin, b.end};
  }

  HSTU_HOST_DEVICE uint64_t func_bits(int r, int k0) const {
    if (r + sequence_.offset < 0) return 0;
    uint64_t result = 0;
    for (int n = 0; n <= params_.func_length / 2; ++n) result |= bits(func_interval(r, n), k0);
    return result;
  }

  MaskParams params_;
  Sequence sequence_;
  const int32_t* row_spans_ = nullptr;
  const int32_t* func_ = nullptr;
};

}  // namespace hstu
