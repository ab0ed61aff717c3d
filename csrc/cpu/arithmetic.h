// Matrix products of tiles. An Arithmetic defines
//
//   Unit        the element of operands: one float, one double, or a pair of bf16 that are
//               neighbors in the direction of k
//   kPair       elements in a unit: 1 or 2
//   Accum       the type of sums
//   kRows       gemm() takes this many rows of A and C at a time
//   kColumns    and this many columns of B and C
//   kBlock      rows of the blocks that a partial tile is cut into (tile.h)
//   kAnyStride  whether A may have a column stride other than 1
//
// and defines gemm(): C[m][n] (+)= sum_k A[m][k] B[k][n]. Operands are matrices of units:
//
//   left form   A: [m][k / kPair], the pairs along k
//   right form  B: [k / kPair][n], the pairs along k
//
// C is row-major Accum with row stride ldc. Rows of A and C are padded to kRows, columns of B and C
// to kColumns; the contents of the padding do not matter. k is padded with zeros to whole units, or
// to kPadding elements with AMX tiles.
#pragma once

#include "../common/math.h"
#include "element.h"

#if defined(__AMX_TILE__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace hstu::cpu::HSTU_CPU_ISA {

// A matrix to read. Strides count units.
template <typename Unit>
struct Matrix {
  const Unit* data;
  int64_t row_stride;
  int64_t column_stride = 1;

  // The matrix from an element on.
  HSTU_INLINE Matrix from(int64_t row, int64_t column) const {
    return {data + row * row_stride + column * column_stride, row_stride, column_stride};
  }
  HSTU_INLINE Matrix transposed() const { return {data, column_stride, row_stride}; }
};

// Head dims are padded to a multiple of this, and with pairs also the keys or rows that a product
// sums over.
constexpr int kPadding = 32;

// The product by multiply-add of vectors, for any type whose Traits have multiply_add(). At most
// Traits::kLongestSum terms are added one after another; longer sums are made of such partial sums.
template <typename Traits>
struct VectorArithmetic {
  using Unit = typename Traits::Unit;
  using Accum = typename Traits::Accum;
  static constexpr int kPair = Traits::kPair;
  static constexpr Accuracy kAccuracy = Traits::kAccuracy;
  static constexpr int kRows = kPair;
  static constexpr int kColumns = kLanes<Accum>;
  static constexpr int kBlock = 16;
  static constexpr bool kAnyStride = true;

  static void begin_thread() {}
  static void end_thread() { finish_streams(); }

  static void gemm(int m, int n, int k, Matrix<Unit> a, Matrix<Unit> b, Accum* c, int64_t ldc,
                   bool accumulate) {
    constexpr int kMostSteps = Traits::kLongestSum / kPair;
    const int steps = ceil_div(k, kPair);
    for (int step = 0; step < steps; step += kMostSteps) {
      const int left = steps - step;
      panels<kGemmVectors>(round_up(m, kRows), n, left < kMostSteps ? left : kMostSteps,
                           a.from(0, step), b.from(step, 0), c, ldc, accumulate || step > 0);
    }
  }

 private:
  template <int kVectors>
  static constexpr int kMostRows = kGemmSums / kVectors < 8 ? kGemmSums / kVectors : 8;

  // Goes through the columns, kVectors vectors at a time, and fewer at the end.
  template <int kVectors>
  static HSTU_INLINE void panels(int m, int n, int steps, Matrix<Unit> a, Matrix<Unit> b, Accum* c,
                                 int64_t ldc, bool accumulate) {
    constexpr int kPanel = kVectors * kColumns;
    int column = 0;
    for (; column + kPanel <= n; column += kPanel) {
      panel<kVectors>(m, steps, a, b.from(0, column), c + column, ldc, accumulate);
    }
    if constexpr (kVectors > 1) {
      if (column < n) {
        panels<kVectors - 1>(m, n - column, steps, a, b.from(0, column), c + column, ldc,
                             accumulate);
      }
    }
  }

  // Computes the columns of kVectors vectors, in blocks of rows that differ by at most one row.
  template <int kVectors>
  static HSTU_INLINE void panel(int m, int steps, Matrix<Unit> a, Matrix<Unit> b, Accum* c,
                                int64_t ldc, bool accumulate) {
    constexpr int kMost = kMostRows<kVectors>;
    for (int row = 0; row < m;) {
      const int blocks_left = ceil_div(m - row, kMost);
      const int rows = ceil_div(m - row, blocks_left);
      block<kVectors, kMost>(rows, steps, a.from(row, 0), b, c + row * ldc, ldc, accumulate);
      row += rows;
    }
  }

  // Computes a block of at most kBlockRows rows, whose sums all stay in registers.
  template <int kVectors, int kBlockRows>
  static HSTU_INLINE void block(int rows, int steps, Matrix<Unit> a, Matrix<Unit> b, Accum* c,
                                int64_t ldc, bool accumulate) {
    if constexpr (kBlockRows > 1) {
      if (rows < kBlockRows) {
        return block<kVectors, kBlockRows - 1>(rows, steps, a, b, c, ldc, accumulate);
      }
    }
    Vector<Accum> sum[kBlockRows][kVectors] = {};
    for (int step = 0; step < steps; ++step) {
      Vector<Unit> column[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        column[v] = load(b.data + step * b.row_stride + v * kColumns);
      }
#pragma GCC unroll 8
      for (int row = 0; row < kBlockRows; ++row) {
        const Unit factor = a.data[row * a.row_stride + step * a.column_stride];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          sum[row][v] = Traits::multiply_add(sum[row][v], factor, column[v]);
        }
      }
    }
    // The partial sum is added to what C holds only here, so that the rounding error of a long sum
    // grows with the number of partial sums and not with the number of terms.
#pragma GCC unroll 8
    for (int row = 0; row < kBlockRows; ++row) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        Accum* out = c + row * ldc + v * kColumns;
        store(out, accumulate ? load(out) + sum[row][v] : sum[row][v]);
      }
    }
  }
};

template <typename T>
struct FloatTraits {
  using Unit = T;
  using Accum = T;
  static constexpr int kPair = 1;
  static constexpr int kLongestSum = 64;
  static constexpr Accuracy kAccuracy = Accuracy::kFull;

  static HSTU_INLINE Vector<T> multiply_add(Vector<T> sum, T a, Vector<T> b) { return sum + a * b; }
};

// Multiply-add of fp32, also for 16-bit types that are widened to it, and of fp64.
template <typename T>
using FloatArithmetic = VectorArithmetic<FloatTraits<T>>;

#if defined(__AMX_TILE__)

// bf16 pairs by AMX. Tile registers 0 to 3 hold 2 x 2 tiles of C, 4 and 5 hold A, 6 and 7 hold B.
struct TileArithmetic {
  using Unit = uint32_t;
  using Accum = float;
  static constexpr int kPair = 2;
  static constexpr Accuracy kAccuracy = Accuracy::kBFloat16;
  static constexpr int kRows = 32;
  static constexpr int kColumns = 32;
  static constexpr int kBlock = 32;
  static constexpr bool kAnyStride = false;

  static void begin_thread() {
    struct Config {
      uint8_t palette = 1;
      uint8_t start_row = 0;
      uint8_t reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    };
    alignas(64) Config config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = 64;
      config.rows[tile] = 16;
    }
    publish_stores();
    _tile_loadconfig(&config);
  }
  static void end_thread() { _tile_release(); }

  static void gemm(int m, int n, int k, Matrix<Unit> a, Matrix<Unit> b, Accum* c, int64_t ldc,
                   bool accumulate) {
    publish_stores();
    for (int column = 0; column < n; column += kColumns) {
      for (int row = 0; row < m; row += kRows) {
        block(k, a.data + row * a.row_stride, a.row_stride * 4, b.data + column, b.row_stride * 4,
              c + row * ldc + column, ldc * 4, accumulate);
      }
    }
  }

 private:
  // NOTE: GCC's tile loads do not declare that they read memory. Without this barrier, it moves
  // stores past them.
  static HSTU_INLINE void publish_stores() { asm volatile("" ::: "memory"); }

  // Computes a 32 x 32 block of C. Strides are in bytes.
  static HSTU_INLINE void block(int k, const Unit* a, int64_t a_stride, const Unit* b,
                                int64_t b_stride, Accum* c, int64_t c_stride, bool accumulate) {
    const Unit* a_low = a + 16 * (a_stride / 4);
    Accum* c_low = c + 16 * (c_stride / 4);
    if (accumulate) {
      _tile_loadd(0, c, c_stride);
      _tile_loadd(1, c + 16, c_stride);
      _tile_loadd(2, c_low, c_stride);
      _tile_loadd(3, c_low + 16, c_stride);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int unit = 0; unit < (k + 1) / 2; unit += 16) {
      const Unit* b_rows = b + unit * (b_stride / 4);
      _tile_loadd(4, a + unit, a_stride);
      _tile_loadd(6, b_rows, b_stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b_rows + 16, b_stride);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a_low + unit, a_stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_stride);
    _tile_stored(1, c + 16, c_stride);
    _tile_stored(2, c_low, c_stride);
    _tile_stored(3, c_low + 16, c_stride);
  }
};

#elif defined(__AVX512BF16__)

struct BFloat16Traits {
  using Unit = uint32_t;
  using Accum = float;
  static constexpr int kPair = 2;
  // The largest head dim: the errors of such sums are far below the roundings to bf16.
  static constexpr int kLongestSum = 256;
  static constexpr Accuracy kAccuracy = Accuracy::kBFloat16;

  static HSTU_INLINE Vector<float> multiply_add(Vector<float> sum, Unit a, Vector<Unit> b) {
    return (Vector<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(a),
                                           (__m512bh)b);
  }
};

// bf16 pairs by AVX-512 dot products.
using DotArithmetic = VectorArithmetic<BFloat16Traits>;

#endif

}  // namespace hstu::cpu::HSTU_CPU_ISA
