// What a block of the forward works on and keeps in shared memory.
#pragma once

#include "paged_keys.h"
#include "pipeline.h"
#include "quantized_keys.h"
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
  bool is_quantized = false;  // pages are of e4m3, and become tiles of 16 bits
  // Blocks of a cluster that take a part each, and add up their sums in the end.
  int cluster_size = 1;
  bool is_split_kv = false;  // by items of the list: see SplitKV
};

constexpr KeyForm with_cluster(KeyForm form, int cluster_size) {
  form.cluster_size = cluster_size;
  return form;
}
constexpr KeyForm with_split_kv(KeyForm form) {
  form.is_split_kv = true;
  return form;
}

template <int kHeadDim_, typename Element_, bool kHasBias_, KeyForm kForm>
struct ForwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kHasBias = kHasBias_;
  static constexpr bool kIsPaged = kForm.source == KeySource::kPaged;
  static constexpr bool kIsQuantized = kForm.is_quantized;
  static constexpr ForwardTiles kTiles =
      forward_tiles<kHeadDim, kHasBias, kIsPaged, kIsQuantized>();
  static constexpr int kConsumers = kTiles.consumers;
  static constexpr int kRows = kConsumers * kWarpgroupRows;
  static constexpr int kKeys = kTiles.keys;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr int kBlocksPerSm = 1;
  static constexpr bool kBeginsUnlisted = true;
  static constexpr bool kWaitsForMemory = true;  // where sequences are short
  static constexpr int kNoWork = INT_MAX;
  static constexpr int kNoKey = INT_MAX;
  static constexpr int kFinderLanes = kConsumers + 1;  // lanes: see find_work_tile()
  static constexpr Registers kRegisters =
      forward_registers(kHeadDim, kConsumers, kIsPaged, kIsQuantized);
  static constexpr int kClusterSize = kForm.cluster_size;
  static constexpr bool kIsSplitKV = kForm.is_split_kv;
  static constexpr bool kIsClusterSplit = kClusterSize > 1;
  static_assert(!kIsSplitKV || (kIsPaged && !kIsClusterSplit), "what split-KV is made for");
  static_assert(!kIsQuantized || (kIsPaged && !kHasBias), "a bias leaves no room for scales");
  static_assert(kRegisters.producer + kConsumers * kRegisters.consumer <=
                    (1 + kConsumers) * (65536 / kThreads / 8 * 8),
                "warpgroups would wait for registers that a block does not have");
  static constexpr int kKVCopyLanes = kIsPaged ? 32 : 1;     // lanes that copy K, and V
  static constexpr int kQCopyLanes = kIsQuantized ? 32 : 1;  // Q, and what is stored

  using ScoreMma = SmemMma<Element, kKeys, kHeadDim>;
  using OutMma = RegisterMma<Element, kHeadDim, kKeys>;

  struct WorkTile {
    SequenceTile tile;
    SpanSummary summary;   // of what its rows see
    int head;              // -1: there are no more
    int keys[kConsumers];  // end of those that some row of a warpgroup sees
    PageList pages;
    Interval split;    // of the keys, where they are shared: see SplitKV
    int other_splits;  // in which its rows see keys

    // The first visible tile of keys from key `first` on, by its first key; kNoKey: there is none.
    HSTU_DEVICE int tile_from(int first) const {
      if constexpr (!kIsSplitKV) return tile_of(first, INT_MAX);
      return tile_of(max(first, split.begin), split.end);
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
      return kIsSplitKV ? min(last, split.end) : last;
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
  static constexpr int kTilesLeft = kIsSplitKV ? 4 : 2;
  using WorkState = PipelineState<4>;
  using QState = PipelineState<kTiles.query_stages>;
  using KVState = PipelineState<kTiles.key_stages>;
  using BiasState = PipelineState<2>;
  using Quantized = QuantizedTiles<KVState::kStages, kKeys>;

  struct SharedMemory {
    alignas(1024) Element q[QState::kStages][kConsumers][kWarpgroupRows * kHeadDim];
    alignas(1024) Element k[KVState::kStages][kKeys * kHeadDim];
    alignas(1024) Element v[KVState::kStages][kKeys * kHeadDim];
    alignas(1024) Element bias[kHasBias ? BiasState::kStages : 0][kRows * kKeys];
    WorkTile work_tiles[WorkState::kStages];
    Quantized quantized[kIsQuantized ? 2 : 0];  // keys, values
    KeyTile key_tiles[KVState::kStages];
    int work_index;  // of the item to be found
    cutlass::arch::ClusterBarrier next_work_wanted;
    Pipeline<WorkState::kStages> pipeline_work;
    Pipeline<QState::kStages> pipeline_q;
    Pipeline<KVState::kStages> pipeline_k;
    Pipeline<KVState::kStages> pipeline_v;
    Pipeline<BiasState::kStages> pipeline_bias;
  };
  static_assert(sizeof(SharedMemory) <= kSharedMemory, "a block has 227 KB of shared memory");

  // By one thread.
  static HSTU_DEVICE void init(SharedMemory& smem) {
    // From the lanes that find an item; to the consumers and the threads that copy.
    smem.pipeline_work.init(kConsumers * kWarpgroup + kQCopyLanes + 2 * kKVCopyLanes, kFinderLanes);
    if constexpr (kIsQuantized) {
      for (Quantized& quantized : smem.quantized) quantized.init();
    }
    constexpr int kConsumerWarps = kConsumers * 4;
    smem.pipeline_q.init(kConsumerWarps);
    smem.pipeline_k.init(kConsumerWarps);
    smem.pipeline_v.init(kConsumerWarps);
    smem.pipeline_bias.init(kConsumerWarps);
    smem.next_work_wanted.init(1);
    cutlass::arch::fence_barrier_init();
  }
};

}  // namespace hstu::sm90
