// The relative bias of the forward. Consumers add weights by position as position_score_bias.h
// says, compute weights by time themselves while the products of a tile run, and add them to S.
//
// A warp has 16 rows, so that 128 keys are 32 blocks of 8 x 8 scores, one for each lane. The lane
// finds the buckets of its block from the ranges of times of the rows and keys. A block with one
// bucket has one weight; the warp computes a patch of 64 weights in fp16 for each other block.
#pragma once

#include "../common/mask.h"
#include "../common/opaque.h"
#include "../common/ptx.h"
#include "../common/relative_bias.h"
#include "../scheduler/work_list.h"
#include "pipeline.h"
#include "position_score_bias.h"

namespace hstu::sm90 {

// The cells of time differences below 2^31.
struct NarrowCells {
  NarrowCell cells[kNarrowCells];
};

// A block of 8 x 8 scores that has several buckets.
struct alignas(16) MixedBlock {
  uint32_t threshold;  // differences from here on are in the second bucket
  float low;           // weights of the first and the second bucket
  float high;
  int index;  // number of the block
};

// The weights by time of 16 rows of a tile, which the consumer warp of these rows computes.
template <int kKeys>
struct RelativeBiasOfWarp {
  static constexpr int kBlocks = kKeys / 4;  // of 8 x 8 scores

  // Word `lane` of a block has the weights of the two scores that the lane has in an accumulator.
  uint32_t patches[kBlocks][32];
  // Weights of blocks with one bucket, multiplied by alpha / 2; zero for blocks that have patches.
  float weights[kBlocks];
  // Blocks that have patches: those with two buckets from the front, the others from the back.
  MixedBlock mixed[kBlocks];

  // The number of the block of rows [8 m, 8 m + 8) and keys [8 chunk, 8 chunk + 8). Lane n finds
  // the buckets of block n.
  static HSTU_DEVICE constexpr int block_of(int m, int chunk) {
    return chunk / 8 * 16 + m * 8 + chunk % 8;
  }
  static HSTU_DEVICE int rows_of(int block) { return block / 8 % 2; }
  static HSTU_DEVICE int chunk_of(int block) { return block / 16 * 8 + block % 8; }
};

// The weights by time of one head.
struct TimeWeights {
  const float* weights;  // of buckets
  const WeightCell* cells;

  HSTU_DEVICE TimeWeights(const RelativeBias& bias, int heads, int head) {
    const int table_head = head / (heads / bias.time.heads);
    weights = bias.prepared.time + table_head * bias.time.size;
    cells = bias.prepared.weight_cells + table_head * kDifferenceCells;
  }
};

// The producer's part. It copies the window of each key tile, and the cells of the head of each
// work tile, by bulk copies that complete on the barriers of K and Q.
template <typename Traits>
class RelativeBiasProducer {
  using SharedMemory = typename Traits::SharedMemory;
  using Source = typename Traits::Source;
  using WorkTile = typename Traits::WorkTile;
  using Window = typename Traits::BiasWindow;
  static constexpr int kKeys = Traits::kKeys;

 public:
  // Starts copying the window of the key tile that begins with padded key `first`. Called by all
  // threads that copy K, after K of the tile is being copied.
  HSTU_DEVICE void load(const ForwardParams& params, const typename Traits::Maps&,
                        SharedMemory& smem, const WorkTile& work_tile, int first,
                        typename Traits::KVState state) {
    const RelativeBias& bias = params.relative_bias;
    const Sequence& sequence = work_tile.tile.sequence;
    auto& full = smem.pipeline_k.full[state.index()];
    Window& window = smem.bias_windows[Traits::bias_window(state)];
    const int key = Source::template key_of<kKeys>(sequence, first);
    const KeyBlockTimes* const blocks =
        bias.prepared.time_blocks + first_tile(sequence.k_begin, work_tile.tile.sequence_index, 8) +
        key / 8;
    bool is_copied = bias.time.data != nullptr;
    if constexpr (Source::kIsPaged) {
      if (is_copied && key % 8 != 0) {
        store_shifted(blocks, key, sequence.k_len, window);
        is_copied = false;
      }
    }
    if (!Source::is_leader()) {
      if (Traits::kBiasArrivals > 1) full.arrive();
      return;
    }
    full.arrive_and_expect_tx((is_copied ? Window::kTimeBytes : 0) +
                              (bias.position.data ? Window::Position::kBytes : 0));
    if (is_copied) {
      cute::SM90_BULK_COPY_G2S::copy(blocks, reinterpret_cast<uint64_t*>(&full), window.times,
                                     Window::kTimeBytes);
    }
    if (bias.position.data)
      start_copy_position<Traits>(params, work_tile, key, window.position, full);
  }

  // Starts copying the cells of a work tile's head. Called by one thread.
  static HSTU_DEVICE void load_cells(const ForwardParams& params, SharedMemory& smem,
                                     const WorkTile& work_tile, typename Traits::QState state) {
    const RelativeBias& bias = params.relative_bias;
    auto& full = smem.pipeline_q[0].full[state.index()];
    if (!bias.time.data) {
      full.arrive();
      return;
    }
    const int table_head = work_tile.head / (params.heads / bias.time.heads);
    full.arrive_and_expect_tx(sizeof(NarrowCells));
    cute::SM90_BULK_COPY_G2S::copy(bias.prepared.narrow_cells + table_head * kNarrowCells,
                                   reinterpret_cast<uint64_t*>(&full),
                                   smem.bias_cells[state.index()].cells, sizeof(NarrowCells));
  }

 private:
  // Writes the times of blocks from `key` on, which is within the first of the prepared `blocks`,
  // so that each written block has parts of two prepared blocks. Blocks past the end of the
  // sequence get times of its last block. Called by a warp.
  static HSTU_DEVICE void store_shifted(const KeyBlockTimes* blocks, int key, int k_len,
                                        Window& window) {
    static_assert(kKeys / 8 <= 32);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int shift = key % 8;
    const int last = max((k_len - 1) / 8 - key / 8, 0);
    if (lane < kKeys / 8) {
      const KeyBlockTimes& low = blocks[min(lane, last)];
      const KeyBlockTimes& high = blocks[min(lane + 1, last)];
      KeyBlockTimes& to = window.times[lane];
      to.range = {min(low.range.earliest, high.range.earliest),
                  max(low.range.latest, high.range.latest)};
#pragma unroll 1
      for (int n = 0; n < 8; ++n) {
        to.times[n] = n + shift < 8 ? low.times[n + shift] : high.times[n + shift - 8];
      }
    }
    cutlass::arch::fence_view_async_shared();  // before a later bulk copy
    __syncwarp();
  }
};

// The consumers' part. Called by all threads of a warpgroup.
template <typename Traits>
class RelativeBiasConsumer {
  using KVState = typename Traits::KVState;
  using QState = typename Traits::QState;
  using SharedMemory = typename Traits::SharedMemory;
  using WorkTile = typename Traits::WorkTile;
  using Window = typename Traits::BiasWindow;
  using OfWarp = typename Traits::BiasOfWarp;
  static constexpr int kKeys = Traits::kKeys;
  static constexpr int kChunks = kKeys / 8;
  static constexpr int kBatch = 4;  // chunks that are added up together
  static constexpr uint32_t kAllLanes = 0xffffffff;

 public:
  HSTU_DEVICE explicit RelativeBiasConsumer(const ForwardParams& params) : params_(params) {}

  // scores = the weights by position of the key tile at `state`. With e4m3, scale() adds them.
  template <typename Scores>
  HSTU_DEVICE void init_accumulator(SharedMemory& smem, int warpgroup, KVState state,
                                    Scores& scores) {
    if constexpr (!Traits::kIsFp8)
      PositionBiasConsumer<Traits>(params_).init_accumulator(smem, warpgroup, state, scores);
  }
  HSTU_DEVICE void skip_tile(SharedMemory&) {}

  // Starts loading the times of the warp's rows.
  HSTU_DEVICE void enter(const WorkTile& work_tile, int warpgroup) {
    const RelativeBias& bias = params_.relative_bias;
    if (!bias.time.data) return;
    const SequenceTile& tile = work_tile.tile;
    const Sequence& sequence = tile.sequence;
    const int row = work_tile.first_row_of_warp(warpgroup) + lane() % 16;
    const int own = min(row, sequence.q_len - 1);
    const KeyBlockTimes& block =
        bias.prepared.row_blocks[first_tile(sequence.q_begin, tile.sequence_index, 8) + own / 8];
    range_ = load_cell(&block.range);
    time_ = __ldg(&block.times[own % 8]);
    const Mask mask(params_.mask, sequence, work_tile.head);
    keys_ = mask.estimate(row / 8 * 8, row / 8 * 8 + 8).end;
  }

  // Computes the weights by time of the key tile that begins with padded key `first`, whose scores
  // are being computed.
  HSTU_DEVICE void find(SharedMemory& smem, const WorkTile& work_tile, int warpgroup,
                        KVState k_state, QState q_state, int first) {
    mixed_ = 0;
    if (!params_.relative_bias.time.data) return;
    const Window& window = smem.bias_windows[Traits::bias_window(k_state)];
    const int key = Traits::Source::template key_of<kKeys>(work_tile.tile.sequence, first);
    find_blocks(smem.bias_cells[q_state.index()], window.times, work_tile, warpgroup, key,
                smem.bias_warps[warp_of_rows(warpgroup)]);
  }

  // scores = x / 2 = alpha / 2 * (S + bias). In e4m3, patches are added after the multiplication,
  // because the factors include descales.
  template <typename Factors, typename Scores>
  HSTU_DEVICE void scale(SharedMemory& smem, int warpgroup, KVState k_state, const Factors& factors,
                         Scores& scores) {
    const OfWarp& own = smem.bias_warps[warp_of_rows(warpgroup)];
    if constexpr (!Traits::kIsFp8) add_patches(own, 1, scores);
    add_weights(own, smem.bias_windows[Traits::bias_window(k_state)], warpgroup, factors, scores);
    if constexpr (Traits::kIsFp8) add_patches(own, half_alpha(), scores);
  }

 private:
  HSTU_DEVICE float half_alpha() const { return 0.5f * static_cast<float>(params_.alpha); }
  static HSTU_DEVICE int lane() { return bounded_thread_idx() % 32; }
  // The warp's number among all consumer warps, which have 16 rows each.
  static HSTU_DEVICE int warp_of_rows(int warpgroup) {
    return warpgroup * 4 + bounded_thread_idx() / 32 % 4;
  }

  // NOTE: this is volatile, so that the compiler does not sink one load behind the use of another.
  static HSTU_DEVICE NarrowCell load_narrow(const NarrowCells& cells, uint32_t difference) {
    return ptx::ld_shared_volatile(cells.cells + difference_cell(difference));
  }

  // Writes the weights of the warp's blocks and their patches. `key` is the first key.
  HSTU_DEVICE void find_blocks(const NarrowCells& cells, const KeyBlockTimes* times,
                               const WorkTile& work_tile, int warpgroup, int key, OfWarp& own) {
    const int block = lane() % OfWarp::kBlocks;
    const int chunk = OfWarp::chunk_of(block);
    const TimeRange range = ptx::ld_shared_volatile(&times[chunk].range);
    const NarrowDifferences differences(range_, range);
    const NarrowCell first = load_narrow(cells, differences.least);
    const NarrowCell last = load_narrow(cells, differences.most);
    const bool is_second = differences.least >= first.threshold;
    const bool is_last_second = differences.most >= last.threshold;
    const uint32_t lowest = first.bucket + is_second;
    const uint32_t highest = last.bucket + is_last_second;
    const float low = is_second ? first.high : first.low;
    const bool is_one = lowest == highest && lowest < NarrowCell::kSeveral && !differences.is_wide;
    __syncwarp();  // all lanes have read the weights of the tile before
    own.weights[block] = is_one ? half_alpha() * low : 0;
    const bool is_visible = key + chunk * 8 < keys_ && lane() < OfWarp::kBlocks;
    const uint32_t mixed = __ballot_sync(kAllLanes, is_visible && !is_one);
    if (mixed != 0) {
      const float high = is_last_second ? last.high : last.low;
      Found found = {{0, low, high, block}, is_visible && !is_one ? Buckets::kMany : Buckets::kOne};
      if (differences.is_wide) {
        if (is_visible) find_wide(work_tile, range, own.weights[block], found);
      } else if (found.buckets == Buckets::kMany &&
                 ((first.bucket | last.bucket) & NarrowCell::kSeveral) == 0 &&
                 lowest + 1 == highest) {
        // The one threshold is in the first cell, in the last cell or, seldom, in one between.
        found.buckets = Buckets::kTwo;
        found.block.threshold = is_second ? UINT32_MAX : first.threshold;
        if (found.block.threshold == UINT32_MAX) {
          found.block.threshold = last.threshold;
          if (!is_last_second || last.bucket != lowest) {
            found.block.threshold =
                static_cast<uint32_t>(__ldg(params_.relative_bias.thresholds + lowest));
          }
        }
      }
      find_patches(cells, times, work_tile, warpgroup, key, found, own);
    }
    __syncwarp();
  }

  // The number of buckets of a block.
  enum class Buckets {
    kOne,
    kTwo,
    kMany,  // more than two, or not known
    kWide,  // as kMany, and some difference of times needs more than 31 bits
  };
  struct Found {
    MixedBlock block;
    Buckets buckets;
  };

  // Finds the buckets of a block whose differences need more than 31 bits.
  HSTU_DEVICE void find_wide(const WorkTile& work_tile, const TimeRange& keys, float& weight,
                             Found& found) const {
    const RelativeBias& bias = params_.relative_bias;
    const BucketRange range = find_bucket_range(bias, range_, keys);
    found.buckets = range.first == range.last ? Buckets::kOne : Buckets::kWide;
    if (found.buckets != Buckets::kOne) return;
    const TimeWeights table(bias, params_.heads, work_tile.head);
    weight = half_alpha() * __ldg(table.weights + range.first);
  }

  // Writes the patches of blocks with several buckets. Each lane passes the buckets of its block.
  HSTU_DEVICE void find_patches(const NarrowCells& cells, const KeyBlockTimes* times,
                                const WorkTile& work_tile, int warpgroup, int key,
                                const Found& found, OfWarp& own) {
    const uint32_t two = __ballot_sync(kAllLanes, found.buckets == Buckets::kTwo);
    const uint32_t many = __ballot_sync(kAllLanes, found.buckets >= Buckets::kMany);
    const bool is_wide = __any_sync(kAllLanes, found.buckets == Buckets::kWide);
    const uint32_t bit = 1u << lane();
    mixed_ = two | many;
    if (two & bit) own.mixed[__popc(two & (bit - 1))] = found.block;
    if (many & bit) own.mixed[OfWarp::kBlocks - 1 - __popc(many & (bit - 1))] = found.block;
    __syncwarp();
    patch_two(times, __popc(two), own);
    if (is_wide) {
      patch_exactly(work_tile, warpgroup, key, __popc(many), own);
    } else if (!patch_many(cells, times, __popc(many), own)) {
      patch_exactly(work_tile, warpgroup, key, __popc(many), own);
    }
  }

  // The lane's row of one of the four blocks that a warp processes at once, 8 lanes each. If there
  // are fewer than four, the other lanes have rows of the last one, which they do not store.
  struct MixedRow {
    MixedBlock block;
    int row;  // among the warp's 16
    bool is_stored;

    // `number` is the number of the block among the `count` blocks that `block_of` returns.
    template <typename BlockOf>
    HSTU_DEVICE MixedRow(int number, int count, BlockOf block_of)
        : block(block_of(min(number, count - 1))),
          row(OfWarp::rows_of(block.index) * 8 + lane() % 8),
          is_stored(number < count) {}
    HSTU_DEVICE int chunk() const { return OfWarp::chunk_of(block.index); }

    // The absolute differences of times, if they are below 2^31. In lane n, `time` is the time of
    // row n.
    HSTU_DEVICE void find_differences(uint32_t time, const KeyBlockTimes* times,
                                      uint32_t (&differences)[8]) const {
      const auto row_time = static_cast<int>(__shfl_sync(kAllLanes, time, row));
      const auto* const from = reinterpret_cast<const int4*>(times[chunk()].times);
      const int4 low = from[0];
      const int4 high = from[1];
      differences[0] = abs(row_time - low.x), differences[1] = abs(row_time - low.y);
      differences[2] = abs(row_time - low.z), differences[3] = abs(row_time - low.w);
      differences[4] = abs(row_time - high.x), differences[5] = abs(row_time - high.y);
      differences[6] = abs(row_time - high.z), differences[7] = abs(row_time - high.w);
    }
    HSTU_DEVICE void store(const float (&x)[8], OfWarp& own) const {
      if (!is_stored) return;
      *reinterpret_cast<uint4*>(own.patches[block.index] + lane() % 8 * 4) = {
          ptx::cvt_satfinite_f16x2(x[0], x[1]), ptx::cvt_satfinite_f16x2(x[2], x[3]),
          ptx::cvt_satfinite_f16x2(x[4], x[5]), ptx::cvt_satfinite_f16x2(x[6], x[7])};
    }
  };

  // Writes the patches of the `count` blocks that have two buckets, four at a time.
  HSTU_DEVICE void patch_two(const KeyBlockTimes* times, int count, OfWarp& own) const {
#pragma unroll 1
    for (int begin = 0; begin < count; begin += 4) {
      const MixedRow mixed(begin + lane() / 8, count, [&](int n) { return own.mixed[n]; });
      uint32_t differences[8];
      float x[8];
      mixed.find_differences(time_, times, differences);
#pragma unroll
      for (int n = 0; n < 8; ++n)
        x[n] = differences[n] >= mixed.block.threshold ? mixed.block.high : mixed.block.low;
      mixed.store(x, own);
    }
  }

  // Writes the patches of the other blocks, score by score. Returns false if some score is in a
  // cell of several thresholds, in which case the patches are wrong.
  HSTU_DEVICE bool patch_many(const NarrowCells& cells, const KeyBlockTimes* times, int count,
                              OfWarp& own) const {
    uint32_t buckets = 0;
#pragma unroll 1
    for (int begin = 0; begin < count; begin += 4) {
      const MixedRow mixed(begin + lane() / 8, count,
                           [&](int n) { return own.mixed[OfWarp::kBlocks - 1 - n]; });
      uint32_t differences[8];
      float x[8];
      mixed.find_differences(time_, times, differences);
      // Loads of kLoads cells are in flight at once.
      constexpr int kLoads = Traits::kConsumers == 3 ? 4 : 8;
#pragma unroll
      for (int first = 0; first < 8; first += kLoads) {
        NarrowCell found[kLoads];
#pragma unroll
        for (int n = 0; n < kLoads; ++n) found[n] = load_narrow(cells, differences[first + n]);
#pragma unroll
        for (int n = 0; n < kLoads; ++n) {
          buckets |= found[n].bucket;
          x[first + n] =
              differences[first + n] >= found[n].threshold ? found[n].high : found[n].low;
        }
      }
      mixed.store(x, own);
    }
    return !__any_sync(kAllLanes, buckets >= NarrowCell::kSeveral);
  }

  // patch_many() for any differences of times and any thresholds, by searches in device memory.
  HSTU_DEVICE void patch_exactly(const WorkTile& work_tile, int warpgroup, int key, int count,
                                 OfWarp& own) const {
    const RelativeBias& bias = params_.relative_bias;
    const Sequence& sequence = work_tile.tile.sequence;
    const TimeWeights table(bias, params_.heads, work_tile.head);
#pragma unroll 1
    for (int begin = 0; begin < count; begin += 4) {
      const MixedRow mixed(begin + lane() / 8, count,
                           [&](int n) { return own.mixed[OfWarp::kBlocks - 1 - n]; });
      const int row = min(work_tile.first_row_of_warp(warpgroup) + mixed.row, sequence.q_len - 1);
      const int64_t time = time_of_row(bias, sequence, row);
      uint32_t* const words = own.patches[mixed.block.index] + lane() % 8 * 4;
#pragma unroll 1
      for (int n = 0; n < 8; n += 2) {
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int own_key = min(key + mixed.chunk() * 8 + n + e, sequence.k_len - 1);
          const uint64_t difference =
              time_difference(time, __ldg(bias.timestamps + sequence.k_begin + own_key));
          x[e] = __ldg(table.weights + bucket_of(bias, difference));
        }
        if (mixed.is_stored) words[n / 2] = ptx::cvt_satfinite_f16x2(x[0], x[1]);
      }
    }
  }

  // scores = x / 2 without patches. With e4m3, this adds the weights by position, too.
  template <typename Factors, typename Scores>
  HSTU_DEVICE void add_weights(const OfWarp& own, const Window& window, int warpgroup,
                               const Factors& factors, Scores& scores) const {
    const float factor = half_alpha();
#pragma unroll
    for (int batch = 0; batch < kChunks; batch += kBatch) {
      float4 times[2];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        times[m] = *reinterpret_cast<const float4*>(own.weights + OfWarp::block_of(m, batch));
      float2 positions[kBatch + 1] = {};
      if constexpr (Traits::kIsFp8) {
        const int row = warp_of_rows(warpgroup) * 16 + lane() / 4;
        PositionBiasConsumer<Traits>::load(window.position, row, batch, positions);
      }
#pragma unroll
      for (int n = 0; n < kBatch * 4; ++n) {
        const int chunk = n / 4;
        const int m = n / 2 % 2;
        const float time = chunk == 0   ? times[m].x
                           : chunk == 1 ? times[m].y
                           : chunk == 2 ? times[m].z
                                        : times[m].w;
        const float2 position = positions[chunk + 1 - m];
        const float x = Traits::kIsFp8 ? fmaf(factor, n % 2 ? position.y : position.x, time) : time;
        float& score = scores(batch * 4 + n);
        score = factors.half_x(batch * 4 + n, factor, score, x);
      }
    }
  }

  // scores += factor * patches
  template <typename Scores>
  HSTU_DEVICE void add_patches(const OfWarp& own, float factor, Scores& scores) const {
    // NOTE: after a shuffle, the compiler knows that all lanes have the same value.
    const uint32_t mixed = __shfl_sync(kAllLanes, mixed_, 0);
    if (mixed == 0) return;
#pragma unroll
    for (int first = 0; first < kChunks; first += kBatch) {
      if ((mixed >> OfWarp::block_of(0, first) & 0xf0f) == 0) continue;
      uint32_t words[kBatch][2];
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int block = OfWarp::block_of(m, first + n);
          words[n][m] = ptx::ld_shared_if(mixed, 1u << block, own.patches[block] + lane());
        }
      }
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          float* const x = &scores((first + n) * 4 + m * 2);
          x[0] = fmaf(factor, low_half<cutlass::half_t>(words[n][m]), x[0]);
          x[1] = fmaf(factor, high_half<cutlass::half_t>(words[n][m]), x[1]);
        }
      }
    }
  }

  const ForwardParams& params_;
  // The range of times of the 8 rows of the lane's block, the end of the keys that these rows may
  // see, and the low word of the time of row `lane() % 16` of the warp.
  TimeRange range_ = {};
  int keys_ = 0;
  uint32_t time_ = 0;
  uint32_t mixed_ = 0;  // the bits of blocks that have patches
};

}  // namespace hstu::sm90
