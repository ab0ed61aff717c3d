// How products of tiles are formed. An Arithmetic says
//
//   Unit      what operands are made of: one float, one double, or a pair of bf16 that are
//             neighbours in the direction summed over
//   kPair     elements in a unit
//   Accum     what sums are kept in
//   kRows     gemm() takes this many rows of A and C at a time
//   kPanel    columns of a panel (below)
//
// and gives gemm(): C[m][n] (+)= sum_k A[m][k] B[k][n]. Operands lie in one of two forms:
//
//   row form    A: units [m][k / kPair], the pairs along k                          row stride lda
//   panel form  B: panels of kPanel columns; in a panel units [k / kPair][kPanel]   Panels below
//
// C is row-major Accum with row stride ldc. Rows of A and C are padded to kRowBlock, k is padded
// with zeros to kDepthBlock elements, and columns to kPanel: padded rows and columns hold no
// meaning.
#pragma once

#include "element.h"

#if defined(__AMX_TILE__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace hstu::cpu::HSTU_CPU_ISA {

// The panel form of a matrix; strides in units.
template <typename Unit>
struct Panels {
  Unit* data;
  int64_t panel_stride;
  int64_t k_stride;

  // The same matrix from column n (a multiple of kPanel), or from step k / kPair, onwards.
  HSTU_INLINE Panels from_column(int n, int panel) const {
    return {data + n / panel * panel_stride, panel_stride, k_stride};
  }
  HSTU_INLINE Panels from_step(int step) const {
    return {data + step * k_stride, panel_stride, k_stride};
  }
};

constexpr int kRowBlock = 32;
constexpr int kDepthBlock = 32;

// The product by multiply-add of vectors, for any type whose Traits have multiply_add().
template <typename Traits>
struct VectorArithmetic {
  using Unit = typename Traits::Unit;
  using Accum = typename Traits::Accum;
  static constexpr int kPair = Traits::kPair;
  static constexpr Accuracy kAccuracy = Traits::kAccuracy;
  static constexpr int kVectorsPerPanel = 2;
  static constexpr int kRows = kGemmRows;
  static constexpr int kPanel = kVectorsPerPanel * kLanes<Accum>;

  static void begin_thread() {}
  static void end_thread() {}

  static void gemm(int m, int n, int k, const Unit* a, int64_t lda, Panels<Unit> b, Accum* c,
                   int64_t ldc, bool accumulate) {
    const int steps = (k + kPair - 1) / kPair;
    for (int column = 0; column < n; column += kPanel) {
      const Unit* panel = b.data + column / kPanel * b.panel_stride;
      for (int row = 0; row < m; row += kGemmRows) {
        block(steps, a + row * lda, lda, panel, b.k_stride, c + row * ldc + column, ldc,
              accumulate);
      }
    }
  }

 private:
  static HSTU_INLINE void block(int steps, const Unit* a, int64_t lda, const Unit* b,
                                int64_t k_stride, Accum* c, int64_t ldc, bool accumulate) {
    Vector<Accum> sum[kGemmRows][kVectorsPerPanel] = {};
    for (int step = 0; step < steps; ++step) {
      Vector<Unit> column[kVectorsPerPanel];
#pragma GCC unroll 2
      for (int v = 0; v < kVectorsPerPanel; ++v) {
        column[v] = load(b + step * k_stride + v * kLanes<Accum>);
      }
#pragma GCC unroll 8
      for (int row = 0; row < kGemmRows; ++row) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectorsPerPanel; ++v) {
          sum[row][v] = Traits::multiply_add(sum[row][v], a[row * lda + step], column[v]);
        }
      }
    }
    // The block's own sum is added to what came before only now: the rounding errors of a long sum
    // then grow with the number of tiles, not of terms.
#pragma GCC unroll 8
    for (int row = 0; row < kGemmRows; ++row) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectorsPerPanel; ++v) {
        Accum* out = c + row * ldc + v * kLanes<Accum>;
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
  static constexpr Accuracy kAccuracy = Accuracy::kFull;

  static HSTU_INLINE Vector<T> multiply_add(Vector<T> sum, T a, Vector<T> b) { return sum + a * b; }
};

// fp32 (and what is widened to it), and fp64.
template <typename T>
using FloatArithmetic = VectorArithmetic<FloatTraits<T>>;

#if defined(__AMX_TILE__)

// bf16 pairs on the tile unit: C tiles 0..3 (2 x 2), A tiles 4 and 5, B tiles 6 and 7.
struct TileArithmetic {
  using Unit = uint32_t;
  using Accum = float;
  static constexpr int kPair = 2;
  static constexpr Accuracy kAccuracy = Accuracy::kBFloat16;
  static constexpr int kRows = 32;
  static constexpr int kPanel = 32;

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

  static void gemm(int m, int n, int k, const Unit* a, int64_t lda, Panels<Unit> b, Accum* c,
                   int64_t ldc, bool accumulate) {
    publish_stores();
    for (int column = 0; column < n; column += kPanel) {
      const Unit* panel = b.data + column / kPanel * b.panel_stride;
      for (int row = 0; row < m; row += 32) {
        block(k, a + row * lda, lda * 4, panel, b.k_stride * 4, c + row * ldc + column, ldc * 4,
              accumulate);
      }
    }
  }

 private:
  // NOTE: GCC's tile loads do not say that they read memory, so stores before them must be told.
  static HSTU_INLINE void publish_stores() { asm volatile("" ::: "memory"); }

  // A 32 x 32 block; strides in bytes.
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
  static constexpr Accuracy kAccuracy = Accuracy::kBFloat16;

  static HSTU_INLINE Vector<float> multiply_add(Vector<float> sum, Unit a, Vector<Unit> b) {
    return (Vector<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(a),
                                           (__m512bh)b);
  }
};

// bf16 pairs by vector dot products.
using DotArithmetic = VectorArithmetic<BFloat16Traits>;

#endif

}  // namespace hstu::cpu::HSTU_CPU_ISA
