// Sums dS for the gradients of a relative bias's tables, in the warpgroup that computes the bias.
//
// Both sums are over blocks of 8 x 8 elements. A warp loads four blocks at once, as an A operand of
// mma.sync, and goes along four diagonals of blocks.
//
// Position: all blocks of a diagonal have the same distances, so a product with the identity adds
// them up elementwise. The next tile has the same keys and the next 64 rows, and the warp goes on
// along the same diagonals. A diagonal that leaves the keys is finished, and its sums are added to
// a TableSum.
//
// Time: a product with a column of ones gives the sums of a block's rows, from which each lane gets
// the sum of one block, for time_blocks.h.
//
// fp32 sums are computed in a fixed order, and sums of integers do not depend on the order, so the
// gradients have the same bits in every run.
#pragma once

#include "time_blocks.h"

namespace hstu::sm90 {

// A warp's 8 x 8 sums of two finished diagonals of blocks, which are then added up along the
// diagonals of the 8 x 8 elements.
struct FinishedDiagonals {
  alignas(16) float sums[2][8][8];  // by diagonal, row and key
};

// Shared memory of the warpgroup.
struct TableGradientMemory {
  FinishedDiagonals diagonals[4];  // one per warp
};

template <int kRows, int kKeys, typename Element, bool kIsDescending>
class TableGradients {
  using Memory = TableGradientMemory;
  using Blocks = BlocksOfWarp<kRows, kKeys, kIsDescending>;
  static constexpr int kChunks = Blocks::kChunks;
  static constexpr int kPairs = Blocks::kPairs;
  static constexpr int kRowBlocks = Blocks::kRowBlocks;
  static constexpr uint32_t kAllLanes = 0xffffffff;

 public:
  // Called by all threads of the warpgroup, with a barrier before the next call.
  HSTU_DEVICE TableGradients(int thread, Memory& memory) : thread_(thread), memory_(memory) {}

  // Begins a step. `thread` has the same value as before, but is opaque to the compiler, which
  // would otherwise keep, and spill, all that it derives from the thread index.
  HSTU_DEVICE void set_thread(int thread) { thread_ = thread; }

  // Sums dS of a tile of rows along diagonals, and returns the sum of the lane's block, if
  // kHasTime. If dS of any block of the warp is not finite, the sum of some lane is not finite.
  template <bool kHasPosition, bool kHasTime>
  HSTU_DEVICE float add_tile(const Element* ds) {
    return add_blocks<kHasPosition, kHasTime>(ds);
  }

  // Adds the diagonals that tile m has finished, and goes on to the next tile of rows.
  HSTU_DEVICE void finish(const TableEntries& entries, int m) { finish_tile(entries, m); }

  // add_tile() and finish() for an empty tile.
  HSTU_DEVICE void add_empty_tile(const TableEntries& entries, int m) {
    float (&sums)[4] = diagonals_[kPairs - 1];
    store_finished(0, sums[0], sums[1]);
    store_finished(1, sums[2], sums[3]);
#pragma unroll
    for (float& sum : sums) sum = 0;
    finish_tile(entries, m);
  }

  // The number of empty tiles after which all diagonals are finished.
  static constexpr int kTilesOfDiagonal = kPairs;

 private:
  HSTU_DEVICE int lane() const { return thread_ % 32; }

  static HSTU_DEVICE void multiply(float (&sum)[4], const uint32_t (&left)[4], uint32_t first,
                                   uint32_t second) {
    using Mma = std::conditional_t<std::is_same_v<Element, cutlass::half_t>,
                                   cute::SM80_16x8x16_F32F16F16F32_TN,
                                   cute::SM80_16x8x16_F32BF16BF16F32_TN>;
    Mma::fma(sum[0], sum[1], sum[2], sum[3], left[0], left[1], left[2], left[3], first, second,
             sum[0], sum[1], sum[2], sum[3]);
  }

  // Adds the blocks of a tile to the sums of diagonals, and finds the sum of each block.
  template <bool kHasPosition, bool kHasTime>
  HSTU_DEVICE float add_blocks(const Element* ds) {
    const uint32_t bits = Element(1.0f).raw();
    const uint32_t ones = bits | bits << 16;
    const int warp = thread_ / 32;
    // The identity of 8 x 8 elements: lane 4 g + t has elements 2 t and 2 t + 1 of column g.
    const uint32_t identity = lane() / 8 == lane() % 4 ? bits << lane() / 4 % 2 * 16 : 0;
    // The two diagonals of the last pair end within the tile, and others begin there: the second
    // one at block 4 - warp, the first one at block 8 - warp. before[n] is the identity if blocks n
    // and n + 4 are before these ends; otherwise after[n] is the identity.
    uint32_t before[4], after[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      before[n] = n < 4 - warp ? identity : 0;
      after[n] = n < 4 - warp ? 0 : identity;
    }
    float (&first_part)[4] = diagonals_[kPairs - 1];  // blocks before both ends
    float second_part[4] = {};                        // blocks between the ends
    float third_part[4] = {};                         // blocks after both ends
    // Column n has the sums of the rows of block n of two diagonals.
    float rows[kPairs][4] = {};
    // Lanes 8 q to 8 q + 7 pass the addresses of the rows of block q of four: two of each diagonal
    // of a pair.
    const int own_step = lane() / 16;
    const int group = lane() / 8 % 2 * 4 + warp;
    const uint32_t own_row =
        ptx::shared_address(ds) + Blocks::row_block_of(own_step) * 1024 + lane() % 8 * 128;
#pragma unroll
    for (int n = 0; n < kRowBlocks; n += 2) {
      const uint32_t address = own_row + (kIsDescending ? -n : n) * 1024;
      const int chunk = Blocks::chunk_of(group, n + own_step);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        uint32_t words[4];
        ptx::ldmatrix_x4(address + Blocks::offset_of(pair == 0 ? chunk : chunk ^ 8, lane() % 8),
                         words);
        if constexpr (kHasPosition) {
          if (pair < kPairs - 1) {
            multiply(diagonals_[pair], words, identity, identity);
          } else if (n < 4) {
            multiply(first_part, words, before[n], before[n + 1]);
            multiply(second_part, words, after[n], after[n + 1]);
          } else {
            multiply(second_part, words, before[n - 4], before[n - 3]);
            multiply(third_part, words, after[n - 4], after[n - 3]);
          }
        }
        if constexpr (kHasTime) {
          multiply(rows[pair], words, lane() / 4 == n ? ones : 0, lane() / 4 == n + 1 ? ones : 0);
        }
      }
    }
    if constexpr (kHasPosition) {
      store_finished(0, first_part[0] + second_part[0], first_part[1] + second_part[1]);
      store_finished(1, first_part[2], first_part[3]);
      first_part[0] = third_part[0], first_part[1] = third_part[1];
      first_part[2] = second_part[2] + third_part[2];
      first_part[3] = second_part[3] + third_part[3];
    }
    if constexpr (kHasTime) {
      return sum_of_block(rows);
    } else {
      return 0;
    }
  }

  // Returns the sum of the lane's block, from the sums of the rows of all blocks of the warp. Lane
  // 4 g + t has the sums of row g of blocks 2 t and 2 t + 1 of each diagonal.
  HSTU_DEVICE float sum_of_block(const float (&rows)[kPairs][4]) const {
    float sums[2][2];  // of two diagonals, by two blocks
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if constexpr (kPairs == 2) {
        sums[n / 2][n % 2] = exchange(rows[0][n], rows[1][n], 16);
      } else {
        sums[n / 2][n % 2] = rows[0][n] + __shfl_xor_sync(kAllLanes, rows[0][n], 16);
      }
    }
    const float even = exchange(sums[0][0], sums[1][0], 8);
    const float odd = exchange(sums[0][1], sums[1][1], 8);
    const float sum = exchange(even, odd, 4);
    return __shfl_sync(kAllLanes, sum, (lane() & 24) | (lane() & 1) << 2 | (lane() & 6) >> 1);
  }

  // Stores the sums of the first or the second diagonal of the last pair.
  HSTU_DEVICE void store_finished(int half, float x, float y) {
    float* const to = memory_.diagonals[thread_ / 32].sums[half][lane() / 4] + lane() % 4 * 2;
    *reinterpret_cast<float2*>(to) = {x, y};
  }

  // Adds the diagonals that tile m has finished, and goes on to the next tile of rows, whose
  // distances are kRows smaller, or larger if kIsDescending.
  HSTU_DEVICE void finish_tile(const TableEntries& entries, int m) {
    if constexpr (kPairs == 2) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float sum = diagonals_[0][n];
        diagonals_[0][n] = diagonals_[1][n];
        diagonals_[1][n] = sum;
      }
    }
    __syncwarp();
    const int half = lane() / 16;
    const int distance = lane() % 16 - 7;  // 8: the lane has none
    const float* const from = memory_.diagonals[thread_ / 32].sums[half][0] + distance;
    float sum = 0;
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      if (0 <= distance + row && distance + row < 8) sum += from[row * 9];
    }
    __syncwarp();
    constexpr int kFirst = kIsDescending ? 1 - kRowBlocks : kChunks - kRowBlocks;
    const int block = thread_ / 32 + 4 * half;
    const int own_block = kFirst + (kIsDescending ? kRowBlocks - 1 - block : block);
    // Distances past the ends of the table read its first or its last entry. One lane adds the sum
    // over all distances of such an entry.
    const int last = entries.position_size - 1;
    const int entry = min(max(entries.origin - m * kRows + own_block * 8 + distance, 0), last);
    const uint32_t before = __ballot_sync(kAllLanes, entry == 0);
    const uint32_t after = __ballot_sync(kAllLanes, entry == last);
    if (before | after) {
      const float sum_before = sum_of_warp(entry == 0 ? sum : 0);
      const float sum_after = sum_of_warp(entry == last ? sum : 0);
      if (entry == last) sum = lane() == __ffs(static_cast<int>(after)) - 1 ? sum_after : 0;
      if (entry == 0) sum = lane() == __ffs(static_cast<int>(before)) - 1 ? sum_before : 0;
    }
    entries.sums.position.add(entries.first_position + entry, sum);
  }

  // Each lane has a part of two sums, and owns the second one if its number has `bit`, else the
  // first. Returns its own part plus its partner's part of the sum that it owns.
  HSTU_DEVICE float exchange(float first, float second, int bit) const {
    const bool is_second = lane() & bit;
    const float given = is_second ? first : second;
    return (is_second ? second : first) + __shfl_xor_sync(kAllLanes, given, bit);
  }

  static HSTU_DEVICE float sum_of_warp(float sum) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
    return sum;
  }

  int thread_;
  Memory& memory_;
  // The sums of pairs of diagonals of blocks. The last pair ends within the next tile. The first
  // two values of a pair belong to its first diagonal.
  float diagonals_[kPairs][4] = {};
};

}  // namespace hstu::sm90
