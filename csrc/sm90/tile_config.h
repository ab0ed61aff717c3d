// Every tile number of the sm90 kernels, each with its reason. A new head dim gets its numbers here
// and in ../sm80/tile_config.h, and is listed in HEAD_DIMS of setup.py.
#pragma once

namespace hstu::sm90 {

constexpr int kSharedMemory = 227 * 1024;  // bytes that a block has
constexpr int kRaggedRows = 1 << 30;       // see tensor_map.h

constexpr int kWarpgroup = 128;     // threads
constexpr int kWarpgroupRows = 64;  // of scores that a consumer warpgroup holds: a wgmma's

struct ForwardTiles {
  int consumers;     // warpgroups, each with rows of its own
  int keys;          // of a tile of scores
  int query_stages;  // of Q: 2 where there is room, so that the next item's waits already
  int key_stages;    // of K and V
};

// Registers of a thread: setmaxnreg moves them from the producer to the consumers.
struct Registers {
  int producer;
  int consumer;
};

// The 64 K registers of a multiprocessor over all threads, in steps of 8: a block gets what it
// begins with, and no more adds up. Of what does, what spills in no role; producers that look for
// pages need more.
constexpr Registers forward_registers(int head_dim, int consumers, bool is_paged,
                                      bool is_quantized) {
  if (is_paged && head_dim <= 64) return {88, 208};
  if (is_quantized) return head_dim == 128 ? Registers{88, 208} : Registers{72, 216};
  if (is_paged) return {56, 224};
  if (head_dim == 256) return {40, 232};
  if (consumers == 2) return {56, 224};
  if (head_dim == 32) return {56, 152};
  return {32, 160};
}

// Three consumers where scores, P and O of 64 rows fit into 160 registers, two elsewhere. 128 keys,
// but at head dim 256, whose O takes 128 registers and whose stages of K and V take 32 KB each for
// 64 keys. As many stages as find room: a dense bias takes two of 16 KB for each consumer.
// Producers that look for pages need registers of those of a third consumer, too. Pages come late,
// often from device memory, so more of them are on their way at once: at head dim 128 that is worth
// more than a second stage of Q. A cache of e4m3 has no room for it beside its scales.
template <int kHeadDim, bool kHasBias, bool kIsPaged, bool kIsQuantized>
constexpr ForwardTiles forward_tiles() {
  if constexpr (kHeadDim == 32 || kHeadDim == 64) {
    if constexpr (kHasBias) return {2, 128, 2, 4};
    if constexpr (kIsPaged) return {2, 128, 2, kIsQuantized ? 4 : 6};
    return {3, 128, 2, 4};
  } else if constexpr (kHeadDim == 128) {
    if constexpr (kHasBias) return {2, 128, 1, 2};
    if constexpr (kIsPaged && !kIsQuantized) return {2, 128, 1, 3};
    return {2, 128, 2, 2};
  } else if constexpr (kHeadDim == 256) {
    return {2, 64, 1, 2};
  } else {
    static_assert(kHeadDim == 0,
                  "sm90/tile_config.h: forward_tiles has no entry for this head dim");
  }
}

// Of a cluster's blocks that share a tile of rows, with a paged cache. 8 is the most that every GPU
// lets a cluster have.
constexpr int kLargeCluster = 8;
constexpr int kSmallCluster = 4;

// Of the items that share a tile of rows: what it takes to leave a sum, and to add one, in keys
// that would be multiplied meanwhile (measured).
constexpr int kMaxSplits = 8;
constexpr int keys_to_store_partial(int head_dim) { return head_dim == 256 ? 128 : 320; }
constexpr int kKeysToAddPartial = 128;

// Of a step: with dK and dV of 64 keys, S and dP of more rows find no room in a warpgroup.
constexpr int kBackwardRows = 64;

// As for the forward. A producer that looks at masks takes up to 88; where sums and scores take all
// that a consumer can have, producers keep the least that they do with.
constexpr Registers backward_registers(bool producer_finds_mask) {
  if (producer_finds_mask) return {88, 208};
  return {24, 240};
}

}  // namespace hstu::sm90
