// What a block of the backward works on and keeps in shared memory.
#pragma once

#include "../common/work_list.h"
#include "pipeline.h"
#include "stores.h"

namespace hstu::sm90 {

struct BackwardMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap dout;
};

// What a backward call keeps in its workspace.
struct BackwardBuffers {
  WorkList list;
  float* dq;         // [row tiles, H, rows x head dim], in the order of DqTile; zeroed
  TileSpans* turns;  // [row tiles]: the key tiles that take turns to add; null: in any order
  int* turns_taken;  // [row tiles, H]: how many have added; zeroed; null: in any order
};

// How the two consumer warpgroups share an item.
enum class Sharing {
  // Each has 64 keys; one finds dQ of a step, the other of the next.
  kKeysAndSteps,
  // Each has 64 keys, and half of the columns of dQ, which would take too many registers.
  kKeys,
  // Each has half of the rows of S and dP, and half of the columns of all results: dK and dV of 64
  // keys would take all registers. P and dS both go through shared memory.
  kColumns,
};

constexpr Sharing sharing_of(int head_dim) {
  if (head_dim <= 64) return Sharing::kKeysAndSteps;
  return head_dim <= 128 ? Sharing::kKeys : Sharing::kColumns;
}

// A tile of dQ in fp32. Of one tile, kWarpgroups warpgroups have a part each, some of the columns.
template <int kRows, int kHeadDim>
struct DqTile {
  static constexpr Sharing kSharing = sharing_of(kHeadDim);
  static constexpr int kWarpgroups = kSharing == Sharing::kKeysAndSteps ? 1 : 2;
  static constexpr int kColumns = kHeadDim / kWarpgroups;
  static constexpr int kValues = kRows * kColumns / kWarpgroup;  // of a thread
  static constexpr int kSize = kRows * kHeadDim;
  static_assert(kRows == kWarpgroupRows);

  // In memory it lies in kPieces: each has a share of all parts, one part after another, and of
  // these four values of each thread, then the next four.
  static constexpr int kPieces = kSharing == Sharing::kColumns ? 2 : 1;
  static constexpr int kPieceSize = kSize / kPieces;
  static constexpr int kPieceValues = kValues / kPieces;
  static constexpr HSTU_DEVICE int offset(int part, int n) {  // in a piece
    return part * (kPieceSize / kWarpgroups) + n * kWarpgroup;
  }
};

template <int kHeadDim_, typename Element_, bool kIsDeterministic_>
struct BackwardBlock {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kIsDeterministic = kIsDeterministic_;
  static constexpr Sharing kSharing = sharing_of(kHeadDim);
  static constexpr bool kSplitsColumns = kSharing == Sharing::kColumns;
  static constexpr int kConsumers = 2;
  static constexpr int kConsumerWarps = kConsumers * 4;
  static constexpr int kRows = kBackwardRows;
  static constexpr int kKeyGroups = kSplitsColumns ? 1 : kConsumers;  // of 64 keys
  static constexpr int kKeys = kKeyGroups * kWarpgroupRows;
  static constexpr int kScoreRows = kSplitsColumns ? kRows / 2 : kRows;  // of a warpgroup's 64 keys
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr int kBlocksPerSm = 1;

  // Whether the warp that copies rows also finds which keys they see, and not each consumer, which
  // only has the registers for it while no product runs. It needs some that others cannot spare.
  static constexpr bool kProducersLook = kSharing == Sharing::kKeysAndSteps;
  static constexpr Registers kRegisters = backward_registers(kProducersLook);

  using Dq = DqTile<kRows, kHeadDim>;

  struct Item {
    WorkTile work;
    int64_t first_row_tile;  // of the sequence
    int head;                // -1: there are no more
    TileMap map;             // of tiles of rows
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
  using DsPlace = RingPlace<kSplitsColumns ? 1 : 2>;
  using DqPlace = RingPlace<2>;  // a thread for each stage adds what comes in it
  // One does, but where blocks wait for turns, if there is room; none where dQ takes the place of
  // its rows.
  static constexpr int kDqBuffers =
      kSplitsColumns ? 0 : (kIsDeterministic && kHeadDim <= 64 ? 2 : 1);

  struct SharedMemory {
    alignas(1024) Element k[kKeys * kHeadDim];
    alignas(1024) Element v[kKeys * kHeadDim];
    alignas(1024) Element q[RowPlace::kStages][kRows * kHeadDim];
    alignas(1024) Element dout[RowPlace::kStages][kRows * kHeadDim];
    alignas(1024) Element p[kSplitsColumns ? kRows * kKeys : 1];
    alignas(1024) Element ds[DsPlace::kStages][kRows * kKeys];
    alignas(1024) float dq[kDqBuffers == 0 ? 1 : kDqBuffers * Dq::kSize];
    alignas(16) uint64_t visible[RowPlace::kStages][kKeyGroups][kRows];  // a bit for each key
    Item items[ItemPlace::kStages];
    RowTile row_tiles[RowPlace::kStages];
    int number;  // of the item to be found
    Handover<ItemPlace::kStages> item_handover;
    Handover<KeyPlace::kStages> key_handover;  // of K and V
    Handover<RowPlace::kStages> q_handover;
    Handover<RowPlace::kStages> dout_handover;
    Handover<MaskPlace::kStages> mask_handover;  // of `visible`, which is full when Q is
    Handover<DsPlace::kStages> ds_handover;      // from consumers to consumers
    Handover<DqPlace::kStages> dq_handover;      // from the consumers
    // Nearly all rows of an item are copied: it is time to look for the next one.
    cutlass::arch::ClusterBarrier item_nears_its_end;
  };

  static_assert(sizeof(SharedMemory) <= kSharedMemory, "a block has 227 KB of shared memory");

  static HSTU_DEVICE void init(SharedMemory& shared) {
    // Consumers, the warp that copies rows, and those that add dQ.
    shared.item_handover.init(kConsumers * kWarpgroup + 32 + DqPlace::kStages);
    shared.key_handover.init(kConsumerWarps);
    // Where dQ takes the place of its rows, the thread that adds it is the last to read that.
    shared.q_handover.init(kSplitsColumns ? 1 : kConsumerWarps, 32);
    shared.dout_handover.init(kSplitsColumns ? 1 : kConsumerWarps);
    shared.mask_handover.init(kConsumers * kWarpgroup);
    shared.ds_handover.init(Dq::kWarpgroups * 4, kConsumerWarps);
    shared.dq_handover.init(1, Dq::kWarpgroups * kWarpgroup);
    shared.item_nears_its_end.init(1);
    cutlass::arch::fence_barrier_init();
  }

  // Which keys of a group each of kCount rows from row `first` on sees. By kThreads threads.
  template <int kCount, int kThreads>
  static HSTU_DEVICE void look_at_rows(const BackwardParams& params, const Item& item, int first,
                                       int group, uint64_t* visible) {
    const Sequence& sequence = item.work.sequence;
    const int key = item.work.tile * kKeys + group * 64;
#pragma unroll 1
    for (int n = thread_anew() % kThreads; n < kCount; n += kThreads) {
      uint64_t bits = 0;
      if (first + n < sequence.q_len) {
        bits = Mask(params.mask, sequence, item.head).row_bits(first + n, key);
      }
      visible[n] = bits;
    }
  }

  // Where a piece of dQ lies.
  static HSTU_DEVICE float* dq_piece(SharedMemory& shared, DqPlace place, int piece) {
    if constexpr (kSplitsColumns) {
      Element* const rows = piece == 0 ? shared.q[place.stage()] : shared.dout[place.stage()];
      return reinterpret_cast<float*>(rows);
    } else {
      return shared.dq + (kDqBuffers == 2 ? place.stage() * Dq::kSize : 0);
    }
  }
};

}  // namespace hstu::sm90
