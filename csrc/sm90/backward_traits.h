// The tile sizes of the backward, its work tiles and its shared memory.
#pragma once

#include "../scheduler/work_list.h"
#include "backward_e4m3_factors.h"
#include "pipeline.h"
#include "position_window.h"
#include "score_bias.h"
#include "stores.h"
#include "table_gradients.h"

namespace hstu::sm90 {

struct BackwardMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap dout;
  CUtensorMap bias;
  CUtensorMap bias_gradient;
};

// The tensor maps and descales of the backward in e4m3. Maps of columns are of copies that are
// transposed in blocks of 128 rows or keys, like v in Fp8Params.
struct E4m3BackwardMaps : BackwardMaps {
  CUtensorMap q_columns;
  CUtensorMap k_columns;
  CUtensorMap dout_columns;
  E4m3Descales descales;
};

// The workspace of a backward call.
struct BackwardBuffers {
  WorkList list;
  // [row tiles, H, rows * head dim] of Traits::DqElement in the order of DqTile; zeroed, but not
  // with BackwardTraits::kStoresDq
  float* dq;
  TileSpans* dq_writers;  // [row tiles]: the key tiles that add to the tile's dQ; null: any order
  // [row tiles, H, cluster size]: how many key tiles have added their dQ; zeroed; null: any order
  int* dq_semaphore;
  TableSums sums;  // for the gradients of a relative bias's tables; zeroed
  float* totals;   // [blocks, warpgroups, 2, kGlobalTotals], of Promotion; e4m3 only
};

// How the consumer warpgroups divide a work tile. With kAlternateSteps and kColumnHalves, each
// computes S, dP, dK and dV of 64 keys.
enum class DqPartition {
  // One warpgroup computes dQ of a step, the other dQ of the next step.
  kAlternateSteps,
  // Each warpgroup computes half of the columns of dQ, because all of dQ would take too many
  // registers.
  kColumnHalves,
  // The two blocks of a cluster divide the work tile, because dK and dV of 64 keys would take all
  // registers of a warpgroup: see backward_cluster.h.
  kCluster,
  // For e4m3, whose products are short: a work tile has 64 keys. Both warpgroups compute S and dP
  // of all of them; each computes half of the columns of dK, dV and dQ.
  kSharedKeys,
};

constexpr DqPartition dq_partition_of(int head_dim, bool is_e4m3) {
  if (head_dim <= 96 && !is_e4m3) return DqPartition::kAlternateSteps;
  if (head_dim <= 128) return DqPartition::kColumnHalves;
  return is_e4m3 ? DqPartition::kSharedKeys : DqPartition::kCluster;
}

// A tile of dQ, which consists of kParts groups of columns. A warpgroup stores a part in the order
// of its registers: 16 bytes of each thread, then the next 16. At head dim 192, a block of a
// cluster has three parts, two of which its first warpgroup computes.
template <int kRows, int kHeadDim, DqPartition kDqPartition>
struct DqTile {
  // Warpgroups of a block that compute the dQ of one step.
  static constexpr int kWarpgroups = kDqPartition == DqPartition::kAlternateSteps ? 1 : 2;
  static constexpr bool kIsCluster = kDqPartition == DqPartition::kCluster;
  static constexpr int kPartsOfBlock = kIsCluster && kHeadDim % 128 != 0 ? 3 : kWarpgroups;
  static constexpr int kParts = kPartsOfBlock * (kIsCluster ? 2 : 1);
  // Warpgroups of all blocks that compute the dQ of one step.
  static constexpr int kAllWarpgroups = kWarpgroups * (kIsCluster ? 2 : 1);
  static constexpr int kColumns = kHeadDim / kParts;  // columns of a part
  static constexpr int kPartSize = kRows * kColumns;
  static constexpr int kBlockSize = kPartSize * kPartsOfBlock;
  static constexpr int kSize = kPartSize * kParts;
  static_assert(kRows == kWarpgroupRows);
};

// The factors of a work tile in e4m3; other dtypes have none.
struct NoFactors {};

// Bias is a policy of score_bias.h. Out is the type of the gradients. With kIsClosedForm, the mask
// is not given row by row, the kernel is smaller, and it may run without a list of work tiles. With
// kStoresDq, a block takes all tiles of keys of a sequence and head, one after another. Then the
// first tile that adds to a row stores its dQ as the sum in device memory, and the last one stores
// the result to dQ.
// NOTE: with both in one kernel, which asks in each step, calls at head dim 64 took 4 % longer.
template <int kHeadDim_, typename Element_, typename Bias_, bool kIsDeterministic_,
          typename Out_ = Element_, bool kIsClosedForm_ = false, bool kStoresDq_ = false>
struct BackwardTraits {
  using Element = Element_;
  using Bias = Bias_;
  using Out = Out_;
  static constexpr bool kIsE4m3 = sizeof(Element) == 1;
  using Maps = std::conditional_t<kIsE4m3, E4m3BackwardMaps, BackwardMaps>;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kHasRelativeBias = Bias::kIsRelative;
  static constexpr bool kHasBias = Bias::kHasTiles || kHasRelativeBias;
  using BiasElement = std::conditional_t<kHasRelativeBias, cutlass::half_t,
                                         typename Bias::template TileElement<Element>>;
  static constexpr bool kHasTimeBias = Bias::kHasTime;
  static constexpr bool kHasDenseBias = kHasBias && !kHasRelativeBias;
  static constexpr bool kIsDeterministic = kIsDeterministic_;
  static constexpr DqPartition kDqPartition = dq_partition_of(kHeadDim, kIsE4m3);
  static constexpr bool kIsCluster = kDqPartition == DqPartition::kCluster;
  static constexpr bool kSharesKeys = kDqPartition == DqPartition::kSharedKeys;
  // The blocks of a cluster have 96 columns each, a multiple of narrow panels.
  static constexpr bool kIsNarrow = kIsCluster && kHeadDim % 128 != 0;
  static constexpr int kConsumers = 2;
  static constexpr int kConsumerWarps = kConsumers * 4;
  static constexpr int kRows = kBackwardRows;
  static constexpr int kKeys = kSharesKeys ? kWarpgroupRows : kBackwardKeys;
  static constexpr int kClusterSize = kIsCluster ? 2 : 1;
  // Keys of one block. In a cluster, the block of rank r has group r of 64 keys.
  static constexpr int kBlockKeys = kKeys / kClusterSize;
  static constexpr int kKeyGroups = kBlockKeys / kWarpgroupRows;
  static constexpr int kScoreRows = kRows / kClusterSize;  // rows of S and dP per warpgroup
  // Columns of dK and dV of a warpgroup.
  static constexpr int kColumns = kHeadDim / (kSharesKeys ? kConsumers : kClusterSize);
  // Warpgroups that compute the weights by time of a relative bias and sum dS, in alternate steps.
  static constexpr int kBiasWarpgroups =
      kHasRelativeBias ? backward_bias_warpgroups(kHeadDim, kHasTimeBias) : 0;
  static constexpr int kWarpgroups = 1 + kConsumers + kBiasWarpgroups;
  static constexpr int kThreads = kWarpgroups * kWarpgroup;
  static constexpr int kBlocksPerSm = 1;

  // There is no list of work tiles if each block has at most kUnlistedRounds of them, or if a block
  // takes all of a sequence, which then has at most kMostTilesOfBlock, unless the mask is given row
  // by row: see WorkList::sequence_tiles.
  static constexpr bool kIsClosedForm = kIsClosedForm_;
  static constexpr bool kStoresDq = kStoresDq_;
  static_assert(!kIsClosedForm || (!kHasBias && !kIsDeterministic && !kIsE4m3),
                "these kernels always have a list of work tiles");
  static_assert(!kStoresDq || kIsClosedForm, "such a block has no list of work tiles");
  static constexpr int kUnlistedRounds = 2;
  // The most that were faster on an H200. With more tiles, Q and dO of the sequences that blocks
  // are at, which they read again for each tile, and the sums of dQ exceed the L2 cache.
  static constexpr int kMostTilesOfBlock = 512 / (kHeadDim < 128 ? kHeadDim : 128);

  // If true, the producer warp that copies Q and dO also computes which keys their rows see.
  // Otherwise each consumer warpgroup does, which has the registers only while no wgmma runs. The
  // producer needs up to 88 registers for this, which larger head dims cannot spare.
  static constexpr bool kProducerFindsMask = kHeadDim <= 64 && !kIsE4m3 && !kHasRelativeBias;
  static constexpr Registers kRegisters = kHasRelativeBias
                                              ? backward_registers_with_bias(kHeadDim, kHasTimeBias)
                                              : backward_registers(kProducerFindsMask);

  using Dq = DqTile<kRows, kHeadDim, kDqPartition>;
  // bf16 in e4m3: additions to dQ in device memory are bound by bytes, and the products are short.
  using DqElement = std::conditional_t<kIsE4m3, cutlass::bfloat16_t, float>;

  struct WorkTile : std::conditional_t<kIsE4m3, E4m3Factors, NoFactors> {
    SequenceTile tile;
    int first_row_tile;  // the number of the sequence's first tile of rows
    int head;            // -1: there is no more work
    int bias_head;       // Bias::bias_head() of `head`
    TileMap map;         // which tiles of rows are visible
    int last_row_tile;   // in the order of the main loop; -1: none is visible
    // Bits of the tiles of rows to whose dQ earlier and later tiles of keys add, with kStoresDq.
    // NOTE: with an array of no elements, nvcc misaligned the tiles that follow.
    static constexpr int kWords = kStoresDq ? TileMap::kTiles / 32 : 4;
    unsigned earlier[kWords];
    unsigned later[kWords];

    // NOTE: see TileMap::kTiles about tiles from there on.
    HSTU_DEVICE bool has_earlier(int m) const {
      return m < TileMap::kTiles ? earlier[m / 32] >> m % 32 & 1 : tile.index > 0;
    }
    HSTU_DEVICE bool has_later(int m) const {
      if (m < TileMap::kTiles) return later[m / 32] >> m % 32 & 1;
      return (tile.index + 1) * kKeys < tile.sequence.k_len;
    }
  };
  // A tile of rows of a work tile, packed into one register: its first row, a multiple of kRows,
  // and flags.
  struct RowTile {
    static constexpr int kPartial = 1;
    static constexpr int kLast = 2;
    static constexpr int kHasEarlier = 4;  // see WorkTile::earlier and WorkTile::later
    static constexpr int kHasLater = 8;
    static constexpr int kFlags = 15;

    int bits;

    HSTU_DEVICE int first_row() const { return bits & ~kFlags; }
    HSTU_DEVICE bool is_partial() const { return bits & kPartial; }
    HSTU_DEVICE bool is_last() const { return bits & kLast; }
    HSTU_DEVICE bool has_earlier() const { return bits & kHasEarlier; }
    HSTU_DEVICE bool has_later() const { return bits & kHasLater; }
  };
  using WorkState = PipelineState<2>;
  using KVState = PipelineState<1>;
  static constexpr int kRowStages = kIsE4m3 && kHeadDim <= 128 ? 3 : 2;  // as many as smem holds
  using QState = PipelineState<kRowStages>;
  using MaskState = PipelineState<2>;  // of partial tiles, if kProducerFindsMask
  using DoutState = PipelineState<kIsCluster ? 1 : kRowStages>;
  using BiasState = PipelineState<kHeadDim <= 64 ? 2 : 1>;
  using DsState = PipelineState<2>;
  using DqState = PipelineState<2>;  // for each stage, one producer thread adds dQ
  using ConsumerBarrierState = PipelineState<1>;
  static constexpr int kDsBuffers = kIsCluster ? 1 : 2;
  // One buffer of dQ is enough, except in e4m3, where steps are shorter, and in a deterministic
  // backward, where blocks wait for dq_semaphore: both have two buffers where there is room. In a
  // cluster, dQ overwrites Q.
  static constexpr bool kHasRoomForDq = kIsE4m3 ? kHeadDim <= 128 : kHeadDim <= 64;
  static constexpr int kDqBuffers =
      kIsCluster ? 0 : ((kIsE4m3 || kIsDeterministic) && kHasRoomForDq ? 2 : 1);

  // The totals of dK and of dV of a warpgroup in e4m3, see Promotion, and the floats of device
  // memory that either takes.
  static constexpr TotalColumns kTotals = fp8_backward_totals(kHeadDim);
  static constexpr int kGlobalTotals =
      kWarpgroupRows * (kColumns - kTotals.shared - kTotals.registers);
  // Where shared memory has no room for two copies of the window, there is one.
  using PositionWindow = sm90::PositionWindow<kRows, kBlockKeys, kIsCluster ? 1 : 2>;

  // Shared memory of a warpgroup that computes a relative bias; see backward_bias.h.
  struct BiasWarpgroupMemory {
    KeyTimes<kBlockKeys> keys;
    TimeBlockMemory<kRows, kBlockKeys> warps[4];
    int first_rows, last_rows;  // see TimesOfTile
    TableGradientMemory gradients;
  };
  struct RelativeBiasMemory {
    PositionWindow position[QState::kStages];  // copied with Q
    TimeBlockWeights<kBlockKeys> times[BiasState::kStages];
    BiasWarpgroupMemory warpgroups[kBiasWarpgroups];
  };

  struct SharedMemory {
    alignas(1024) Element k[kBlockKeys * kHeadDim];
    // In a cluster: this block's columns of the other block's keys.
    alignas(1024) Element other_k[kIsCluster ? kBlockKeys * kColumns : 0];
    alignas(1024) Element v[kBlockKeys * kHeadDim];
    alignas(1024) Element q[QState::kStages][kRows * kHeadDim];
    alignas(1024) Element dout[DoutState::kStages][kRows * kHeadDim];
    alignas(1024) Element k_columns[kIsE4m3 ? kBlockKeys * kHeadDim : 0];
    alignas(1024) Element q_columns[kIsE4m3 ? QState::kStages : 0][kRows * kHeadDim];
    alignas(1024) Element dout_columns[kIsE4m3 ? DoutState::kStages : 0][kRows * kHeadDim];
    alignas(1024) Element p[kIsCluster ? kRows * kKeys : 0];
    alignas(1024) Element ds[kDsBuffers][kRows * kKeys];
    alignas(1024) BiasElement bias[Bias::kHasTiles ? BiasState::kStages : 0][kRows * kBlockKeys];
    alignas(1024) Element zeros[kHasDenseBias ? kRows * 64 : 0];  // source of stores that zero drab
    alignas(1024) DqElement dq[kDqBuffers * Dq::kSize];
    alignas(16) float totals[kIsE4m3 ? kConsumers : 0][2][kWarpgroupRows * kTotals.shared];
    RelativeBiasMemory relative_bias[kHasRelativeBias ? 1 : 0];
    // One bit per key. Where warpgroups share keys, each has its own copy.
    alignas(16) uint64_t visible[QState::kStages][kSharesKeys ? kConsumers : kKeyGroups][kRows];
    WorkTile work_tiles[WorkState::kStages];
    RowTile row_tiles[QState::kStages];
    int work_index;                   // of the next work tile
    Pipeline<1> pipeline_work_index;  // from the first block of a cluster to the other
    Pipeline<WorkState::kStages> pipeline_work;
    Pipeline<KVState::kStages> pipeline_kv;  // K and V
    Pipeline<QState::kStages> pipeline_q;
    Pipeline<DoutState::kStages> pipeline_dout;
    Pipeline<MaskState::kStages> pipeline_mask;  // `visible`; pipeline_q says when it is full
    // The bias; pipeline_q says when a tile of a dense bias is full.
    Pipeline<BiasState::kStages> pipeline_bias;
    Pipeline<DsState::kStages> pipeline_ds;        // dS, from consumers to consumers
    Pipeline<DsState::kStages> pipeline_other_ds;  // P and dS from the other block of a cluster
    // In a cluster: a barrier of the consumers of a block.
    Pipeline<ConsumerBarrierState::kStages> consumer_barrier;
    Pipeline<DqState::kStages> pipeline_dq;  // dQ, from the consumers to the producer that adds it
    // The warp that copies rows arrives here when it has nearly finished a work tile, so that
    // find_work_tiles() gets the next one.
    cutlass::arch::ClusterBarrier next_work_wanted;
    // With kStoresDq: completes when the sums of dQ of a work tile have arrived in device memory.
    cutlass::arch::ClusterBarrier dq_sums_arrived;
  };

  static_assert(sizeof(SharedMemory) <= kSharedMemory, "a block has 227 KB of shared memory");

  static HSTU_DEVICE void init(const BackwardParams& params, SharedMemory& smem) {
    constexpr int kBiasThreads = kBiasWarpgroups * kWarpgroup;
    constexpr int kBiasArrivals = kBiasWarpgroups ? 4 * kArrivalsOfWarp : 0;  // of a step
    constexpr int kConsumerArrivals = kConsumerWarps * kArrivalsOfWarp;
    // Readers: all consumer threads, the warp that copies rows, the threads that add dQ, and the
    // threads that compute a relative bias.
    smem.pipeline_work.init(
        /*consumers=*/kConsumers * kWarpgroup + 32 + DqState::kStages + kBiasThreads);
    smem.pipeline_kv.init(/*consumers=*/kConsumerArrivals);
    // Where dQ overwrites Q, the thread that adds dQ is the last to read this memory.
    smem.pipeline_q.init(/*consumers=*/kIsCluster ? 1 : kConsumerArrivals, /*producers=*/32);
    smem.pipeline_dout.init(/*consumers=*/kConsumerArrivals);
    smem.pipeline_mask.init(/*consumers=*/kConsumers * kWarpgroup);
    smem.pipeline_bias.init(/*consumers=*/kConsumerArrivals,
                            /*producers=*/kBiasArrivals ? kBiasArrivals : 1);
    // Readers of dS: the 4 warps of each warpgroup that computes a part of dQ, the thread that
    // TMA-stores dS as drab, and the warps that sum it for the tables of a relative bias.
    smem.pipeline_ds.init(/*consumers=*/Dq::kAllWarpgroups * 4 * kArrivalsOfWarp +
                              (stores_ds(params) ? 1 : 0) + kBiasArrivals,
                          /*producers=*/kConsumerArrivals);
    smem.pipeline_work_index.init(/*consumers=*/1);
    smem.pipeline_other_ds.init(/*consumers=*/1, /*producers=*/kConsumers);
    smem.consumer_barrier.init(/*consumers=*/1, /*producers=*/kConsumers * kWarpgroup);
    smem.pipeline_dq.init(/*consumers=*/1, /*producers=*/Dq::kWarpgroups * kWarpgroup);
    smem.next_work_wanted.init(1);
    smem.dq_sums_arrived.init(DqState::kStages);
    cutlass::arch::fence_barrier_init();
  }

  // Computes for kCount rows from row `first` on which of the 64 keys of `group` each row sees.
  // Called by kThreads threads.
  template <int kCount, int kThreads>
  static HSTU_DEVICE void find_row_bits(const BackwardParams& params, const WorkTile& work_tile,
                                        int first, int group, uint64_t* visible) {
    const Sequence& sequence = work_tile.tile.sequence;
    const int key = first_key(work_tile) + group * 64;
#pragma unroll 1
    for (int n = reload_thread_idx() % kThreads; n < kCount; n += kThreads) {
      uint64_t bits = 0;
      if (first + n < sequence.q_len) {
        const MaskParams& mask = kIsClosedForm ? closed_form(params.mask) : params.mask;
        bits = Mask(mask, sequence, work_tile.head).row_bits(first + n, key);
      }
      visible[n] = bits;
    }
  }

  // True if dS, scaled by alpha * scale, is stored as the gradient of the bias.
  static HSTU_DEVICE bool stores_ds(const BackwardParams& params) {
    return kHasDenseBias && params.drab.data;
  }

  static HSTU_DEVICE Element* ds_tile(SharedMemory& smem, DsState state) {
    return smem.ds[kDsBuffers == 1 ? 0 : state.index()];
  }

  // The visible row tiles of a work tile, in the order of the main loop; -1: no more. The order is
  // ascending, so that blocks with different keys of a causal sequence work on different rows. In a
  // deterministic backward it is descending, so that each block waits only for one tile of the
  // block before it.
  static HSTU_DEVICE int first_row_tile(const WorkTile& work_tile) {
    return kIsDeterministic ? work_tile.map.last() : work_tile.map.first();
  }
  static HSTU_DEVICE int next_row_tile(const WorkTile& work_tile, int m) {
    return kIsDeterministic ? work_tile.map.before(m) : work_tile.map.after(m);
  }

  // True if there is no list of work tiles.
  static HSTU_DEVICE bool is_unlisted(const WorkList& list) {
    return kStoresDq || (kIsClosedForm && list.sequence_tiles > 0);
  }

  // The block's rank in its cluster.
  static HSTU_DEVICE int rank() {
    return kIsCluster ? static_cast<int>(cute::block_rank_in_cluster()) : 0;
  }

  // The first key of the block.
  static HSTU_DEVICE int first_key(const WorkTile& work_tile) {
    return work_tile.tile.index * kKeys + rank() * kBlockKeys;
  }

  // The block's parts of dQ in shared memory.
  static HSTU_DEVICE DqElement* dq_tile(SharedMemory& smem, DqState state) {
    if constexpr (kIsCluster) {
      return reinterpret_cast<DqElement*>(smem.q[state.index()]);
    } else {
      return smem.dq + (kDqBuffers == 2 ? state.index() * Dq::kSize : 0);
    }
  }
};

}  // namespace hstu::sm90
