// The forward's tile sizes, work tiles, shared memory and kernel parameters.
#pragma once

#include <bit>

#include "../common/launch.h"
#include "../scheduler/split_kv.h"
#include "../scheduler/work_list.h"
#include "e4m3_pages.h"
#include "key_source.h"
#include "pipeline.h"
#include "score_bias.h"
#include "tensors.h"

namespace hstu::sm90 {

struct ForwardMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap bias;
  PageMap pages;
};

// The work list, the split of the keys and the workspace, for the tile scheduler and the epilogue.
struct SchedulerMetadata {
  WorkList list;
  SplitKVPlan split_kv;
  // The workspace of SplitKVReduction::kGlobalMemory. Row tiles are counted as by first_tile().
  float* partial_out = nullptr;  // [row tiles, H, warpgroups, num_splits, 64 * head dim]
  int* arrived = nullptr;        // [row tiles, H, warpgroups]: how many splits have stored; zeroed
  float* totals = nullptr;       // [blocks, warpgroups, kGlobalTotals]; null if nothing needs it
};

// Source is PackedKeys, PagedKeys or QuantizedPagedKeys of key_source.h, E4m3Keys or E4m3PagedKeys;
// Bias is a policy of score_bias.h. The blocks of a cluster are the splits of
// SplitKVReduction::kCluster. With kIsClosedForm, the mask is not given row by row, and the kernel
// is smaller.
template <int kHeadDim_, typename Element_, typename Source_, typename Bias_,
          SplitKVReduction kReduction_, int kClusterSize_, bool kHasSmallTiles, bool kIsClosedForm_>
struct ForwardTraits {
  using Element = Element_;
  using Source = Source_;
  using Bias = Bias_;
  using BiasElement = typename Bias::template TileElement<Element>;
  using Maps = ForwardMaps;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr SplitKVReduction kReduction = kReduction_;
  static constexpr bool kIsSplitByList = kReduction == SplitKVReduction::kGlobalMemory;
  static constexpr bool kIsSplitByCluster = kReduction == SplitKVReduction::kCluster;
  static constexpr int kClusterSize = kClusterSize_;
  static_assert(kIsSplitByCluster == (kClusterSize > 1), "a cluster is for split-KV");
  // A cluster has no work list, and so no summaries of a mask that is given row by row.
  static constexpr bool kIsClosedForm = kIsClosedForm_ || kIsSplitByCluster;

  static constexpr bool kIsFp8 = Source::kIsFp8;
  using ScoreSum = typename Source::ScoreSum;
  static_assert(kIsFp8 == (sizeof(Element) == 1), "e4m3 has its own source");
  static_assert(!kIsFp8 || Bias::kIsAddedAfter || !Bias::kHasTiles, "e4m3 has its own dense bias");

  static constexpr bool kTransposesValues = Source::kTransposesValues;
  static constexpr bool kHasBlockDescales = kIsFp8 && !kTransposesValues;

  static constexpr bool kHasBias = Bias::kHasTiles;
  static constexpr bool kHasRelativeBias = Bias::kIsRelative;
  static constexpr bool kHasTimeBias = Bias::kHasTime;
  static constexpr bool kHasBiasTiles = kHasBias && !kHasRelativeBias;
  static constexpr ForwardTiles kTiles = [] {
    if constexpr (kTransposesValues) return fp8_paged_tiles<kHeadDim, kHasSmallTiles>();
    if constexpr (kHasSmallTiles) return small_forward_tiles<kHeadDim>();
    if constexpr (kIsFp8) return fp8_tiles<kHeadDim, sizeof(ScoreSum) == 2, kHasBias>();
    return forward_tiles<kHeadDim, kHasBias, kHasTimeBias, Source::kIsPaged,
                         Source::kIsQuantized>();
  }();
  static constexpr int kConsumers = kTiles.consumers;
  static constexpr int kRows = kConsumers * kWarpgroupRows;
  static constexpr int kKeys = kTiles.keys;
  static constexpr Registers kRegisters =
      kTransposesValues ? fp8_paged_registers(kHeadDim, kConsumers)
      : kIsFp8 ? fp8_registers(kHeadDim, kConsumers, kHasTimeBias)
               : forward_registers(kHeadDim, kConsumers, Source::kIsPaged, Source::kIsQuantized);
  static constexpr int kByteRows = kTransposesValues ? kKeys / 2 : kKeys;  // of a stage of bytes
  static constexpr int kPromotedTiles = 1024 / kKeys;  // key tiles between two promotions of O
  // Floats of device memory that the totals of a warpgroup take, see Promotion.
  static constexpr int kGlobalTotals =
      kIsFp8 ? kWarpgroupRows * (kHeadDim - kTiles.totals.shared - kTiles.totals.registers) : 0;
  static constexpr int kConsumerWarps = kConsumers * 4;
  static constexpr bool kHasConverter = Source::kIsQuantized;
  static constexpr int kWarpgroups = 1 + kConsumers + kHasConverter;
  static constexpr int kThreads = kWarpgroups * kWarpgroup;
  static constexpr int kBlocksPerSm =
      kHasSmallTiles && !kTransposesValues ? small_blocks_per_sm(kHeadDim) : 1;
  static_assert(!kIsSplitByList || Source::kIsPaged, "split-KV is for calls with few rows");
  static_assert(!kTransposesValues || kTiles.byte_stages % 2 == 0,
                "each warp that transposes has stages of its own");
  static_assert(!Source::kIsQuantized || !kHasBias, "a bias leaves no room for the bytes of pages");
  static_assert(kRegisters.producer + kConsumers * kRegisters.consumer + kRegisters.converter <=
                    kWarpgroups * (65536 / kThreads / kBlocksPerSm / 8 * 8),
                "warpgroups would wait for registers that a block does not have");

  // Read by attention_list.h: blocks begin with tiles that are not in the list, and wait for device
  // memory if sequences are short. There is no list if no sequence has more than kUnlistedLength
  // rows or keys, and each sequence has one row tile, or each block has at most kUnlistedRounds
  // work tiles.
  static constexpr bool kBeginsUnlisted = true;
  static constexpr bool kWaitsForMemory = true;
  // quantize_paged_call() precedes, and runs at the same time as prepare_scheduler(), which writes
  // the prepared tiles.
  static constexpr bool kFollowsQuantization = kTransposesValues;
  static_assert(!kFollowsQuantization ||
                    (kKeys == PreparedTile::kTileKeys && kConsumers <= PreparedTile::kMaxParts),
                "prepare_scheduler() counts keys and rows like this kernel");
  static_assert(kWarpgroupRows == PreparedTile::kPartRows);
  static constexpr int kUnlistedLength = 4 * kRows;
  static constexpr int kUnlistedRounds = 2;

  using ScoreMma = SmemMma<Element, kKeys, kHeadDim, ScoreSum>;
  // NOTE: with a converter, ptxas compiles for 128 registers a thread, and a product of more than
  // 128 columns has more accumulators than that.
  static constexpr int kOutColumns = kHasConverter ? std::min(kHeadDim, 128) : kHeadDim;
  using OutMma = RegisterMma<Element, kOutColumns, kKeys>;

  // In e4m3, scores are multiplied by factors of their rows and keys before the bias is added.
  static constexpr auto kScaleOut = kIsFp8 ? GMMA::ScaleOut::Zero : Bias::kScaleOut;

  // With a time bias, warpgroups take different times for a key tile. If they took turns, each
  // would wait for the slower one. Three consumers of packed e4m3 keys at head dim 128 are faster
  // without turns.
  static constexpr bool kTakesTurns =
      kConsumers > 1 && !kHasTimeBias && !(kHasBlockDescales && kHeadDim == 128 && kConsumers == 3);

  static constexpr int kNoKey = INT_MAX;        // tile_from(): no key tile is visible
  static constexpr int kEndOfWork = -1;         // WorkTile::head after the last work tile
  static constexpr int kNoWorkIndex = INT_MAX;  // SharedMemory::work_index after the last work tile

  // The first of the two rows of a consumer thread, which are 8 apart, relative to the tile.
  static HSTU_DEVICE int row_of_thread(int warpgroup) {
    const unsigned thread = reload_thread_idx();
    return warpgroup * kWarpgroupRows + static_cast<int>(thread / 32 % 4 * 16 + thread % 32 / 4);
  }

  // A tile of rows of one head, and the key tiles of its split that some row sees. If keys are
  // paged, all keys are padded keys, see common/pages.h.
  // NOTE: the alignment lets a load read four of the summary's numbers at once.
  struct alignas(16) WorkTile : PreparedTile {
    int head;  // kEndOfWork: there is no more work
    RowFactors row_factors[kIsFp8 ? kRows : 0];
    BlockDescales largest_descales;  // of the sequence; only for E4m3PagedKeys
    Interval split;                  // the keys of this split, if kIsSplitByList
    int other_splits;                // how many other splits have visible keys
    int bias_head;                   // Bias::bias_head() of `head`

    // The first of the 16 rows of the thread's warp.
    HSTU_DEVICE int first_row_of_warp(int warpgroup) const {
      const int warp = reload_thread_idx() / 32 % 4;
      return tile.index * kRows + warpgroup * kWarpgroupRows + warp * 16;
    }

    HSTU_DEVICE bool is_end() const { return head < 0; }
    HSTU_DEVICE bool is_empty() const { return tile_from(0) == kNoKey; }

    // The first key of the first visible key tile that ends behind key `first`, or kNoKey.
    HSTU_DEVICE int tile_from(int first) const {
      if constexpr (!kIsSplitByList) return tile_of(first, INT_MAX);
      return tile_of(max(first, split.begin), split.end);
    }
    // tile_from() regardless of splits, for tiles that begin before key `last`.
    HSTU_DEVICE int tile_of(int first, int last) const {
      int found = kNoKey;
      for (const Interval& keys : summary.hull) {
        const int key = max(first, keys.begin / kKeys * kKeys);
        if (key < min(keys.end, last)) found = min(found, key);
      }
      return found;
    }
    HSTU_DEVICE bool sees(Interval keys) const { return tile_of(keys.begin, keys.end) != kNoKey; }
    HSTU_DEVICE int end() const {
      const int last = max(summary.hull[0].end, summary.hull[1].end);
      return kIsSplitByList ? min(last, split.end) : last;
    }
  };

  // A key tile of a work tile, packed into one register: its first key, a multiple of kKeys, and
  // flags.
  struct KeyTile {
    static constexpr int kPartial = 1;      // the mask hides some of its keys from some row
    static constexpr int kLast = 2;         // it is the last one of the work tile
    static constexpr int kLastOfFirst = 4;  // it is the last one that warpgroup 0 sees; the next
                                            // bits are for the other warpgroups
    static constexpr int kFlags = (kLastOfFirst << kConsumers) - 1;
    static_assert(kKeys > kFlags, "the first key leaves the low bits free");

    int bits;

    HSTU_DEVICE int first_key() const { return bits & ~kFlags; }
    HSTU_DEVICE bool is_partial() const { return bits & kPartial; }
    HSTU_DEVICE bool is_last() const { return bits & kLast; }
    HSTU_DEVICE bool is_last_of(int warpgroup) const { return bits & kLastOfFirst << warpgroup; }
  };

  // The scheduler looks for the next work tile when this many key tiles of the current one are left
  // to be copied. If it looked earlier, it would keep work from blocks that become idle. It looks
  // earlier for splits, because they may be short and their epilogue takes longer.
  static constexpr int kTilesLeft = kIsSplitByList ? 4 : 2;
  // Lanes of the scheduler's warp that write to a work tile: one for the rows of each warpgroup,
  // and one for all rows.
  static constexpr int kSchedulerLanes = kConsumers + 1;

  using WorkState = PipelineState<4>;
  using QState = PipelineState<kTiles.query_stages>;
  using KVState = PipelineState<kTiles.key_stages>;
  using BiasState = PipelineState<kTiles.bias_stages>;
  // The memory of a relative bias. With e4m3, there is one more window than there are stages of K,
  // so that consumers may read weights by position after they have released K of their tile.
  using BiasWindow = RelativeBiasWindow<kRows, kKeys, kHasTimeBias>;
  using BiasOfWarp = RelativeBiasOfWarp<kKeys>;
  static constexpr int kBiasWindows = KVState::kStages + kIsFp8;
  static HSTU_DEVICE int bias_window(KVState state) {
    return static_cast<int>(state.count % kBiasWindows);
  }
  // Arrivals at the barrier of K when a bias window is filled. With pages, a warp stores the times.
  static constexpr int kBiasArrivals = !kHasRelativeBias                  ? 0
                                       : Source::kIsPaged && kHasTimeBias ? kArrivalsOfWarp
                                                                          : 1;
  using ByteState = PipelineState<std::max(kTiles.byte_stages, 1)>;
  static constexpr int kValueBoxRows = kByteRows;  // of a copy of V

  // The factors of a tile's keys have more stages than V, and no `empty` barriers: a warp writes
  // them after it has acquired V of the tile before, so consumers have released V of the tile that
  // had their stage.
  static constexpr int kFactorStages = std::bit_ceil(KVState::kStages + 1u);
  using FactorState = PipelineState<kFactorStages>;

  // The scales of the rows of a stage of bytes; or those of K and V of a tile, which arrive with K.
  using Scales = std::conditional_t<kTransposesValues, float[2][kKeys], float[kKeys]>;
  static constexpr int kScaleStages = kTransposesValues ? kTiles.key_stages : kTiles.byte_stages;
  // With one stage of Q, the warp that copies Q finds the factors of a work tile's rows while
  // consumers still read the Q before.
  static constexpr bool kFindsFactorsFirst = kHasBlockDescales && QState::kStages == 1;
  // In this case the rows of each warpgroup have a pipeline of their own, so that a warpgroup does
  // not wait until the others have read the Q before. With a time bias there is one pipeline, which
  // its cells use, too.
  static constexpr int kQueryPipelines = kFindsFactorsFirst && !kHasTimeBias ? kConsumers : 1;
  // With S in fp16, consumers then read the key tile before they issue its products, and release K
  // and Q before the activation. If they read it after the products, ptxas moves the release of K
  // behind the activation.
  static constexpr bool kReleasesEarly = kFindsFactorsFirst && !std::is_same_v<ScoreSum, float>;
  static constexpr int query_pipeline(int warpgroup) { return kQueryPipelines > 1 ? warpgroup : 0; }

  // Five invariants hold between the producer's warps and the consumer warpgroups:
  //
  // 1. Release. Every consumer warp waits for and releases every stage of K and V, and every
  //    consumer thread every work tile, because the `empty` barriers count all of them. If the 64
  //    rows of a warpgroup do not see the last key tiles, it does so in drain_tiles(). Q is
  //    released once per work tile, at the last key tile that the rows of the warpgroup see.
  // 2. Depth of the rings. Consumers release a work tile after they have waited for the next one,
  //    which the scheduler finds when kTilesLeft key tiles are left to be copied. So pipeline_work
  //    needs 2 stages, and has 4 for short work tiles. pipeline_k and pipeline_v would work with
  //    one stage, because K is released before V of the same key tile is waited for.
  // 3. Zeros. silu(0) = 0 and 0 * 0 = 0: rows past the end of a sequence and columns past the end
  //    of the head dim, which TMA fills with zeros, add nothing to O. So they need no mask, and V
  //    is never NaN where P is masked.
  // 4. Order of the products. With kTakesTurns, warpgroups issue them in turn: each calls sync(),
  //    and then arrive(), of the WarpSchedulerBarrier exactly once per key tile, also in
  //    drain_tiles().
  // 5. Bias. The tile of a dense bias of a key tile is copied after its K, and is consumed with K:
  //    pipeline_bias advances with pipeline_k, also in drain_tiles(), except for tiles whose bias
  //    TMA cannot copy (DenseScoreBias::is_unaligned). For a relative bias, the windows of keys and
  //    the cells of the head arrive on the barriers of K and Q.
  struct SharedMemory {
    alignas(1024) Element q[QState::kStages][kConsumers][kWarpgroupRows * kHeadDim];
    alignas(1024) Element k[KVState::kStages][kKeys * kHeadDim];
    alignas(1024) Element v[KVState::kStages][kKeys * kHeadDim];
    alignas(1024) BiasElement bias[kHasBiasTiles ? BiasState::kStages : 0][kRows * kKeys];
    // A stage of bytes holds the rows of e4m3 pages of a tile of K or V. If products are in e4m3,
    // it holds some of the rows of V.
    alignas(1024) uint8_t bytes[kTiles.byte_stages][kByteRows * kHeadDim];
    alignas(16) Scales scales[kScaleStages];
    alignas(16) float totals[kConsumers * kWarpgroupRows * kTiles.totals.shared];  // of promotions
    WorkTile work_tiles[WorkState::kStages];
    KeyTile key_tiles[KVState::kStages];
    BlockDescales block_descales[kHasBlockDescales ? KVState::kStages : 0];
    KeyFactors<kKeys> key_factors[kTransposesValues ? kFactorStages : 0];
    int work_index;    // of the work tile that the scheduler looks for, or kNoWorkIndex
    int tiles_beyond;  // see TileScheduler::advance()
    cutlass::arch::ClusterBarrier next_work_wanted;
    Pipeline<WorkState::kStages> pipeline_work;
    Pipeline<QState::kStages> pipeline_q[kQueryPipelines];
    Pipeline<KVState::kStages> pipeline_k;
    Pipeline<KVState::kStages> pipeline_v;
    Pipeline<BiasState::kStages> pipeline_bias;
    Pipeline<ByteState::kStages> pipeline_bytes;
    Pipeline<kTransposesValues ? kFactorStages : 1> pipeline_factors;
    BiasWindow bias_windows[kHasRelativeBias ? kBiasWindows : 0];
    NarrowCells bias_cells[kHasTimeBias ? QState::kStages : 0];
    BiasOfWarp bias_warps[kHasTimeBias ? kConsumerWarps : 0];
  };
  static_assert(kBlocksPerSm * (sizeof(SharedMemory) + kReservedMemory) <= 228 * 1024,
                "a multiprocessor has 228 KB of shared memory");

  // The weights of a table that does not exist are zeros, written once. Called by all threads.
  static HSTU_DEVICE void clear_bias(const RelativeBias& bias, SharedMemory& smem) {
    if (!bias.position.data) {
      for (BiasWindow& window : smem.bias_windows) window.position.clear(threadIdx.x, kThreads);
    }
    if (!bias.time.data) {
      for (int n = threadIdx.x; n < kConsumerWarps * BiasOfWarp::kBlocks; n += kThreads)
        smem.bias_warps[n / BiasOfWarp::kBlocks].weights[n % BiasOfWarp::kBlocks] = 0;
    }
  }

  static HSTU_DEVICE MaskParams mask_params(const ForwardParams& params) {
    return kIsClosedForm ? closed_form(params.mask) : params.mask;
  }

  // Called by one thread.
  static HSTU_DEVICE void init(SharedMemory& smem) {
    constexpr int kCopyThreads =
        Source::kQueryCopyLanes + 2 * Source::kCopyLanes + kHasConverter * kWarpgroup;
    smem.pipeline_work.init(/*consumers=*/kConsumers * kWarpgroup + kCopyThreads,
                            /*producers=*/kSchedulerLanes);
    // Further arrivals at the barriers of Q and K are for further inputs: the factors and descales
    // of e4m3, and the cells, times and weights of a relative bias. The converter arrives at the
    // barriers of K and V.
    constexpr int kConverterArrivals = 4 * kArrivalsOfWarp;
    constexpr int kConsumerArrivals = kConsumerWarps * kArrivalsOfWarp;
    for (auto& pipeline_q : smem.pipeline_q) {
      pipeline_q.init(kConsumerArrivals / kQueryPipelines,
                      1 + kIsFp8 * kArrivalsOfWarp + kHasTimeBias);
    }
    // One arrival expects the bytes, and each lane of a warp that copies scales arrives for them.
    smem.pipeline_k.init(kConsumerArrivals, 1 + kHasBlockDescales + kBiasArrivals +
                                                Source::kIsQuantized * kConverterArrivals +
                                                kTransposesValues * 32);
    smem.pipeline_v.init(kConsumerArrivals, kTransposesValues
                                                ? 2 * kArrivalsOfWarp
                                                : 1 + Source::kIsQuantized * kConverterArrivals);
    smem.pipeline_bias.init(kConsumerArrivals);
    smem.pipeline_bytes.init((kTransposesValues ? 1 : 4) * kArrivalsOfWarp,
                             1 + !kTransposesValues * 32);
    smem.pipeline_factors.init(/*consumers=*/1, /*producers=*/2 * kArrivalsOfWarp);
    smem.next_work_wanted.init(/*arrivals=*/1);
    cutlass::arch::fence_barrier_init();
  }
};

}  // namespace hstu::sm90
