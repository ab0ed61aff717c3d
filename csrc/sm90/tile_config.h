// The tile sizes of the sm90 kernels, with their reasons. A new head dim gets its entries here and
// in ../sm80/tile_config.h, and is listed in HEAD_DIMS of setup.py, and in FP8_HEAD_DIMS if it has
// FP8 kernels.
#pragma once

namespace hstu::sm90 {

constexpr int kSharedMemory = 227 * 1024;  // bytes of shared memory that a block can have
constexpr int kRaggedRows = 1 << 30;       // see tensor_map.h

constexpr int kWarpgroup = 128;     // threads
constexpr int kWarpgroupRows = 64;  // rows of a wgmma

// Where the fp32 totals of a sum of e4m3 products are, see promotion.h: columns in shared memory,
// columns in registers, and the others in device memory, where they stay in the L2 cache.
struct TotalColumns {
  int shared = 0;
  int registers = 0;
};

struct ForwardTiles {
  int consumers;        // warpgroups, with 64 rows each
  int keys;             // of a tile of scores
  int query_stages;     // of Q; with 2, Q of the next work tile is copied early
  int key_stages;       // of K and V
  int bias_stages = 2;  // of a dense bias
  int byte_stages = 0;  // of the bytes of K or V from e4m3 pages
  TotalColumns totals;  // of O in e4m3
};

// Registers per thread, which setmaxnreg moves from the producer to the consumers.
struct Registers {
  int producer = 0;
  int consumer = 0;
  int bias = 0;       // of the warpgroups that compute a relative bias
  int converter = 0;  // of the warpgroup that converts pages of e4m3
};

// Blocks with small_forward_tiles() that share a multiprocessor. Two blocks were slower at head
// dims 64 and 96, where they fit with a stage of K and V less.
constexpr int small_blocks_per_sm(int head_dim) { return head_dim == 32 ? 2 : 1; }

// Splits the registers that a block begins with (65536 / threads, rounded down to a multiple of 8,
// for each thread) so that no role spills; with a converter, few registers spill. Producers that
// look up pages need more registers.
constexpr Registers forward_registers(int head_dim, int consumers, bool is_paged,
                                      bool is_quantized) {
  if (is_quantized && head_dim <= 64) return {.producer = 72, .consumer = 184, .converter = 72};
  if (is_quantized && head_dim == 128) return {.producer = 64, .consumer = 200, .converter = 48};
  if (is_quantized) return {.producer = 56, .consumer = 208, .converter = 40};
  if (is_paged && head_dim <= 64) return {.producer = 88, .consumer = 208};
  if (is_paged) return {.producer = 56, .consumer = 224};
  if (consumers == 1 && small_blocks_per_sm(head_dim) > 1) return {.producer = 40, .consumer = 216};
  if (consumers == 1) return {};  // there are enough, and none are moved
  if (head_dim == 256) return {.producer = 40, .consumer = 232};
  if (consumers == 2) return {.producer = 56, .consumer = 224};
  if (head_dim == 32) return {.producer = 56, .consumer = 152};
  return {.producer = 32, .consumer = 160};
}

// There are three consumers where S, P and O of 64 rows fit into 160 registers, and as many stages
// as fit into shared memory.
template <int kHeadDim, bool kHasBias, bool kHasTimeBias, bool kIsPaged, bool kIsQuantized>
constexpr ForwardTiles forward_tiles() {
  if constexpr (kHeadDim == 32 || kHeadDim == 64) {
    // Two stages of a dense bias take 32 KB for each consumer, patches of a relative one 16 KB.
    if constexpr (kHasBias) {
      // A third consumer, which hides the time to find a relative bias, is worth more than two more
      // stages of K and V, and more than the registers that it takes.
      if constexpr (kHasTimeBias && kHeadDim == 64 && !kIsPaged) {
        return {.consumers = 3, .keys = 128, .query_stages = 2, .key_stages = 3};
      }
      return {.consumers = 2, .keys = 128, .query_stages = 2, .key_stages = 4};
    }
    if constexpr (kIsQuantized) {
      return {.consumers = 2, .keys = 128, .query_stages = 2, .key_stages = 3, .byte_stages = 8};
    }
    // Producers that look up pages take the registers of a third consumer. Pages arrive late, often
    // from device memory, so more stages are in flight.
    if constexpr (kIsPaged) {
      return {.consumers = 2, .keys = 128, .query_stages = 2, .key_stages = 6};
    }
    return {.consumers = 3, .keys = 128, .query_stages = 2, .key_stages = 4};
  } else if constexpr (kHeadDim == 128) {
    if constexpr (kHasBias) {
      return {.consumers = 2, .keys = 128, .query_stages = 1, .key_stages = 2};
    }
    // A third stage of K and V, or stages of bytes, are worth more than a second stage of Q.
    if constexpr (kIsQuantized) {
      return {.consumers = 2, .keys = 128, .query_stages = 1, .key_stages = 2, .byte_stages = 3};
    }
    if constexpr (kIsPaged) {
      return {.consumers = 2, .keys = 128, .query_stages = 1, .key_stages = 3};
    }
    return {.consumers = 2, .keys = 128, .query_stages = 2, .key_stages = 2};
  } else if constexpr (kHeadDim == 96 && !kHasBias && !kIsPaged) {
    return {.consumers = 2, .keys = 128, .query_stages = 2, .key_stages = 3};
  } else if constexpr (kHeadDim == 192 && !kHasBias && !kIsPaged) {
    return {.consumers = 2, .keys = 64, .query_stages = 1, .key_stages = 3};
  } else if constexpr (kHeadDim == 256) {
    // O takes 128 registers, and a stage of K or V takes 32 KB for 64 keys.
    return {.consumers = 2,
            .keys = 64,
            .query_stages = 1,
            .key_stages = 2,
            .byte_stages = kIsQuantized ? 2 : 0};
  } else {
    static_assert(kHeadDim == 0,
                  "sm90/tile_config.h: forward_tiles has no entry for this head dim");
  }
}

// The tiles for batches whose work tiles are all resident at once with 64 rows a block, so that
// more blocks share the work. A tile has as many keys as usual, so that sums have the same order.
template <int kHeadDim>
constexpr ForwardTiles small_forward_tiles() {
  if constexpr (kHeadDim <= 64) {
    return {.consumers = 1, .keys = 128, .query_stages = 1, .key_stages = 4};
  } else {
    return {.consumers = 1, .keys = kHeadDim > 128 ? 64 : 128, .query_stages = 1, .key_stages = 3};
  }
}

// The tiles of e4m3, where a key tile is a block of Fp8Params.
template <int kHeadDim, bool kHasHalfSums, bool kHasBias>
constexpr ForwardTiles fp8_tiles() {
  if constexpr (kHeadDim == 64) {
    if constexpr (kHasBias) {
      return {.consumers = 3, .keys = 128, .query_stages = 2, .key_stages = 5};
    }
    // S in fp16 takes 32 registers less, which lets a fourth consumer fit.
    return {.consumers = kHasHalfSums ? 4 : 3,
            .keys = 128,
            .query_stages = 2,
            .key_stages = kHasHalfSums ? 5 : 8,
            .totals = {.shared = 64}};
  } else if constexpr (kHeadDim == 128) {
    // The totals of three consumers take the memory of two stages.
    if constexpr (kHasHalfSums) {
      return {.consumers = 3,
              .keys = 128,
              .query_stages = 2,
              .key_stages = 2,
              .totals = {.shared = 128}};
    }
    return {.consumers = 2,
            .keys = 128,
            .query_stages = 2,
            .key_stages = kHasBias ? 3 : 4,
            .totals = {.registers = kHasBias ? 0 : 128}};
  } else if constexpr (kHeadDim == 256) {
    // Totals are worth more than a second stage of Q. S in fp16 leaves registers for some totals.
    return {.consumers = 2,
            .keys = 128,
            .query_stages = 1,
            .key_stages = 2,
            .bias_stages = 1,
            .totals = {.shared = kHasBias ? 0 : 112, .registers = kHasHalfSums ? 32 : 0}};
  } else {
    static_assert(kHeadDim == 0, "sm90/tile_config.h: fp8_tiles has no entry for this head dim");
  }
}
// The tiles for E4m3PagedKeys, or those of its batches of few rows. Each of the two warps that
// transpose V uses every second of the stages of bytes. Their number must be even: with an odd
// number, a warp would miss phases of their barriers.
template <int kHeadDim, bool kIsSmall>
constexpr ForwardTiles fp8_paged_tiles() {
  if constexpr (kHeadDim == 64) {
    return {.consumers = kIsSmall ? 2 : 3,
            .keys = 128,
            .query_stages = 2,
            .key_stages = 6,
            .byte_stages = 8,
            .totals = {.shared = 64}};
  } else if constexpr (kHeadDim == 128) {
    return {.consumers = kIsSmall ? 2 : 3,
            .keys = 128,
            .query_stages = 1,
            .key_stages = 3,
            .byte_stages = 4,
            .totals = {.shared = 72}};
  } else {
    static_assert(kHeadDim == 256 && !kIsSmall,
                  "sm90/tile_config.h: fp8_paged_tiles has no entry for this head dim");
    return {.consumers = 2,
            .keys = 128,
            .query_stages = 1,
            .key_stages = 2,
            .byte_stages = 2,
            .totals = {.shared = 40}};
  }
}
constexpr Registers fp8_paged_registers(int head_dim, int consumers) {
  if (head_dim == 256) return {.producer = 88, .consumer = 208};
  if (consumers == 2) return {.producer = 80, .consumer = 208};
  if (head_dim == 128) return {.producer = 56, .consumer = 152};
  return {.producer = 80, .consumer = 144};
}

constexpr Registers fp8_registers(int head_dim, int consumers, bool has_time_bias) {
  if (has_time_bias && consumers == 3) return {.producer = 56, .consumer = 152};
  if (consumers == 4) return {.producer = 32, .consumer = 112};
  if (head_dim == 256) return {.producer = 24, .consumer = 240};
  if (consumers == 2) return {.producer = 40, .consumer = 232};
  return {.producer = 32, .consumer = 160};
}

// Returns how many of each 4 pairs of fp16 scores get their tanh from a polynomial on the FMA
// units, while the MUFU units compute the tanh of the others.
constexpr int fp8_polynomial_quarters(int head_dim, bool is_paged) {
  return is_paged && head_dim == 256 ? 0 : 1;
}

// Sizes of the clusters whose blocks divide the keys of a tile of rows, with a paged cache. 8 is
// the largest size that every GPU supports.
constexpr int kClusterSizes[] = {8, 4};

// Split-KV through device memory: the measured time to store and to add a partial O, and to make
// the work list before, as the number of keys that would be processed in that time.
constexpr int kMaxSplits = 8;
constexpr int keys_to_store_partial(int head_dim) { return head_dim == 256 ? 128 : 320; }
constexpr int kKeysToAddPartial = 128;
constexpr int kKeysToMakeList = 384;

// Rows of a step of the backward: a warpgroup that holds dK and dV of 64 keys has no registers for
// S and dP of more rows.
constexpr int kBackwardRows = 64;
constexpr int kBackwardKeys = 128;  // of a tile of keys in 16 bits

// In e4m3, the rows after which dK and dV are added to totals in fp32: see promotion.h. With half
// as many the backward takes some percent longer.
constexpr int kPromotedRows = 2048;
// The totals of dK, and of dV: as many as fit into shared memory, and into registers without
// spills.
constexpr TotalColumns fp8_backward_totals(int head_dim) {
  return {.shared = head_dim == 128 ? 24 : 0, .registers = 16};
}

// Splits the registers of the backward. A producer that computes masks needs up to 88 of them.
// Otherwise accumulators and scores take all that a consumer can have, and producers get the least
// that they need.
constexpr Registers backward_registers(bool producer_finds_mask) {
  if (producer_finds_mask) return {.producer = 88, .consumer = 208};
  return {.producer = 24, .consumer = 240};
}

// Warpgroups of the backward that compute a relative bias: two where consumers leave registers for
// the second.
constexpr int backward_bias_warpgroups(int head_dim, bool has_time) {
  return has_time && head_dim <= 64 ? 2 : 1;
}

// backward_registers() with a relative bias. The warpgroups that compute the bias spill registers.
constexpr Registers backward_registers_with_bias(int head_dim, bool has_time) {
  if (!has_time) return {.producer = 24, .consumer = 216, .bias = 56};
  if (head_dim <= 64) return {.producer = 24, .consumer = 160, .bias = 64};
  if (head_dim == 128) return {.producer = 24, .consumer = 208, .bias = 72};
  return {.producer = 24, .consumer = 200, .bias = 88};
}

}  // namespace hstu::sm90
