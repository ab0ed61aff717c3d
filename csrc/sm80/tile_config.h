// The tile sizes of the sm80 kernels, with their reasons. A new head dim gets its entries here and
// in ../sm90/tile_config.h, and is listed in HEAD_DIMS of setup.py.
#pragma once

namespace hstu::sm80 {

// Shared memory that a block can have: 99 KB on GPUs of compute capability 8.6, 8.9 and 12.0, 163
// KB on 8.0 and 227 KB on 9.0. A kernel that needs more than kSmallMemory has a second, smaller
// form for GPUs with 99 KB.
constexpr int kSmallMemory = 99 * 1024;

// The tile sizes of a kernel: for most calls, for GPUs with 99 KB of shared memory, and for batches
// of short sequences, with at most 32, 64 or 512 rows and keys (forward: kUpTo512, backward:
// kCluster).
//
// With short sequences, a block has one sequence and head, or one tile of its rows (kUpTo512). It
// needs no work list, so no kernel runs before it. Blocks are small, so that many of them hide each
// other's latency. Most blocks have all keys in one tile. In the backward, kUpTo64 is also for many
// sequences of up to 128 tokens, with two tiles of keys, and kCluster has a cluster of blocks for a
// sequence. In one form for both, calls of up to 64 tokens took 0.7 to 1.5 us longer on an H200.
enum class Tiling { kLarge, kSmallMemory, kUpTo32, kUpTo64, kUpTo512, kCluster };

// The most blocks of a cluster for a sequence in the backward; larger clusters are not portable.
constexpr int kMaxClusterOfSequence = 8;

constexpr bool is_for_short_sequences(Tiling tiling) { return tiling >= Tiling::kUpTo32; }

// The bias that is added to Q K^T: none, a matrix, or one computed from tables.
enum class ScoreBias { kNone, kDense, kRelative };

// Tells how a product reads its operands from shared memory.
struct Reading {
  int ahead;          // copies of the right operand in flight; as many as registers allow
  bool hides_thread;  // uses opaque_thread_idx(): avoids spills, but costs time
};

struct ForwardTiles {
  int rows;  // of a tile of scores
  int keys;
  // Each warp has rows / warps rows. With 32 rows it reads K and V half as often as with 16, but at
  // head dim 256, O of 16 rows already takes 128 registers.
  int warps;
  int blocks_per_sm;  // limited by registers
  Reading reading;
  bool keeps_q = false;  // keeps Q in registers: it is not read again per key tile
};

// Entries are {rows, keys, warps, blocks_per_sm, {ahead, hides_thread}, keeps_q}.
template <int kHeadDim, Tiling kTiling, bool kHasBias>
constexpr ForwardTiles forward_tiles() {
  if constexpr (kTiling == Tiling::kUpTo32) {
    if constexpr (kHeadDim == 32) return {32, 32, 1, 16, {2, false}};
    if constexpr (kHeadDim == 64) return {32, 32, 2, kHasBias ? 9 : 10, {2, false}};
    if constexpr (kHeadDim == 128) return {32, 32, 2, 7, {2, true}};
    return {32, 32, 2, 4, {2, true}};
  } else if constexpr (kTiling == Tiling::kUpTo64) {
    if constexpr (kHeadDim == 128) return {64, 64, 4, 3, {2, true}};
    return {64, 64, 4, 2, {2, true}};
  } else if constexpr (kTiling == Tiling::kUpTo512) {
    if constexpr (kHeadDim <= 64) return {64, 64, 4, 4, {2, false}};
    return {64, 64, 4, 2, {2, true}};
  } else if constexpr (kHeadDim == 32) {
    return {128, 64, 4, 2, {4, false}};
  } else if constexpr (kHeadDim == 64) {
    return {128, 64, 4, 2, {2, false}};
  } else if constexpr (kHeadDim == 128) {
    if constexpr (kHasBias) return {128, 64, 4, 2, {1, true}};
    return {128, 64, 4, 2, {2, true}};
  } else if constexpr (kHeadDim == 256) {
    // Two blocks of 64 rows are faster than one of 128 rows, whose warps wait for one barrier.
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
  int blocks_per_sm;    // limited by registers
  int stages;           // of Q and dO
  int score_row_warps;  // S and dP: warps along the rows; warps / this along the keys
  int key_warps;        // dK and dV: warps along the keys; warps / this along the head dim
  int row_warps;        // dQ: warps along the rows; warps / this along the head dim
  Reading reading;
};

// Entries are {rows, keys, warps, blocks_per_sm, stages, score_row_warps, key_warps, row_warps,
// {ahead, hides_thread}}.
template <int kHeadDim, Tiling kTiling, bool kIsDeterministic>
constexpr BackwardTiles backward_tiles() {
  constexpr bool kLarge = kTiling == Tiling::kLarge;
  if constexpr (kTiling == Tiling::kUpTo32) {
    if constexpr (kHeadDim == 32) return {32, 32, 2, 8, 1, 2, 2, 2, {2, true}};
    if constexpr (kHeadDim == 64) return {32, 32, 4, 5, 1, 2, 2, 2, {2, true}};
    if constexpr (kHeadDim == 128) return {32, 32, 4, 3, 1, 2, 2, 2, {2, true}};
    return {32, 32, 4, 2, 1, 2, 2, 2, {2, true}};
  } else if constexpr (kTiling == Tiling::kUpTo64 || kTiling == Tiling::kCluster) {
    if constexpr (kHeadDim == 32) return {64, 64, 4, 3, 1, 4, 4, 4, {2, true}};
    if constexpr (kHeadDim == 64) return {64, 64, 4, 3, 1, 4, 4, 4, {2, true}};
    if constexpr (kHeadDim == 128) return {64, 64, 4, 2, 1, 2, 4, 4, {1, true}};
    return {64, 64, 8, 1, 1, 4, 2, 2, {2, true}};
  } else if constexpr (kHeadDim == 32) {
    if constexpr (kLarge) return {128, 128, 8, 1, 2, 4, 8, 8, {2, true}};
    return {64, 128, 8, 1, 2, 2, 8, 4, {2, true}};
  } else if constexpr (kHeadDim == 64) {
    // A key tile twice as large halves the additions to dQ that wait for dq_semaphore.
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
