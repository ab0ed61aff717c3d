// Each warp that sums the gradients of a relative bias's tables reads some blocks of a tile of dS.
// BlocksOfWarp maps threads to blocks, and blocks to their places in shared memory.
#pragma once

#include <cstdint>

#include "../common/macros.h"

namespace hstu::sm90 {

// The blocks of 8 x 8 elements of a tile of dS that a warp has: four diagonals of 8 blocks, or two.
// Block n of a diagonal has the 8 rows from 8 n on and chunk (group + n) % kChunks of 8 keys. If
// kIsDescending, both rows and chunks are counted from the end.
template <int kRows, int kKeys, bool kIsDescending>
struct BlocksOfWarp {
  static constexpr int kChunks = kKeys / 8;   // of a row
  static constexpr int kPairs = kChunks / 8;  // of diagonals
  static constexpr int kRowBlocks = kRows / 8;
  static_assert(kRowBlocks == 8 && (kChunks == 8 || kChunks == 16));

  // Lane 8 d + n has block n of diagonal d. With 8 chunks, half of the lanes have a block.
  static HSTU_DEVICE bool has_block(int lane) { return kPairs == 2 || lane < 16; }
  // NOTE: the diagonals of a warp are 4 blocks apart, so that each warp has some of the blocks with
  // many buckets, which are next to each other.
  static HSTU_DEVICE int group_of(int thread) {
    return thread % 32 / 8 % (2 * kPairs) * 4 + thread / 32;
  }
  static HSTU_DEVICE int row_block_of(int n) { return kIsDescending ? kRowBlocks - 1 - n : n; }
  static HSTU_DEVICE int chunk_of(int group, int n) {
    return (kIsDescending ? kChunks - 1 - group - n : group + n) & (kChunks - 1);
  }

  // The offset in bytes of a chunk of 8 keys in row r of 8.
  static HSTU_DEVICE uint32_t offset_of(int chunk, int r) {
    return (chunk & 8) * (kRows * 16) + ((chunk ^ r) & 7) * 16;
  }

  // Row `first` + `r` of a chunk of 8 keys in a tile of dS, in the layout of rows_tensor();
  // `first` is a multiple of 8. `from` points to row r.
  template <typename Element>
  static HSTU_DEVICE const uint4* chunk_at(const Element* from, int first, int r, int chunk) {
    return reinterpret_cast<const uint4*>(from + first * 64 + (chunk & 8) * (kRows * 8) +
                                          ((chunk ^ r) & 7) * 8);
  }
};

}  // namespace hstu::sm90
