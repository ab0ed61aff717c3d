// Shared-memory layouts and copies of rows for the forward and the backward.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../common/e4m3.h"
#include "../common/opaque.h"
#include "../common/pages.h"
#include "../common/ptx.h"
#include "tile_config.h"

namespace hstu::sm80 {

// ------------------------------------------------------------------------- shared-memory layouts

// A tile of kRows rows of kColumns elements in shared memory. It consists of panels of 64 columns
// (of 32 if kColumns is no multiple of 64), one after another. The 16-byte chunks of a panel's row
// are swizzled, so that neither copies nor ldmatrix of 8 rows have bank conflicts.
template <int kRows_, int kColumns_, typename Element_>
struct RowsTile {
  using Element = Element_;
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kPitch = kColumns % 64 == 0 ? 64 : 32;  // elements between rows

  Element* data;

  static HSTU_DEVICE int offset(int row, int column) {
    const int swizzle = row / (64 / kPitch) % (kPitch / 8);
    return column / kPitch * (kRows * kPitch) + row * kPitch + (column % kPitch ^ swizzle * 8);
  }

  // The offset of (row + rows, column + columns), given the offset of (row, column). `rows` and
  // `columns` are multiples of 8, and `columns` and `column` have no bit in common.
  static HSTU_DEVICE int advance(int offset, int rows, int columns) {
    return (offset ^ columns % kPitch) + rows * kPitch + columns / kPitch * (kRows * kPitch);
  }
};

template <int kRows, int kColumns, typename Element>
HSTU_DEVICE RowsTile<kRows, kColumns, Element> rows_tile(Element* data) {
  return {data};
}

// ------------------------------------------------------------------------------- order of keys

// The order of keys in shared memory. It makes a thread's columns of a product neighboring keys: in
// an mma fragment, thread t of a group of four has columns 8n + 2t and 8n + 2t + 1 of each block n
// of 8 columns, so slot 8n + 2t + i of kGroup slots holds key (kGroup / 4) t + 2n + i. Then a
// thread reads its part of a bias row, and writes its part of a gradient row, 16 bytes at a time.
template <int kGroup>
struct KeyOrder {
  static_assert(kGroup == 16 || kGroup == 32, "groups are made of 2 or 4 blocks of 8 columns");
  static constexpr int kRun = kGroup / 4;  // neighboring keys of a thread

  // NOTE: this only permutes bits, so that key(x + y) = key(x) + key(y) if x and y have no bit in
  // common.
  static HSTU_DEVICE int key(int slot) {
    return slot / kGroup * kGroup + slot % 8 / 2 * kRun + slot % kGroup / 8 * 2 + slot % 2;
  }
};

struct NaturalOrder {
  static constexpr int kRun = 2;

  static HSTU_DEVICE int key(int slot) { return slot; }
};

// ------------------------------------------------------------------------------- copies of rows

// The order in which the threads of a block copy kRows slots of kColumns elements, 16 bytes each at
// a time. In each pass, a thread's slot advances by a constant, and so does its row in any Order.
template <int kRows, int kColumns, int kThreads, bool kHidesThread>
struct RowPasses {
  static constexpr int kChunks = kColumns / 8;
  static constexpr int kStep = kThreads / kChunks;  // slots per pass
  static constexpr int kPasses = kRows / kStep;
  static_assert(kThreads % kChunks == 0 && kRows % kStep == 0,
                "a tile's rows are copied in whole passes of the block");

  int slot;  // in the first pass
  int column;

  HSTU_DEVICE RowPasses() {
    const int thread = bounded_thread_idx<kHidesThread>();
    slot = thread / kChunks;
    column = thread % kChunks * 8;
  }

  // The thread's chunk of a tile in shared memory.
  template <typename Element>
  HSTU_DEVICE Element* chunk(Element* data, int pass) const {
    using Tile = RowsTile<kRows, kColumns, Element>;
    if constexpr (kStep % 8 == 0) {  // the swizzle repeats with every 8 rows
      return data + Tile::offset(slot, column) + pass * kStep * Tile::kPitch;
    } else {
      return data + Tile::offset(slot + pass * kStep, column);
    }
  }
};

// The rows of one sequence and head in a packed tensor.
// NOTE: kernels keep it in shared memory, to leave the registers to the accumulators.
template <typename Element>
struct HeadRows {
  const Element* first;
  int row_stride;
  int count;
  int head_dim;

  HSTU_DEVICE HeadRows(const PackedTensor& tensor, int64_t begin, int count, int head)
      : first(static_cast<const Element*>(tensor.data) + begin * tensor.row_stride +
              head * tensor.head_stride),
        row_stride(static_cast<int>(tensor.row_stride)),
        count(count),
        head_dim(tensor.head_dim) {}
};

// Starts copying kRows rows from row `begin` on to shared memory. Rows and columns past the end
// become zeros.
template <int kRows, int kColumns, int kThreads, typename Order, bool kHidesThread,
          typename Element>
HSTU_DEVICE void copy_rows_async(HeadRows<Element> rows, int begin, Element* to) {
  using Passes = RowPasses<kRows, kColumns, kThreads, kHidesThread>;
  const Passes passes;
  const int first = begin + Order::key(passes.slot);
  const Element* from = rows.first + static_cast<int64_t>(first) * rows.row_stride + passes.column;
  const int count = passes.column < rows.head_dim ? rows.count - first : 0;
#pragma unroll
  for (int pass = 0; pass < Passes::kPasses; ++pass) {
    const int row = Order::key(pass * Passes::kStep);
    ptx::cp_async_16_or_zeros(from + static_cast<int64_t>(row) * rows.row_stride,
                              passes.chunk(to, pass), row < count);
  }
}

// The keys or the values of one sequence and head: the history in pages, targets in packed rows.
template <typename Element>
struct PagedRows {
  const Element* pages;  // of the head
  const float* scales;   // of the head, if pages hold e4m3; else null
  const PagedParams* paged;
  PageList list;
  int history_end;
  HeadRows<Element> targets;

  HSTU_DEVICE PagedRows(const PagedParams& paged, PagePart part, const PackedTensor& tensor,
                        const Sequence& sequence, int b, int head)
      : scales(paged.scales),
        paged(&paged),
        list(paged, b),
        history_end(sequence.history_end),
        targets(tensor, TargetRows(sequence).begin, TargetRows(sequence).count, head) {
    const bool is_values = part == PagePart::kValues;
    const int64_t offset = head * paged.head_stride + (is_values ? paged.kv_stride : 0);
    if (scales) {
      pages =
          reinterpret_cast<const Element*>(static_cast<const uint8_t*>(paged.kv_cache) + offset);
      scales += head + (is_values ? paged.scale_kv_stride : 0);
    } else {
      pages = static_cast<const Element*>(paged.kv_cache) + offset;
    }
  }

  // The row of key `key` >= history_end, which is a target; null if there is no such row.
  HSTU_DEVICE const Element* target_row(int key) const {
    const int target = key - history_end;
    if (target >= targets.count) return nullptr;
    return targets.first + static_cast<int64_t>(target) * targets.row_stride;
  }

  // The row of key `key` in a cache that is not e4m3; null if there is no such row.
  HSTU_DEVICE const Element* row(int key) const {
    if (key >= history_end) return target_row(key);
    const int page = paged->page_of(key);
    if (page >= list.count) return nullptr;
    return pages + list.page(*paged, page) * paged->page_stride +
           paged->slot_of(key) * paged->slot_stride;
  }

  // A row of e4m3 and its scale.
  struct Quantized {
    const uint8_t* elements = nullptr;  // null: the history has no such row
    const float* scale = nullptr;
  };
  HSTU_DEVICE Quantized quantized_row(int key) const {
    if (key >= history_end) return {};
    const int n = paged->page_of(key);
    if (n >= list.count) return {};
    const int64_t page = list.page(*paged, n);
    const int slot = paged->slot_of(key);
    return {reinterpret_cast<const uint8_t*>(pages) + page * paged->page_stride +
                slot * paged->slot_stride,
            scales + page * paged->scale_page_stride + slot * paged->scale_slot_stride};
  }
};

// Copies rows of an e4m3 cache synchronously: they are in shared memory when this returns, and
// visible to other threads after the barrier that follows ptx::cp_async_wait_all().
template <int kRows, int kColumns, int kThreads, typename Order, bool kHidesThread,
          typename Element>
HSTU_DEVICE void copy_quantized_rows(const PagedRows<Element>& rows, int begin, Element* to) {
  using Passes = RowPasses<kRows, kColumns, kThreads, kHidesThread>;
  // Loads in flight per thread: more would take registers that the accumulators need.
  constexpr int kAtOnce = Passes::kPasses < 4 ? Passes::kPasses : 4;
  static_assert(Passes::kPasses % kAtOnce == 0, "passes are made of whole groups of loads");
  const Passes passes;
  const int first = begin + Order::key(passes.slot);
  const bool has_column = passes.column < rows.targets.head_dim;
#pragma unroll 1
  for (int group = 0; group < Passes::kPasses; group += kAtOnce) {
    uint2 elements[kAtOnce];
    float scales[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int key = first + Order::key((group + n) * Passes::kStep);
      const auto row = rows.quantized_row(key);
      const bool is_read = row.elements && has_column;
      elements[n] = is_read ? __ldg(reinterpret_cast<const uint2*>(row.elements + passes.column))
                            : uint2{0, 0};
      scales[n] = is_read ? __ldg(row.scale) : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const uint2 low = dequantized<Element>(elements[n].x, scales[n]);
      const uint2 high = dequantized<Element>(elements[n].y, scales[n]);
      *reinterpret_cast<uint4*>(passes.chunk(to, group + n)) = {low.x, low.y, high.x, high.y};
    }
  }
  // Copies targets over the zeros of their rows.
  if (begin + kRows <= rows.history_end || !has_column) return;
#pragma unroll 1
  for (int pass = 0; pass < Passes::kPasses; ++pass) {
    const int key = first + Order::key(pass * Passes::kStep);
    const Element* target = key >= rows.history_end ? rows.target_row(key) : nullptr;
    if (target) {
      *reinterpret_cast<uint4*>(passes.chunk(to, pass)) =
          *reinterpret_cast<const uint4*>(target + passes.column);
    }
  }
}

template <int kRows, int kColumns, int kThreads, typename Order, bool kHidesThread,
          typename Element>
HSTU_DEVICE void copy_rows_async(const PagedRows<Element>& rows, int begin, Element* to) {
  if (rows.scales) {
    return copy_quantized_rows<kRows, kColumns, kThreads, Order, kHidesThread>(rows, begin, to);
  }
  using Passes = RowPasses<kRows, kColumns, kThreads, kHidesThread>;
  const Passes passes;
  const int first = begin + Order::key(passes.slot);
  const bool has_column = passes.column < rows.targets.head_dim;
#pragma unroll
  for (int pass = 0; pass < Passes::kPasses; ++pass) {
    const Element* row = has_column ? rows.row(first + Order::key(pass * Passes::kStep)) : nullptr;
    // NOTE: without a row, the address is any valid one: cp.async then reads no byte of it.
    const Element* from = row ? row + passes.column : rows.pages;
    ptx::cp_async_16_or_zeros(from, passes.chunk(to, pass), row);
  }
}

// Copies a tile from shared memory to `count` rows of a packed tensor.
template <int kRows, int kColumns, int kThreads, typename Order, typename Element>
HSTU_DEVICE void store_rows(Element* from, const PackedTensor& tensor, int64_t begin, int count,
                            int head) {
  using Passes = RowPasses<kRows, kColumns, kThreads, true>;
  const Passes passes;
  const int first = Order::key(passes.slot);
  Element* to = static_cast<Element*>(tensor.data) + (begin + first) * tensor.row_stride +
                head * tensor.head_stride + passes.column;
  if (passes.column >= tensor.head_dim) return;
#pragma unroll
  for (int pass = 0; pass < Passes::kPasses; ++pass) {
    const int row = Order::key(pass * Passes::kStep);
    if (row < count - first) {
      *reinterpret_cast<uint4*>(to + row * tensor.row_stride) =
          *reinterpret_cast<const uint4*>(passes.chunk(from, pass));
    }
  }
}

// Adds `count` rows of a packed tensor to a tile in shared memory.
template <int kRows, int kColumns, int kThreads, typename Element>
HSTU_DEVICE void add_rows(const PackedTensor& tensor, int64_t begin, int count, int head,
                          Element* to) {
  const Element* from = static_cast<const Element*>(tensor.data) + begin * tensor.row_stride +
                        head * tensor.head_stride;
#pragma unroll 1
  for (int n = threadIdx.x; n < min(count, kRows) * kColumns; n += kThreads) {
    const int row = n / kColumns, column = n % kColumns;
    if (column >= tensor.head_dim) continue;
    Element& sum = to[RowsTile<kRows, kColumns, Element>::offset(row, column)];
    sum = static_cast<Element>(static_cast<float>(sum) +
                               static_cast<float>(from[row * tensor.row_stride + column]));
  }
}

}  // namespace hstu::sm80
