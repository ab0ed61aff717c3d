// Copies tiles of a tensor into the forms that arithmetic.h multiplies, padded with zeros.
#pragma once

#include "../params.h"
#include "arithmetic.h"

namespace hstu::cpu::HSTU_CPU_ISA {

constexpr int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// Hands out aligned pieces of a scratch buffer; with a null buffer it only counts them.
class Arena {
 public:
  explicit Arena(char* base) : base_(base) {}

  template <typename T>
  T* take(int64_t count) {
    T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }

  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// Rows of one sequence and head. With pages, rows [0, paged_rows) lie in pages.
template <typename T>
struct RowSource {
  const T* first = nullptr;  // row 0, or where row 0 would lie if all rows were here
  int64_t row_stride = 0;
  int columns = 0;

  int paged_rows = 0;
  const T* pages = nullptr;
  const PagedParams* paged = nullptr;
  int64_t first_page = 0;  // index into page_ids

  HSTU_INLINE const T* row(int r) const {
    if (r >= paged_rows) return first + r * row_stride;
    const int64_t page = paged->page_ids[first_page + r / paged->page_size];
    return pages + page * paged->page_stride + r % paged->page_size * paged->slot_stride;
  }
};

template <typename T>
RowSource<T> row_source(const PackedTensor& tensor, int64_t begin, int head) {
  return {
      static_cast<const T*>(tensor.data) + begin * tensor.row_stride + head * tensor.head_stride,
      tensor.row_stride, tensor.head_dim};
}

// to[n][m] = rows[m][n] for m < kLanes and n < columns, a multiple of kLanes.
template <typename Unit>
HSTU_INLINE void transpose(const Unit* const (&rows)[kLanes<Unit>], int columns, Unit* to,
                           int64_t to_stride) {
  for (int column = 0; column < columns; column += kLanes<Unit>) {
    Vector<Unit> square[kLanes<Unit>];
#pragma GCC unroll 16
    for (int n = 0; n < kLanes<Unit>; ++n) square[n] = load(rows[n] + column);
    transpose_square<Unit>(square);
#pragma GCC unroll 16
    for (int n = 0; n < kLanes<Unit>; ++n) store(to + (column + n) * to_stride, square[n]);
  }
}

// The same from rows that lie from_stride apart.
template <typename Unit>
HSTU_INLINE void transpose(const Unit* from, int64_t from_stride, int columns, Unit* to,
                           int64_t to_stride) {
  const Unit* rows[kLanes<Unit>];
  for (int n = 0; n < kLanes<Unit>; ++n) rows[n] = from + n * from_stride;
  transpose(rows, columns, to, to_stride);
}

template <typename Arithmetic, typename T>
struct Packer {
  using Unit = typename Arithmetic::Unit;
  static constexpr int kPair = Arithmetic::kPair;
  static constexpr int kPanel = Arithmetic::kPanel;

  // Units of a row that pair neighbouring columns. `columns` is padded to `padded` columns.
  static HSTU_INLINE void column_pairs(const T* row, int columns, int padded, Unit* units) {
    if constexpr (kPair == 1) {
      for (int d = 0; d < columns; ++d) units[d] = to_float(row[d]);
    } else {
      static_assert(std::is_same_v<T, BFloat16>, "pairs are made of bf16 elements");
      std::memcpy(units, row, columns * sizeof(T));  // head dims are even
    }
    std::memset(units + columns / kPair, 0, (padded - columns) / kPair * sizeof(Unit));
  }

  // Units that pair two neighbouring rows, or hold one row. `odd` may be null: zeros.
  static HSTU_INLINE void row_pairs(const T* even, const T* odd, int columns, Unit* units) {
    if constexpr (kPair == 1) {
      for (int d = 0; d < columns; ++d) units[d] = to_float(even[d]);
    } else if (odd) {
      for (int d = 0; d < columns; ++d) {
        units[d] = even[d].bits | static_cast<uint32_t>(odd[d].bits) << 16;
      }
    } else {
      for (int d = 0; d < columns; ++d) units[d] = even[d].bits;
    }
  }

  // Row form: m is the row, k the column.
  static void rows(const RowSource<T>& source, int begin, int count, Unit* units, int64_t stride) {
    const int padded = round_up(source.columns, kDepthBlock);
    for (int r = 0; r < count; ++r) {
      column_pairs(source.row(begin + r), source.columns, padded, units + r * stride);
    }
    for (int r = count; r < round_up(count, kRowBlock); ++r) {
      std::memset(units + r * stride, 0, padded / kPair * sizeof(Unit));
    }
  }

  // Panel form of the rows: k is the row, n the column.
  static void row_panels(const RowSource<T>& source, int begin, int count, Panels<Unit> panels) {
    const int steps = round_up(count, kDepthBlock) / kPair;
    for (int step = 0; step < steps; ++step) {
      Unit* units = panels.data + step * panels.k_stride;
      int column = 0;
      for (; column + kPanel <= source.columns; column += kPanel, units += panels.panel_stride) {
        pair_of_rows(source, begin, count, step, column, kPanel, units);
      }
      if (column == source.columns) continue;
      const int rest = source.columns - column;
      pair_of_rows(source, begin, count, step, column, rest, units);
      std::memset(units + rest, 0, (kPanel - rest) * sizeof(Unit));
    }
  }

  // Panel form of the transpose: k is the column, n the row. `staging` may receive the row form.
  static void column_panels(const RowSource<T>& source, int begin, int count, Panels<Unit> panels,
                            Unit* staging) {
    const int depth = round_up(source.columns, kDepthBlock) / kPair;
    // Whole squares of rows that already consist of units need no copy.
    constexpr bool kUnitRows = std::is_same_v<T, Unit> || kPair == 2;
    const int in_place =
        kUnitRows && source.columns % kDepthBlock == 0 ? count / kLanes<Unit> * kLanes<Unit> : 0;
    rows(source, begin + in_place, count - in_place, staging, depth);
    for (int row = 0; row < round_up(count, kRowBlock); row += kLanes<Unit>) {
      const Unit* square[kLanes<Unit>];
      for (int n = 0; n < kLanes<Unit>; ++n) {
        square[n] = row < in_place ? reinterpret_cast<const Unit*>(source.row(begin + row + n))
                                   : staging + (row - in_place + n) * depth;
      }
      Unit* panel = panels.data + row / kPanel * panels.panel_stride + row % kPanel;
      transpose(square, depth, panel, panels.k_stride);
    }
  }

  // Row form of the transpose: m is the column, k the row. `staging` holds paired rows.
  static void columns(const RowSource<T>& source, int begin, int count, Unit* units, int64_t stride,
                      Unit* staging) {
    const int padded = round_up(source.columns, kRowBlock);
    const int steps = round_up(count, kDepthBlock) / kPair;
    for (int step = 0; step < steps; ++step) {
      pair_of_rows(source, begin, count, step, 0, source.columns, staging + step * padded);
      std::memset(staging + step * padded + source.columns, 0,
                  (padded - source.columns) * sizeof(Unit));
    }
    for (int step = 0; step < steps; step += kLanes<Unit>) {
      transpose(staging + step * padded, padded, padded, units + step, stride);
    }
  }

 private:
  static HSTU_INLINE void pair_of_rows(const RowSource<T>& source, int begin, int count, int step,
                                       int column, int columns, Unit* units) {
    const int r = step * kPair;
    if (r >= count) {
      std::memset(units, 0, columns * sizeof(Unit));
      return;
    }
    const bool has_odd = kPair == 2 && r + 1 < count;
    const T* odd = has_odd ? source.row(begin + r + 1) + column : nullptr;
    row_pairs(source.row(begin + r) + column, odd, columns, units);
  }
};

}  // namespace hstu::cpu::HSTU_CPU_ISA
