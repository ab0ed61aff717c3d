// Every tile number of the sm80 kernels, each with its reason. A new head dim gets its numbers here
// and in ../sm90/tile_config.h, and is listed in HEAD_DIMS of setup.py.
#pragma once

namespace hstu::sm80 {

// GPUs of compute capability 8.6, 8.9 and 12.0 give a block 99 KB of shared memory, 8.0 gives 163
// and 9.0 gives 227. A kernel that needs more than kSmallMemory has a second form for them.
constexpr int kSmallMemory = 99 * 1024;

enum class Memory { kLarge, kSmall };

// How a product reads its operands from shared memory.
struct Reading {
  int ahead;          // copies of the right operand in flight: as many as registers allow
  bool hides_thread;  // opaque_thread_idx(): where registers would spill; elsewhere it costs time
};

struct ForwardTiles {
  int rows;  // of a tile of scores
  int keys;
  int warps;          // each takes rows / warps rows: 32 halve what K and V cost to be read, 16 fit
                      // where the output takes 128 registers for 16 rows (head dim 256)
  int blocks_per_sm;  // by registers
  Reading reading;
  bool keeps_q = false;  // in registers: not read again for each tile of keys
};

template <int kHeadDim, Memory kMemory, bool kHasBias>
constexpr ForwardTiles forward_tiles() {
  if constexpr (kHeadDim == 32) {
    return {128, 64, 4, 2, {4, false}};
  } else if constexpr (kHeadDim == 64) {
    return {128, 64, 4, 2, {2, false}};
  } else if constexpr (kHeadDim == 128) {
    if constexpr (kHasBias) return {128, 64, 4, 2, {1, true}};
    return {128, 64, 4, 2, {2, true}};
  } else if constexpr (kHeadDim == 256) {
    // Two blocks of 64 rows are faster than one of 128, whose warps wait for the same barriers.
    return {64, 32, 4, 2, {2, true}, true};
  } else {
    static_assert(kHeadDim == 0,
                  "sm80/tile_config.h: forward_tiles has no entry for this head dim");
  }
}

struct BackwardTiles {
  int rows;
  int keys;
  int warps;
  int blocks_per_sm;    // by registers
  int stages;           // of Q and dO
  int score_row_warps;  // of the warps: along the rows of S and dP, the rest along the keys
  int key_warps;        // along the keys of dK and dV, the rest along the head dim
  int row_warps;        // along the rows of dQ, the rest along the head dim
  Reading reading;
};

template <int kHeadDim, Memory kMemory, bool kIsDeterministic>
constexpr BackwardTiles backward_tiles() {
  constexpr bool kLarge = kMemory == Memory::kLarge;
  if constexpr (kHeadDim == 32) {
    return {128, 128, 8, 1, 2, 4, 8, 8, {2, true}};
  } else if constexpr (kHeadDim == 64) {
    // A key tile twice as large halves the sums of dQ that wait for their turn.
    if constexpr (kLarge && kIsDeterministic) return {128, 128, 8, 1, 2, 4, 4, 4, {2, true}};
    if constexpr (kLarge) return {128, 64, 4, 2, 2, 4, 2, 4, {2, true}};
    return {64, 128, 8, 1, 2, 2, 4, 4, {2, true}};
  } else if constexpr (kHeadDim == 128) {
    if constexpr (kLarge) return {64, 128, 8, 1, 2, 2, 4, 2, {2, true}};
    return {64, 64, 8, 1, 1, 4, 4, 4, {2, true}};
  } else if constexpr (kHeadDim == 256) {
    if constexpr (kLarge) return {64, 64, 8, 1, 1, 4, 2, 2, {2, true}};
    return {32, 32, 4, 1, 1, 2, 2, 2, {2, true}};
  } else {
    static_assert(kHeadDim == 0,
                  "sm80/tile_config.h: backward_tiles has no entry for this head dim");
  }
}

}  // namespace hstu::sm80
