// Products of tiles by CuTe's mma.sync and ldmatrix operations, with operands in shared memory.
// Addresses and fragments are plain integer arithmetic, because the layout algebra of TiledMMA and
// TiledCopy took most of the compile time.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>

#include "../common/device_math.h"
#include "tensors.h"

namespace hstu::sm80 {

// A thread's fp32 accumulator fragment of a product of tiles. Lane 4g + t has, of each block of 16
// x 8, columns 2t and 2t + 1 of rows g and g + 8.
template <int kRowBlocks_, int kColumnBlocks_>
struct Sum {
  static constexpr int kRowBlocks = kRowBlocks_;
  static constexpr int kColumnBlocks = kColumnBlocks_;
  static constexpr int kRows = 2 * kRowBlocks;  // of the fragment
  static constexpr int kColumns = 2 * kColumnBlocks;
  static constexpr int kCount = kRows * kColumns;

  float values[kCount];

  HSTU_DEVICE float* block(int row, int column) { return values + 4 * (row + kRowBlocks * column); }
  HSTU_DEVICE const float* block(int row, int column) const {
    return values + 4 * (row + kRowBlocks * column);
  }
  // Row m and column n of the fragment.
  HSTU_DEVICE float& at(int m, int n) { return block(m / 2, n / 2)[m % 2 * 2 + n % 2]; }
  HSTU_DEVICE float at(int m, int n) const { return block(m / 2, n / 2)[m % 2 * 2 + n % 2]; }
};

// mma.sync m16n8k16 with fp32 accumulators by kRowWarps x kColumnWarps warps. Each warp takes 16
// neighboring rows and kGroup neighboring columns at a time.
template <typename Element_, int kRowWarps, int kColumnWarps, int kGroup_ = 16>
struct Mma {
  using Element = Element_;
  static constexpr int kThreads = 32 * kRowWarps * kColumnWarps;
  static constexpr int kGroup = kGroup_;

  template <int kRows, int kColumns>
  using Sum = sm80::Sum<kRows / (16 * kRowWarps), kColumns / (8 * kColumnWarps)>;

  // The first row and column of the warp, and the offset from there of its block n of 16 rows or of
  // 8 columns.
  static HSTU_DEVICE int first_row(int thread) { return thread / 32 % kRowWarps * 16; }
  static HSTU_DEVICE int first_column(int thread) {
    return kColumnWarps == 1 ? 0 : thread / 32 / kRowWarps * kGroup;
  }
  static HSTU_DEVICE int row_offset(int n) { return n * (16 * kRowWarps); }
  static HSTU_DEVICE int column_offset(int n) {
    return n / (kGroup / 8) * (kGroup * kColumnWarps) + n % (kGroup / 8) * 8;
  }

  // sum += a b for one block: a has 16 rows and b has 8 columns.
  static HSTU_DEVICE void multiply(float* sum, const uint32_t* a, const uint32_t* b) {
    using Operation = std::conditional_t<std::is_same_v<Element, cutlass::half_t>,
                                         cute::SM80_16x8x16_F32F16F16F32_TN,
                                         cute::SM80_16x8x16_F32BF16BF16F32_TN>;
    Operation::fma(sum[0], sum[1], sum[2], sum[3], a[0], a[1], a[2], a[3], b[0], b[1], sum[0],
                   sum[1], sum[2], sum[3]);
  }
};

// The layout of an operand in shared memory: whether the contracted dimension k runs along its rows
// or across them.
enum class Operand { kRows, kTransposed };

enum class Side { kLeft, kRight };

// Reads 16 x 16 blocks of the warp's part of an operand by ldmatrix. The four 8 x 8 matrices of a
// left operand are (rows 0-7, k 0-7), (rows 8-15, k 0-7), (rows 0-7, k 8-15) and (rows 8-15, k
// 8-15): the A registers of one mma. The matrices of a right operand are (columns 0-7, k 0-7),
// (columns 0-7, k 8-15), (columns 8-15, k 0-7) and (columns 8-15, k 8-15): the B registers of two
// mma.
template <Side kSide, Operand kOperand, typename Tile>
class OperandReader {
 public:
  // `first` is the warp's first row of a left operand, or first column of a right one.
  HSTU_DEVICE OperandReader(const Tile& tile, int first, int lane) : data_(tile.data) {
    // Lane n passes the address of row n % 8 of matrix n / 8 to ldmatrix.
    constexpr bool kDownFirst = (kSide == Side::kLeft) == (kOperand == Operand::kRows);
    const int row = kDownFirst ? lane % 16 : lane % 8 + lane / 16 * 8;
    const int column = kDownFirst ? lane / 16 * 8 : lane / 8 % 2 * 8;
    offset_ = kOperand == Operand::kRows ? Tile::offset(first + row, column)
                                         : Tile::offset(row, first + column);
  }

  // Reads the block that is `along` rows (or columns) after the first one, at k.
  HSTU_DEVICE void read(int along, int k, uint32_t* words) const {
    constexpr bool kIsRows = kOperand == Operand::kRows;
    using Operation = std::conditional_t<kIsRows, cute::SM75_U32x4_LDSM_N, cute::SM75_U16x8_LDSM_T>;
    const auto* from = data_ + Tile::advance(offset_, kIsRows ? along : k, kIsRows ? k : along);
    Operation::copy(*reinterpret_cast<const cute::uint128_t*>(from), words[0], words[1], words[2],
                    words[3]);
  }

 private:
  const typename Tile::Element* data_;
  int offset_;
};

// A thread's fragment of a left operand: four words of each 16 x 16 block.
template <int kRowBlocks_, int kSteps_>
struct LeftOperand {
  static constexpr int kRowBlocks = kRowBlocks_;
  static constexpr int kSteps = kSteps_;
  uint32_t words[kSteps][kRowBlocks][4];
};

// sum += A B^T with A (rows, k) in registers and B (columns, k) in shared memory. load_a(step)
// loads A for step `step` of 16 of k. A copy of B is read kReading.ahead copies before it is used:
// a larger number hides more of the latency of shared memory and takes more registers.
template <typename Mma, Operand kB, Reading kReading, typename Sum, typename A, typename B,
          typename LoadA>
HSTU_DEVICE void gemm(Sum& sum, const A& a, const B& b, LoadA load_a) {
  constexpr int kSteps = A::kSteps;
  constexpr int kBlocksPerCopy = Mma::kGroup / 8;
  constexpr int kCopies = Sum::kColumnBlocks / kBlocksPerCopy;  // copies of B per step
  const int thread = bounded_thread_idx<kReading.hides_thread>();
  const OperandReader<Side::kRight, kB, B> reader(b, Mma::first_column(thread), thread % 32);
  uint32_t words_b[kSteps * kCopies][2 * kBlocksPerCopy];

  const auto load_b = [&](int n) {
#pragma unroll
    for (int block = 0; block < kBlocksPerCopy; block += 2) {
      reader.read(Mma::column_offset(n % kCopies * kBlocksPerCopy + block), n / kCopies * 16,
                  words_b[n] + 2 * block);
    }
  };
  load_a(0);
#pragma unroll
  for (int n = 0; n < kReading.ahead && n < kSteps * kCopies; ++n) load_b(n);
#pragma unroll
  for (int n = 0; n < kSteps * kCopies; ++n) {
    const int step = n / kCopies;
    if (n % kCopies == 0 && step + 1 < kSteps) load_a(step + 1);
    if (n + kReading.ahead < kSteps * kCopies) load_b(n + kReading.ahead);
#pragma unroll
    for (int block = 0; block < kBlocksPerCopy; ++block) {
#pragma unroll
      for (int row = 0; row < Sum::kRowBlocks; ++row) {
        Mma::multiply(sum.block(row, n % kCopies * kBlocksPerCopy + block), a.words[step][row],
                      words_b[n] + 2 * block);
      }
    }
  }
}

// Returns a function that reads one step of a left operand from shared memory.
template <typename Mma, Operand kA, bool kHidesThread, typename Tile, typename A>
HSTU_DEVICE auto left_operand_loader(const Tile& tile, A& a) {
  const int thread = bounded_thread_idx<kHidesThread>();
  const OperandReader<Side::kLeft, kA, Tile> reader(tile, Mma::first_row(thread), thread % 32);
  return [reader, &a](int step) {
#pragma unroll
    for (int row = 0; row < A::kRowBlocks; ++row) {
      reader.read(Mma::row_offset(row), step * 16, a.words[step][row]);
    }
  };
}

// gemm() with A also in shared memory.
template <typename Mma, Operand kA, Operand kB, Reading kReading, typename Sum, typename A,
          typename B>
HSTU_DEVICE void gemm(Sum& sum, const A& a, const B& b) {
  constexpr int kSteps = (kA == Operand::kRows ? A::kColumns : A::kRows) / 16;
  LeftOperand<Sum::kRowBlocks, kSteps> words;
  gemm<Mma, kB, kReading>(sum, words, b,
                          left_operand_loader<Mma, kA, kReading.hides_thread>(a, words));
}

// Reads all of a left operand at once, for gemm_registers().
template <typename Mma, Operand kA, typename Tile, typename A>
HSTU_DEVICE void load_left_operand(const Tile& tile, A& a) {
  const auto load = left_operand_loader<Mma, kA, true>(tile, a);
#pragma unroll
  for (int step = 0; step < A::kSteps; ++step) load(step);
}

// gemm() with all of A in registers, from load_left_operand() or as_left_operand().
template <typename Mma, Operand kB, Reading kReading, typename Sum, typename A, typename B>
HSTU_DEVICE void gemm_registers(Sum& sum, const A& a, const B& b) {
  gemm<Mma, kB, kReading>(sum, a, b, [](int) {});
}

// Rounds an accumulator to a left operand: two neighboring 16 x 8 blocks are one 16 x 16 block.
template <typename Element, int kRowBlocks, int kColumnBlocks>
HSTU_DEVICE auto as_left_operand(const Sum<kRowBlocks, kColumnBlocks>& sum) {
  LeftOperand<kRowBlocks, kColumnBlocks / 2> result;
#pragma unroll
  for (int column = 0; column < kColumnBlocks; ++column) {
#pragma unroll
    for (int row = 0; row < kRowBlocks; ++row) {
      const float* block = sum.block(row, column);
      uint32_t* words = result.words[column / 2][row] + column % 2 * 2;
      words[0] = rounded_pair<Element>(block[0], block[1]);
      words[1] = rounded_pair<Element>(block[2], block[3]);
    }
  }
  return result;
}

// Rounds an accumulator and writes it to rows in shared memory.
template <typename Mma, int kRows, int kColumns, typename Sum, typename Element>
HSTU_DEVICE void to_smem(const Sum& sum, Element* data) {
  using Tile = RowsTile<kRows, kColumns, Element>;
  const int thread = bounded_thread_idx();
  const int first = Tile::offset(Mma::first_row(thread) + thread % 32 / 4,
                                 Mma::first_column(thread) + thread % 4 * 2);
#pragma unroll
  for (int column = 0; column < Sum::kColumnBlocks; ++column) {
#pragma unroll
    for (int row = 0; row < Sum::kRowBlocks; ++row) {
      const float* block = sum.block(row, column);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int offset =
            Tile::advance(first, Mma::row_offset(row) + half * 8, Mma::column_offset(column));
        *reinterpret_cast<uint32_t*>(data + offset) =
            rounded_pair<Element>(block[2 * half], block[2 * half + 1]);
      }
    }
  }
}

}  // namespace hstu::sm80
