// Sums of dS for the gradients of a relative bias's tables, by the warpgroup that computes the
// bias.
//
// Both sums are over blocks of 8 x 8 elements. A warp loads four of them at once, in the order of a
// right operand of mma.sync, and goes along four diagonals of blocks.
//
// Position: all blocks of a diagonal have the same distances, so a product with the identity adds
// them up elementwise. The next tile has the same keys and the next 64 rows, and the warp goes on
// along the same diagonals. One that leaves the keys is finished, and its sums are added to a
// TableSum.
//
// Time: a product with ones in a row gives the sums of a block's columns, and so each lane gets the
// sum of all of one block, for time_blocks.h.
//
// fp32 sums are found in a fixed order, and no order changes the sums of integers, so all bits of
// the gradients are the same in every run.
#pragma once

#include "time_blocks.h"

namespace hstu::sm90 {

// A warp's sums of two diagonals of 8 x 8 blocks that are finished, to be added up along their own
// diagonals.
struct FinishedDiagonals {
  alignas(16) float sums[2][8][8];  // by diagonal, row and key
};

// Shared memory of the warpgroup.
struct TableGradientMemory {
  FinishedDiagonals diagonals[4];  // of the warps
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

  // Begins a step. `thread` is as before, but a value that the compiler knows nothing about: it
  // would keep, and spill, what follows from it for all steps.
  HSTU_DEVICE void set_thread(int thread) { thread_ = thread; }

  // Sums dS of a tile of rows along diagonals, and returns the sum of the lane's block, if
  // kHasTime. If dS of any block of the warp is not finite, the sum of some lane is not.
  template <bool kHasPosition, bool kHasTime>
  HSTU_DEVICE float add_tile(const Element* ds) {
    return add_blocks<kHasPosition, kHasTime>(ds);
  }

  // Adds the diagonals that tile m has finished, and goes on to the next tile of rows.
  HSTU_DEVICE void finish(const TableEntries& entries, int m) { finish_tile(entries, m); }

  // The same for an empty tile.
  HSTU_DEVICE void add_empty_tile(const TableEntries& entries, int m) {
    store_finished(0);
    store_finished(1);
    finish_tile(entries, m);
  }

  // After as many empty tiles, all diagonals are finished.
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
    // The identity: lane 4 g + t has elements 2 t and 2 t + 1 of row g, and of row g + 8.
    const uint32_t one = lane() / 8 == lane() % 4 ? bits << lane() / 4 % 2 * 16 : 0;
    const uint32_t identity[4] = {one, 0, 0, one};
    // Rows n and n + 8 are the sums of the columns of block n of two diagonals.
    float columns[kPairs][4] = {};
    // Lanes 8 q to 8 q + 7 pass the addresses of block q of four: one of each diagonal, or two.
    constexpr int kStep = 2 / kPairs;
    const int own_step = kPairs == 2 ? 0 : lane() / 16;
    const Element* const own_row = ds + lane() % 8 * 64;
    const int group = Blocks::group_of(thread_);
    const int warp = thread_ / 32;
#pragma unroll
    for (int n = 0; n < kRowBlocks; n += kStep) {
      const int own = n + own_step;
      uint32_t words[4];
      cute::SM75_U16x8_LDSM_T::copy(
          *reinterpret_cast<const cute::uint128_t*>(Blocks::chunk_at(
              own_row, Blocks::row_block_of(own) * 8, lane() % 8, Blocks::chunk_of(group, own))),
          words[0], words[1], words[2], words[3]);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int block = n + pair / kPairs;
        const int first = pair * 2;
        if constexpr (kHasPosition) {
          if (pair == 0 || kPairs == 1) {
            // Two diagonals of the last pair end within the tile, and others begin.
            if (block == 4 - warp) store_finished(1);
            if (block == 8 - warp) store_finished(0);
          }
          multiply(diagonals_[pair % kPairs], identity, words[first], words[first + 1]);
        }
        if constexpr (kHasTime) {
          const uint32_t ones_of_row = lane() / 4 == block ? ones : 0;
          const uint32_t left[4] = {ones_of_row, 0, 0, ones_of_row};
          multiply(columns[pair % kPairs], left, words[first], words[first + 1]);
        }
      }
    }
    if (kHasPosition && warp == 0) store_finished(0);
    if constexpr (kHasTime) {
      return sum_of_block(columns);
    } else {
      return 0;
    }
  }

  // Returns the sum of the lane's block, from the sums of the columns of all blocks of the warp.
  HSTU_DEVICE float sum_of_block(const float (&columns)[kPairs][4]) const {
    // Lane 4 n + t gets the sum of block n of diagonal t, and hands it to lane 8 t + n.
    float sums[2];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      sums[pair] =
          exchange(columns[pair][0] + columns[pair][1], columns[pair][2] + columns[pair][3], 1);
    }
    float sum;
    if constexpr (kPairs == 2) {
      sum = exchange(sums[0], sums[1], 2);
    } else {
      sum = sums[0] + __shfl_xor_sync(kAllLanes, sums[0], 2);
    }
    return __shfl_sync(kAllLanes, sum, lane() % 8 * 4 + lane() / 8);
  }

  // Stores the sums of the first or the second diagonal of the last pair, and begins another.
  HSTU_DEVICE void store_finished(int half) {
    float (&sums)[4] = diagonals_[kPairs - 1];
    float* const to = memory_.diagonals[thread_ / 32].sums[half][lane() / 4] + lane() % 4 * 2;
    *reinterpret_cast<float2*>(to) = {sums[half * 2], sums[half * 2 + 1]};
    sums[half * 2] = sums[half * 2 + 1] = 0;
  }

  // Adds the diagonals that tile m has finished, and goes on to the next tile of rows, whose
  // distances are those of this one less kRows, or more.
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
    const int distance = lane() % 16 - 7;  // 8 is none
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
    // Distances past the ends of the table share its first and its last entry, to which one lane
    // adds their sum.
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

  // Each lane has a part of two sums. Returns that of its own one and its partner's part of it:
  // lanes whose number has the bit own the second.
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
  // The sums of pairs of diagonals of blocks, of which the last pair ends within the next tile.
  // The sums of the first diagonal of a pair are in the first two numbers.
  float diagonals_[kPairs][4] = {};
};

}  // namespace hstu::sm90
