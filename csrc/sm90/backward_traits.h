// What a block of the backward works on and keeps in shared memory.
#pragma once

#include "../scheduler/work_list.h"
#include "pipeline.h"
#include "stores.h"

namespace hstu::sm90 {

struct BackwardMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap dout;
  CUtensorMap bias;
  CUtensorMap bias_gradient;
};

// What a backward call keeps in its workspace.
struct BackwardBuffers {
  WorkList list;
  float* dq;              // [row tiles, H, rows x head dim], in the order of DqTile; zeroed
  TileSpans* dq_writers;  // [row tiles]: the key tiles that take turns to add; null: in any order
  int* dq_semaphore;      // [row tiles, H]: how many have added; zeroed; null: in any order
};

// How the two consumer warpgroups of a block share an item.
enum class DqPartition {
  // Each has 64 keys; one finds dQ of a step, the other of the next.
  kAlternateSteps,
  // Each has 64 keys, and half of the columns of dQ, which would take too many registers.
  kColumnHalves,
  // Two blocks of a cluster share it, since dK and dV of 64 keys would take all registers of a
  // warpgroup: see backward_cluster.h.
  kCluster,
};

constexpr DqPartition dq_partition_of(int head_dim) {
  if (head_dim <= 64) return DqPartition::kAlternateSteps;
  return head_dim <= 128 ? DqPartition::kColumnHalves : DqPartition::kCluster;
}

// A tile of dQ in fp32, in parts that are columns of it. A warpgroup has one of them, and leaves it
// in the order of its registers: four values of each thread, then the next four.
template <int kRows, int kHeadDim>
struct DqTile {
  static constexpr DqPartition kDqPartition = dq_partition_of(kHeadDim);
  static constexpr int kWarpgroups =
      kDqPartition == DqPartition::kAlternateSteps ? 1 : 2;  // of a block
  static constexpr int kParts = kWarpgroups * (kDqPartition == DqPartition::kCluster ? 2 : 1);
  static constexpr int kColumns = kHeadDim / kParts;  // of a part
  static constexpr int kPartSize = kRows * kColumns;
  static constexpr int kBlockSize = kPartSize * kWarpgroups;
  static constexpr int kSize = kPartSize * kParts;
  static_assert(kRows == kWarpgroupRows);
};

template <int kHeadDim_, typename Element_, bool kHasBias_, bool kIsDeterministic_>
struct BackwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kHasBias = kHasBias_;
  static constexpr bool kIsDeterministic = kIsDeterministic_;
  static constexpr DqPartition kDqPartition = dq_partition_of(kHeadDim);
  static constexpr bool kIsCluster = kDqPartition == DqPartition::kCluster;
  static constexpr int kConsumers = 2;
  static constexpr int kConsumerWarps = kConsumers * 4;
  static constexpr int kRows = kBackwardRows;
  static constexpr int kKeys = kConsumers * kWarpgroupRows;
  static constexpr int kClusterSize = kIsCluster ? 2 : 1;
  // Of a block and its scores; where it is half a cluster, that of its rank.
  static constexpr int kBlockKeys = kKeys / kClusterSize;
  static constexpr int kKeyGroups = kBlockKeys / kWarpgroupRows;
  static constexpr int kScoreRows = kRows / kClusterSize;   // of a warpgroup's 64 keys
  static constexpr int kColumns = kHeadDim / kClusterSize;  // of a block's results
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr int kBlocksPerSm = 1;

  // Whether the warp that copies rows also finds which keys they see, and not each consumer, which
  // only has the registers for it while no product runs. It needs some that others cannot spare.
  static constexpr bool kProducerFindsMask = kDqPartition == DqPartition::kAlternateSteps;
  static constexpr Registers kRegisters = backward_registers(kProducerFindsMask);

  using Dq = DqTile<kRows, kHeadDim>;

  struct WorkTile {
    SequenceTile tile;
    int first_row_tile;  // of the sequence
    int head;            // -1: there are no more
    int bias_head;
    TileMap map;        // of tiles of rows
    int last_row_tile;  // that it meets; -1: it meets none
  };
  // A tile of rows of an item; in one register.
  struct RowTile {
    static constexpr int kPartial = 1;
    static constexpr int kLast = 2;
    static constexpr int kFlags = 3;

    int bits;

    HSTU_DEVICE int first_row() const { return bits & ~kFlags; }
    HSTU_DEVICE bool is_partial() const { return bits & kPartial; }
    HSTU_DEVICE bool is_last() const { return bits & kLast; }
  };
  using WorkState = PipelineState<2>;
  using KVState = PipelineState<1>;
  using QState = PipelineState<2>;
  using MaskState = PipelineState<2>;  // of partial tiles, where producers look
  using DoutState = PipelineState<kIsCluster ? 1 : 2>;
  using BiasState = PipelineState<kHeadDim <= 64 ? 2 : 1>;
  using DsState = PipelineState<2>;
  using DqState = PipelineState<2>;  // a thread for each stage adds what comes in it
  using ConsumerBarrierState = PipelineState<1>;
  static constexpr int kDsBuffers = kIsCluster ? 1 : 2;
  // One does, but where blocks wait for turns, if there is room; none where dQ takes the place of
  // Q.
  static constexpr int kDqBuffers = kIsCluster ? 0 : (kIsDeterministic && kHeadDim <= 64 ? 2 : 1);

  struct SharedMemory {
    alignas(1024) Element k[kBlockKeys * kHeadDim];
    // Of a cluster's other block, the columns of this one.
    alignas(1024) Element other_k[kIsCluster ? kBlockKeys * kColumns : 0];
    alignas(1024) Element v[kBlockKeys * kHeadDim];
    alignas(1024) Element q[QState::kStages][kRows * kHeadDim];
    alignas(1024) Element dout[DoutState::kStages][kRows * kHeadDim];
    alignas(1024) Element p[kIsCluster ? kRows * kKeys : 0];
    alignas(1024) Element ds[kDsBuffers][kRows * kKeys];
    alignas(1024) Element bias[kHasBias ? BiasState::kStages : 0][kRows * kBlockKeys];
    alignas(1024) Element zeros[kHasBias ? kRows * 64 : 0];  // for its gradient
    alignas(1024) float dq[kDqBuffers * Dq::kSize];
    alignas(16) uint64_t visible[QState::kStages][kKeyGroups][kRows];  // a bit for each key
    WorkTile work_tiles[WorkState::kStages];
    RowTile row_tiles[QState::kStages];
    int work_index;                   // of the item to be found
    Pipeline<1> pipeline_work_index;  // from a cluster's first block to the other
    Pipeline<WorkState::kStages> pipeline_work;
    Pipeline<KVState::kStages> pipeline_kv;  // of K and V
    Pipeline<QState::kStages> pipeline_q;
    Pipeline<DoutState::kStages> pipeline_dout;
    Pipeline<MaskState::kStages> pipeline_mask;    // of `visible`, which is full when Q is
    Pipeline<BiasState::kStages> pipeline_bias;    // of the bias, which is full when Q is
    Pipeline<DsState::kStages> pipeline_ds;        // from consumers to consumers
    Pipeline<DsState::kStages> pipeline_other_ds;  // from those of a cluster's other block
    // At which the consumers of a block wait for each other, in a cluster.
    Pipeline<ConsumerBarrierState::kStages> consumer_barrier;
    Pipeline<DqState::kStages> pipeline_dq;  // from the consumers
    // Nearly all rows of an item are copied: it is time to look for the next one.
    cutlass::arch::ClusterBarrier next_work_wanted;
  };

  static_assert(sizeof(SharedMemory) <= kSharedMemory, "a block has 227 KB of shared memory");

  static HSTU_DEVICE void init(const BackwardParams& params, SharedMemory& smem) {
    // Consumers, the warp that copies rows, and those that add dQ.
    smem.pipeline_work.init(kConsumers * kWarpgroup + 32 + DqState::kStages);
    smem.pipeline_kv.init(kConsumerWarps);
    // Where dQ takes the place of Q, the thread that adds it is the last to read that.
    smem.pipeline_q.init(kIsCluster ? 1 : kConsumerWarps, 32);
    smem.pipeline_dout.init(kConsumerWarps);
    smem.pipeline_mask.init(kConsumers * kWarpgroup);
    smem.pipeline_bias.init(kConsumerWarps);
    // Those that find dQ of it, and the thread that stores it as a gradient of the bias.
    smem.pipeline_ds.init(Dq::kParts * 4 + (stores_ds(params) ? 1 : 0), kConsumerWarps);
    smem.pipeline_work_index.init(1);
    smem.pipeline_other_ds.init(1, kConsumers);
    smem.consumer_barrier.init(1, kConsumers * kWarpgroup);
    smem.pipeline_dq.init(1, Dq::kWarpgroups * kWarpgroup);
    smem.next_work_wanted.init(1);
    cutlass::arch::fence_barrier_init();
  }

  // Which keys of a group each of kCount rows from row `first` on sees. By kThreads threads.
  template <int kCount, int kThreads>
  static HSTU_DEVICE void find_row_bits(const BackwardParams& params, const WorkTile& work_tile,
                                        int first, int group, uint64_t* visible) {
    const Sequence& sequence = work_tile.tile.sequence;
    const int key = first_key(work_tile) + group * 64;
#pragma unroll 1
    for (int n = reload_thread_idx() % kThreads; n < kCount; n += kThreads) {
      uint64_t bits = 0;
      if (first + n < sequence.q_len) {
        bits = Mask(params.mask, sequence, work_tile.head).row_bits(first + n, key);
      }
      visible[n] = bits;
    }
  }

  // Whether dS, in full scale, is the gradient of the bias.
  static HSTU_DEVICE bool stores_ds(const BackwardParams& params) {
    return kHasBias && params.drab.data;
  }

  static HSTU_DEVICE Element* ds_tile(SharedMemory& smem, DsState state) {
    return smem.ds[kDsBuffers == 1 ? 0 : state.index()];
  }

  // Of the blocks of a cluster.
  static HSTU_DEVICE int rank() {
    return kIsCluster ? static_cast<int>(cute::block_rank_in_cluster()) : 0;
  }

  // The first of the block's keys.
  static HSTU_DEVICE int first_key(const WorkTile& work_tile) {
    return work_tile.tile.index * kKeys + rank() * kBlockKeys;
  }

  // Where the block's parts of dQ lie.
  static HSTU_DEVICE float* dq_tile(SharedMemory& smem, DqState state) {
    if constexpr (kIsCluster) {
      return reinterpret_cast<float*>(smem.q[state.index()]);
    } else {
      return smem.dq + (kDqBuffers == 2 ? state.index() * Dq::kSize : 0);
    }
  }
};

}  // namespace hstu::sm90
