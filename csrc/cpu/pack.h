// Copies tiles of a tensor into the forms that arithmetic.h multiplies, padded with zeros.
#pragma once

#include "../common/arena.h"
#include "../params.h"
#include "arithmetic.h"

namespace hstu::cpu::HSTU_CPU_ISA {

using Arena = hstu::Arena<64>;

constexpr int kMaxHeadDim = 256;

// The rows of one sequence and head in K, V or another tensor. With a paged cache, rows
// [0, paged_rows) are in pages.
template <typename T>
struct RowSource {
  const T* first = nullptr;  // row 0, or where it would be if no row were in pages
  int64_t row_stride = 0;
  int columns = 0;

  int paged_rows = 0;
  const T* pages = nullptr;  // the head in page 0; null if pages are e4m3
  const E4m3* quantized_pages = nullptr;
  const float* scales = nullptr;  // the head's scales in page 0 of quantized_pages
  const PagedParams* paged = nullptr;
  int64_t first_page = 0;  // index into page_ids

  HSTU_INLINE bool is_quantized() const { return scales != nullptr; }

  // Returns row r in place, or, if its page is quantized, dequantized in `copy`.
  HSTU_INLINE const T* row(int r, T* copy) const {
    if (r >= paged_rows) return first + r * row_stride;
    const int64_t page = paged->page_ids[first_page + paged->page_of(r)];
    const int64_t slot = paged->slot_of(r);
    const int64_t offset = page * paged->page_stride + slot * paged->slot_stride;
    if (!is_quantized()) return pages + offset;
    using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
    const Wide scale = scales[page * paged->scale_page_stride + slot * paged->scale_slot_stride];
    for (int d = 0; d < columns; ++d) {
      copy[d] = from_float<T>(scale * static_cast<Wide>(to_float(quantized_pages[offset + d])));
    }
    return copy;
  }
};

template <typename T>
RowSource<T> row_source(const PackedTensor& tensor, int64_t begin, int head) {
  return {
      static_cast<const T*>(tensor.data) + begin * tensor.row_stride + head * tensor.head_stride,
      tensor.row_stride, tensor.head_dim};
}

template <typename T>
T* output_row(const PackedTensor& tensor, int64_t row, int head) {
  return static_cast<T*>(tensor.data) + row * tensor.row_stride + head * tensor.head_stride;
}

// Stores rows of results in a tensor, `rows` in all. Uses non-temporal stores where the output is
// larger than the cache: it would be evicted before it is read, and a normal store would first
// fetch the line.
template <typename T, typename Accum>
class RowStore {
 public:
  RowStore(const PackedTensor& tensor, int64_t rows)
      : tensor_(tensor),
        streams_(std::is_same_v<T, Accum> && tensor.head_dim % (kVectorBytes / sizeof(T)) == 0 &&
                 rows * tensor.row_stride * int64_t{sizeof(T)} > kCachedBytes) {}

  // Stores factor * sums, rounded once.
  HSTU_INLINE void store(int64_t row, int head, const Accum* sums, Accum factor) const {
    T* out = output_row<T>(tensor_, row, head);
    if constexpr (std::is_same_v<T, Accum>) {
      if (streams_ && reinterpret_cast<uintptr_t>(out) % kVectorBytes == 0) {
        for (int d = 0; d < tensor_.head_dim; d += kLanes<T>) {
          stream(out + d, factor * load(sums + d));
        }
        return;
      }
    }
    for (int d = 0; d < tensor_.head_dim; ++d) out[d] = from_float<T>(factor * sums[d]);
  }

  // Prefetches a row that will be stored soon.
  HSTU_INLINE void expect(int64_t row, int head) const {
    if (streams_) return;
    constexpr int kLine = 64 / sizeof(T);
    const T* out = output_row<T>(tensor_, row, head);
    for (int d = 0; d < tensor_.head_dim; d += kLine) __builtin_prefetch(out + d, 1, 2);
  }

 private:
  static constexpr int64_t kCachedBytes = 8 << 20;  // about the private caches of all cores

  const PackedTensor& tensor_;
  bool streams_;
};

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

// transpose() of rows that are from_stride apart.
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
  // True if rows of a tensor are rows of a left operand without conversion.
  static constexpr bool kUnitRows = std::is_same_v<T, Unit> || kPair == 2;

  // Returns rows in left form: m is the row, k the column.
  static Matrix<Unit> rows(const RowSource<T>& source, int begin, int count, Unit* copy) {
    return copy_rows(source, begin, count, round_up(count, Arithmetic::kRows), copy);
  }

  // Returns rows in right form: k is the row, n the column.
  static Matrix<Unit> row_pairs(const RowSource<T>& source, int begin, int count, Unit* copy) {
    if constexpr (kPair == 1) {
      return rows(source, begin, count, copy);
    } else {
      return copy_row_pairs(source, begin, count, copy);
    }
  }

  // Returns the transpose in right form: k is the column, n the row. `staging` is for rows that
  // have to be copied first.
  static Matrix<Unit> columns(const RowSource<T>& source, int begin, int count, Unit* copy,
                              int64_t stride, Unit* staging) {
    const int padded = round_up(count, Arithmetic::kColumns);
    // Rows that already consist of units are transposed from where they are, kLanes at a time.
    const bool has_units = kUnitRows && source.columns % kPadding == 0 && !source.is_quantized();
    const int in_place = has_units ? count / kLanes<Unit> * kLanes<Unit> : 0;
    const Matrix<Unit> copied =
        copy_rows(source, begin + in_place, count - in_place, padded - in_place, staging);
    for (int row = 0; row < padded; row += kLanes<Unit>) {
      const Unit* square[kLanes<Unit>];
      for (int n = 0; n < kLanes<Unit>; ++n) {
        square[n] = row < in_place
                        ? reinterpret_cast<const Unit*>(source.row(begin + row + n, nullptr))
                        : copied.from(row - in_place + n, 0).data;
      }
      transpose(square, copied.row_stride, copy + row, stride);
    }
    return {copy, stride};
  }

  // Returns the transpose of a matrix as a left operand, copied only if strides cannot express it.
  static Matrix<Unit> transposed(Matrix<Unit> matrix, int rows, int columns, Unit* copy,
                                 int64_t stride) {
    if constexpr (Arithmetic::kAnyStride) {
      return matrix.transposed();
    } else {
      for (int row = 0; row < rows; row += kLanes<Unit>) {
        transpose(matrix.from(row, 0).data, matrix.row_stride, columns, copy + row, stride);
      }
      return {copy, stride};
    }
  }

 private:
  static Matrix<Unit> copy_rows(const RowSource<T>& source, int begin, int count, int padded_count,
                                Unit* copy) {
    const int columns = source.columns;
    const int stride = round_up(columns, kPadding) / kPair;
    T made[kMaxHeadDim];
    for (int r = 0; r < count; ++r) {
      Unit* units = copy + r * stride;
      const T* row = source.row(begin + r, made);
      if constexpr (kPair == 1) {
        for (int d = 0; d < columns; ++d) units[d] = to_float(row[d]);
      } else {
        static_assert(std::is_same_v<T, BFloat16>, "pairs are made of bf16 elements");
        std::memcpy(units, row, columns * sizeof(T));  // head dims are even
      }
      std::memset(units + columns / kPair, 0, (stride - columns / kPair) * sizeof(Unit));
    }
    std::memset(copy + count * stride, 0, int64_t{padded_count - count} * stride * sizeof(Unit));
    return {copy, stride};
  }

  // Copies rows into units that pair two neighboring rows.
  static Matrix<Unit> copy_row_pairs(const RowSource<T>& source, int begin, int count, Unit* copy) {
    const int columns = source.columns;
    const int stride = round_up(columns, kPadding);
    T made[2][kMaxHeadDim];
    for (int r = 0; r < round_up(count, kPadding); r += kPair) {
      Unit* units = copy + r / kPair * stride;
      const T* even = r < count ? source.row(begin + r, made[0]) : nullptr;
      const T* odd = r + 1 < count ? source.row(begin + r + 1, made[1]) : nullptr;
      if (odd) {
        for (int d = 0; d < columns; ++d) {
          units[d] = even[d].bits | static_cast<uint32_t>(odd[d].bits) << 16;
        }
      } else {
        for (int d = 0; d < columns; ++d) units[d] = even ? even[d].bits : 0;
      }
      std::memset(units + columns, 0, (stride - columns) * sizeof(Unit));
    }
    return {copy, stride};
  }
};

}  // namespace hstu::cpu::HSTU_CPU_ISA
