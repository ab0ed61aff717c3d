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
  float* dq;         // [row tiles, H, rows x head dim], in the order of DqTile; zeroed
  TileSpans* turns;  // [row tiles]: the key tiles that take turns to add; null: in any order
  int* turns_taken;  // [row tiles, H]: how many have added; zeroed; null: in any order
};

// How the two consumer warpgroups of a block share an item.
enum class Sharing {
  // Each has 64 keys; one finds dQ of a step, the other of the next.
  kKeysAndSteps,
  // Each has 64 keys, and half of the columns of dQ, which would take too many registers.
  kKeys,
  // Two blocks of a cluster share it, since dK and dV of 64 keys would take all registers of a
  // warpgroup: see backward_cluster.h.
  kCluster,
};

constexpr Sharing sharing_of(int head_dim) {
  if (head_dim <= 64) return Sharing::kKeysAndSteps;
  return head_dim <= 128 ? Sharing::kKeys : Sharing::kCluster;
}

// A tile of dQ in fp32, in parts that are columns of it. A warpgroup has one of them, and leaves it
// in the order of its registers: four values of each thread, then the next four.
template <int kRows, int kHeadDim>
struct DqTile {
  static constexpr Sharing kSharing = sharing_of(kHeadDim);
  static constexpr int kWarpgroups = kSharing == Sharing::kKeysAndSteps ? 1 : 2;  // of a block
  static constexpr int kParts = kWarpgroups * (kSharing == Sharing::kCluster ? 2 : 1);
  static constexpr int kColumns = kHeadDim / kParts;  // of a part
  static constexpr int kPartSize = kRows * kColumns;
  static constexpr int kBlockSize = kPartSize * kWarpgroups;
  static constexpr int kSize = kPartSize * kParts;
  static_assert(kRows == kWarpgroupRows);
};

template <int kHeadDim_, typename Element_, bool kHasBias_, bool kIsDeterministic_>
struct BackwardBlock {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kHasBias = kHasBias_;
  static constexpr bool kIsDeterministic = kIsDeterministic_;
  static constexpr Sharing kSharing = sharing_of(kHeadDim);
  static constexpr bool kIsCluster = kSharing == Sharing::kCluster;
  static constexpr int kConsumers = 2;
  static constexpr int kConsumerWarps = kConsumers * 4;
  static constexpr int kRows = kBackwardRows;
  static constexpr int kKeys = kConsumers * kWarpgroupRows;
  static constexpr int kClusterBlocks = kIsCluster ? 2 : 1;
  // Of a block and its scores; where it is half a cluster, that of its rank.
  static constexpr int kBlockKeys = kKeys / kClusterBlocks;
  static constexpr int kKeyGroups = kBlockKeys / kWarpgroupRows;
  static constexpr int kScoreRows = kRows / kClusterBlocks;   // of a warpgroup's 64 keys
  static constexpr int kColumns = kHeadDim / kClusterBlocks;  // of a block's results
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr int kBlocksPerSm = 1;

  // Whether the warp that copies rows also finds which keys they see, and not each consumer, which
  // only has the registers for it while no product runs. It needs some that others cannot spare.
  static constexpr bool kProducersLook = kSharing == Sharing::kKeysAndSteps;
  static constexpr Registers kRegisters = backward_registers(kProducersLook);

  using Dq = DqTile<kRows, kHeadDim>;

  struct Item {
    WorkTile work;
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
  using ItemPlace = RingPlace<2>;
  using KeyPlace = RingPlace<1>;
  using RowPlace = RingPlace<2>;
  using MaskPlace = RingPlace<2>;  // of partial tiles, where producers look
  using DoutPlace = RingPlace<kIsCluster ? 1 : 2>;
  using BiasPlace = RingPlace<kHeadDim <= 64 ? 2 : 1>;
  using DsPlace = RingPlace<2>;
  using DqPlace = RingPlace<2>;  // a thread for each stage adds what comes in it
  using MeetingPlace = RingPlace<1>;
  static constexpr int kDsBuffers = kIsCluster ? 1 : 2;
  // One does, but where blocks wait for turns, if there is room; none where dQ takes the place of
  // Q.
  static constexpr int kDqBuffers = kIsCluster ? 0 : (kIsDeterministic && kHeadDim <= 64 ? 2 : 1);

  struct SharedMemory {
    alignas(1024) Element k[kBlockKeys * kHeadDim];
    // Of a cluster's other block, the columns of this one.
    alignas(1024) Element other_k[kIsCluster ? kBlockKeys * kColumns : 0];
    alignas(1024) Element v[kBlockKeys * kHeadDim];
    alignas(1024) Element q[RowPlace::kStages][kRows * kHeadDim];
    alignas(1024) Element dout[DoutPlace::kStages][kRows * kHeadDim];
    alignas(1024) Element p[kIsCluster ? kRows * kKeys : 0];
    alignas(1024) Element ds[kDsBuffers][kRows * kKeys];
    alignas(1024) Element bias[kHasBias ? BiasPlace::kStages : 0][kRows * kBlockKeys];
    alignas(1024) Element zeros[kHasBias ? kRows * 64 : 0];  // for its gradient
    alignas(1024) float dq[kDqBuffers * Dq::kSize];
    alignas(16) uint64_t visible[RowPlace::kStages][kKeyGroups][kRows];  // a bit for each key
    Item items[ItemPlace::kStages];
    RowTile row_tiles[RowPlace::kStages];
    int number;                   // of the item to be found
    Handover<1> number_handover;  // from a cluster's first block to the other
    Handover<ItemPlace::kStages> item_handover;
    Handover<KeyPlace::kStages> key_handover;  // of K and V
    Handover<RowPlace::kStages> q_handover;
    Handover<DoutPlace::kStages> dout_handover;
    Handover<MaskPlace::kStages> mask_handover;    // of `visible`, which is full when Q is
    Handover<BiasPlace::kStages> bias_handover;    // of the bias, which is full when Q is
    Handover<DsPlace::kStages> ds_handover;        // from consumers to consumers
    Handover<DsPlace::kStages> other_ds_handover;  // from those of a cluster's other block
    Handover<MeetingPlace::kStages> meeting;       // of a block's consumers, in a cluster
    Handover<DqPlace::kStages> dq_handover;        // from the consumers
    // Nearly all rows of an item are copied: it is time to look for the next one.
    cutlass::arch::ClusterBarrier item_nears_its_end;
  };

  static_assert(sizeof(SharedMemory) <= kSharedMemory, "a block has 227 KB of shared memory");

  static HSTU_DEVICE void init(const BackwardParams& params, SharedMemory& shared) {
    // Consumers, the warp that copies rows, and those that add dQ.
    shared.item_handover.init(kConsumers * kWarpgroup + 32 + DqPlace::kStages);
    shared.key_handover.init(kConsumerWarps);
    // Where dQ takes the place of Q, the thread that adds it is the last to read that.
    shared.q_handover.init(kIsCluster ? 1 : kConsumerWarps, 32);
    shared.dout_handover.init(kConsumerWarps);
    shared.mask_handover.init(kConsumers * kWarpgroup);
    shared.bias_handover.init(kConsumerWarps);
    // Those that find dQ of it, and the thread that stores it as a gradient of the bias.
    shared.ds_handover.init(Dq::kParts * 4 + (stores_ds(params) ? 1 : 0), kConsumerWarps);
    shared.number_handover.init(1);
    shared.other_ds_handover.init(1, kConsumers);
    shared.meeting.init(1, kConsumers * kWarpgroup);
    shared.dq_handover.init(1, Dq::kWarpgroups * kWarpgroup);
    shared.item_nears_its_end.init(1);
    cutlass::arch::fence_barrier_init();
  }

  // Which keys of a group each of kCount rows from row `first` on sees. By kThreads threads.
  template <int kCount, int kThreads>
  static HSTU_DEVICE void look_at_rows(const BackwardParams& params, const Item& item, int first,
                                       int group, uint64_t* visible) {
    const Sequence& sequence = item.work.sequence;
    const int key = first_key(item) + group * 64;
#pragma unroll 1
    for (int n = thread_anew() % kThreads; n < kCount; n += kThreads) {
      uint64_t bits = 0;
      if (first + n < sequence.q_len) {
        bits = Mask(params.mask, sequence, item.head).row_bits(first + n, key);
      }
      visible[n] = bits;
    }
  }

  // Whether dS, in full scale, is the gradient of the bias.
  static HSTU_DEVICE bool stores_ds(const BackwardParams& params) {
    return kHasBias && params.drab.data;
  }

  static HSTU_DEVICE Element* ds_tile(SharedMemory& shared, DsPlace place) {
    return shared.ds[kDsBuffers == 1 ? 0 : place.stage()];
  }

  // Of the blocks of a cluster.
  static HSTU_DEVICE int rank() {
    return kIsCluster ? static_cast<int>(cute::block_rank_in_cluster()) : 0;
  }

  // The first of the block's keys.
  static HSTU_DEVICE int first_key(const Item& item) {
    return item.work.tile * kKeys + rank() * kBlockKeys;
  }

  // Where the block's parts of dQ lie.
  static HSTU_DEVICE float* dq_tile(SharedMemory& shared, DqPlace place) {
    if constexpr (kIsCluster) {
      return reinterpret_cast<float*>(shared.q[place.stage()]);
    } else {
      return shared.dq + (kDqBuffers == 2 ? place.stage() * Dq::kSize : 0);
    }
  }
};

}  // namespace hstu::sm90
