// What a block of the forward works on and keeps in shared memory.
#pragma once

#include "paged_keys.h"
#include "pipeline.h"
#include "quantised_keys.h"
#include "split.h"
#include "tensors.h"

namespace hstu::sm90 {

struct ForwardMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap bias;
  PageMap pages;
};

// Where keys come from, and who shares an item's.
struct KeyForm {
  KeySource source = KeySource::kPacked;
  bool is_quantised = false;  // pages are of e4m3, and become tiles of 16 bits
  // Blocks of a cluster that take a part each, and add up their sums in the end.
  int splits = 1;
  bool is_shared = false;  // by items of the list: see KeyShares
};

constexpr KeyForm with_splits(KeyForm form, int splits) {
  form.splits = splits;
  return form;
}
constexpr KeyForm with_shares(KeyForm form) {
  form.is_shared = true;
  return form;
}

template <int kHeadDim_, typename Element_, bool kHasBias_, KeyForm kForm>
struct ForwardBlock {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kHasBias = kHasBias_;
  static constexpr bool kIsPaged = kForm.source == KeySource::kPaged;
  static constexpr bool kIsQuantised = kForm.is_quantised;
  static constexpr ForwardTiles kTiles =
      forward_tiles<kHeadDim, kHasBias, kIsPaged, kIsQuantised>();
  static constexpr int kConsumers = kTiles.consumers;
  static constexpr int kRows = kConsumers * kWarpgroupRows;
  static constexpr int kKeys = kTiles.keys;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr int kBlocksPerSm = 1;
  static constexpr bool kBeginsUnlisted = true;
  static constexpr bool kWaitsForMemory = true;  // where sequences are short
  static constexpr int kNoItem = INT_MAX;
  static constexpr int kNoKey = INT_MAX;
  static constexpr int kFinders = kConsumers + 1;  // lanes: see find_item()
  static constexpr Registers kRegisters =
      forward_registers(kHeadDim, kConsumers, kIsPaged, kIsQuantised);
  static constexpr int kSplits = kForm.splits;
  static constexpr int kClusterBlocks = kSplits;
  static constexpr bool kIsShared = kForm.is_shared;
  static constexpr bool kIsSplit = kSplits > 1;
  static_assert(!kIsShared || (kIsPaged && !kIsSplit), "what shares are made for");
  static_assert(!kIsQuantised || (kIsPaged && !kHasBias), "a bias leaves no room for scales");
  static_assert(kRegisters.producer + kConsumers * kRegisters.consumer <=
                    (1 + kConsumers) * (65536 / kThreads / 8 * 8),
                "warpgroups would wait for registers that a block does not have");
  static constexpr int kCopiers = kIsPaged ? 32 : 1;           // lanes that copy K, and V
  static constexpr int kQueryCopiers = kIsQuantised ? 32 : 1;  // Q, and what is stored

  using ScoreMma = SharedMma<Element, kKeys, kHeadDim>;
  using OutMma = RegisterMma<Element, kHeadDim, kKeys>;

  struct Item {
    WorkTile work;
    SpanSummary summary;   // of what its rows see
    int head;              // -1: there are no more
    int keys[kConsumers];  // end of those that some row of a warpgroup sees
    PageList pages;
    Interval share;    // of the keys, where they are shared: see KeyShares
    int other_shares;  // in which its rows see keys

    // The first visible tile of keys from key `first` on, by its first key; kNoKey: there is none.
    HSTU_DEVICE int tile_from(int first) const {
      if constexpr (!kIsShared) return tile_of(first, INT_MAX);
      return tile_of(max(first, share.begin), share.end);
    }
    // The first visible tile of keys from key `first` on that begins before key `last`.
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
      return kIsShared ? min(last, share.end) : last;
    }
  };
  // A tile of keys of an item; in one register.
  struct KeyTile {
    static constexpr int kPartial = 1;
    static constexpr int kLast = 2;         // of the item
    static constexpr int kLastOfFirst = 4;  // that warpgroup 0 sees; then a bit for each other one
    static constexpr int kFlags = (kLastOfFirst << kConsumers) - 1;
    static_assert(kKeys > kFlags, "a tile's first key leaves bits free");

    int bits;

    HSTU_DEVICE int first_key() const { return bits & ~kFlags; }
    HSTU_DEVICE bool is_partial() const { return bits & kPartial; }
    HSTU_DEVICE bool is_last() const { return bits & kLast; }
    HSTU_DEVICE bool is_last_of(int warpgroup) const { return bits & kLastOfFirst << warpgroup; }
  };
  // The next item is looked for when a few tiles of the last one are left to be copied: earlier, it
  // would be kept from other blocks, which are idle in the end. Shares may be short, and what comes
  // after the last tile of one takes longer: more are left.
  static constexpr int kTilesLeft = kIsShared ? 4 : 2;
  using ItemPlace = RingPlace<4>;
  using QueryPlace = RingPlace<kTiles.query_stages>;
  using KeyPlace = RingPlace<kTiles.key_stages>;
  using BiasPlace = RingPlace<2>;
  using Quantised = QuantisedTiles<KeyPlace::kStages, kKeys>;

  struct SharedMemory {
    alignas(1024) Element q[QueryPlace::kStages][kConsumers][kWarpgroupRows * kHeadDim];
    alignas(1024) Element k[KeyPlace::kStages][kKeys * kHeadDim];
    alignas(1024) Element v[KeyPlace::kStages][kKeys * kHeadDim];
    alignas(1024) Element bias[kHasBias ? BiasPlace::kStages : 0][kRows * kKeys];
    Item items[ItemPlace::kStages];
    Quantised quantised[kIsQuantised ? 2 : 0];  // keys, values
    KeyTile key_tiles[KeyPlace::kStages];
    int number;  // of the item to be found
    cutlass::arch::ClusterBarrier next_item_wanted;
    Handover<ItemPlace::kStages> item_handover;
    Handover<QueryPlace::kStages> q_handover;
    Handover<KeyPlace::kStages> k_handover;
    Handover<KeyPlace::kStages> v_handover;
    Handover<BiasPlace::kStages> bias_handover;
  };
  static_assert(sizeof(SharedMemory) <= kSharedMemory, "a block has 227 KB of shared memory");

  // By one thread.
  static HSTU_DEVICE void init(SharedMemory& shared) {
    // From the lanes that find an item; to the consumers and the threads that copy.
    shared.item_handover.init(kConsumers * kWarpgroup + kQueryCopiers + 2 * kCopiers, kFinders);
    if constexpr (kIsQuantised) {
      for (Quantised& quantised : shared.quantised) quantised.init();
    }
    constexpr int kConsumerWarps = kConsumers * 4;
    shared.q_handover.init(kConsumerWarps);
    shared.k_handover.init(kConsumerWarps);
    shared.v_handover.init(kConsumerWarps);
    shared.bias_handover.init(kConsumerWarps);
    shared.next_item_wanted.init(1);
    cutlass::arch::fence_barrier_init();
  }
};

}  // namespace hstu::sm90
