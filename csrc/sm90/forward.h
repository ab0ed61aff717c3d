// The fused forward: O = (M * silu(alpha * (Q K^T + bias)) * scale) V.
//
// A work item is a tile of rows of one head, 64 rows for each of two or three consumer warpgroups.
// In the producer warpgroup, one warp finds the items and which tiles of keys they see, and a
// thread of each other warp copies Q, K or V by TMA. Consumers multiply by wgmma; scores and P
// never leave the registers.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "../common/activation.h"
#include "../common/launch.h"
#include "../common/work_list.h"
#include "../common/zero.h"
#include "bias.h"
#include "paged_keys.h"
#include "pipeline.h"
#include "split.h"
#include "stores.h"
#include "tensors.h"

namespace hstu::sm90 {

struct ForwardMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap bias;
  PageMap pages;
};

// The keys of an item may be shared in two ways: kSplits blocks of a cluster take a part each and
// add up their sums in the end; or they make several items of the list, see
// KeyShares.
template <int kHeadDim_, typename Element_, bool kHasBias, KeySource kSource = KeySource::kPacked,
          int kSplits = 1, bool kIsShared_ = false>
struct Forward {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kIsPaged = kSource == KeySource::kPaged;
  static constexpr ForwardTiles kTiles = forward_tiles<kHeadDim, kHasBias, kIsPaged>();
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
  static constexpr Registers kRegisters = forward_registers(kHeadDim, kConsumers, kIsPaged);
  static constexpr int kClusterBlocks = kSplits;
  static constexpr bool kIsShared = kIsShared_;
  static constexpr bool kIsSplit = kSplits > 1;
  static_assert(!kIsShared || (kIsPaged && !kIsSplit), "what shares are made for");
  static_assert(kRegisters.producer + kConsumers * kRegisters.consumer <=
                    (1 + kConsumers) * (65536 / kThreads / 8 * 8),
                "warpgroups would wait for registers that a block does not have");
  static constexpr int kCopiers = kIsPaged ? 32 : 1;  // lanes that copy K, and V

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
  // would be kept from other blocks, which are idle in the end.// A share is too short to wait for
  // that.
  static constexpr int kTilesLeft = kIsShared ? 4 : 2;
  using ItemPlace = RingPlace<4>;
  using QueryPlace = RingPlace<kTiles.query_stages>;
  using KeyPlace = RingPlace<kTiles.key_stages>;
  using BiasPlace = RingPlace<2>;

  struct SharedMemory {
    alignas(1024) Element q[QueryPlace::kStages][kConsumers][kWarpgroupRows * kHeadDim];
    alignas(1024) Element k[KeyPlace::kStages][kKeys * kHeadDim];
    alignas(1024) Element v[KeyPlace::kStages][kKeys * kHeadDim];
    alignas(1024) Element bias[kHasBias ? BiasPlace::kStages : 0][kRows * kKeys];
    Item items[ItemPlace::kStages];
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

  static HSTU_DEVICE void run(const ForwardParams& params, const ForwardMaps& maps,
                              const WorkList& list, const KeyShares& shares, SharedMemory& shared) {
    constexpr int kConsumerWarps = kConsumers * 4;
    if (threadIdx.x == 0) {
      // From the lanes that find an item; to the consumers and the threads that copy.
      shared.item_handover.init(kConsumers * kWarpgroup + 1 + 2 * kCopiers, kFinders);
      shared.q_handover.init(kConsumerWarps);
      shared.k_handover.init(kConsumerWarps);
      shared.v_handover.init(kConsumerWarps);
      shared.bias_handover.init(kConsumerWarps);
      shared.next_item_wanted.init(1);
      cutlass::arch::fence_barrier_init();
      prefetch_map(maps.q);
      prefetch_map(maps.k);
      prefetch_map(maps.v);
      if constexpr (kHasBias) prefetch_map(maps.bias);
      if constexpr (kIsPaged) prefetch_map(maps.pages.map);
    }
    __syncthreads();
    if (!list.tiles) wait_for_previous_kernel();  // else before the list is read

    // NOTE: by a shuffle, so that the compiler knows it to be the same in all lanes.
    const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<kRegisters.producer>();
      if (threadIdx.x < 32) find_items(params, list, shares, shared);
      if (threadIdx.x == 32) copy_queries(maps, shared);
      if (threadIdx.x >= 64 && threadIdx.x < 64 + kCopiers) copy_keys(params, maps, shared);
      if (threadIdx.x >= 96 && threadIdx.x < 96 + kCopiers) copy_values(params, maps, shared);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kRegisters.consumer>();
      consume(params, shares, shared, warpgroup - 1);
      if (!list.tiles) {  // nothing else ran before
        const int warp =
            static_cast<int>(blockIdx.x) * kConsumerWarps + static_cast<int>(threadIdx.x) / 32 - 4;
        zero_gaps<RowsOf::kQueries>(params.batch, params.out, params.heads, warp,
                                    static_cast<int>(gridDim.x) * kConsumerWarps);
      }
    }
  }

 private:
  // --------------------------------------------------------------------------------- producers

  // By one warp, which zeroes the outputs of items that see no key; consumers do not get them.
  static HSTU_DEVICE void find_items(const ForwardParams& params, const WorkList& list,
                                     const KeyShares& shares, SharedMemory& shared) {
    const int lane = static_cast<int>(threadIdx.x);
    ItemPlace place;
    if (lane == 0) shared.number = static_cast<int>(blockIdx.x) / kSplits;
    __syncwarp();
    for (;;) {
      // NOTE: in shared memory, since producers have few registers.
      Item& item = shared.items[place.stage()];
      shared.item_handover.wait_empty(place);
      find_item(params, list, shares, shared, item);
      __syncwarp();
      if (!kIsSplit && item.head >= 0 && item.tile_from(0) == kNoKey) {
        const Sequence& sequence = item.work.sequence;
        const int first = item.work.tile * kRows;
        // Of an item in shares the first one does it, where none has a key.
        if (!kIsShared || (item.share.begin == 0 && item.tile_of(0, INT_MAX) == kNoKey)) {
          zero_rows_of_head<Element>(params.out, sequence.q_begin + first,
                                     min(kRows, sequence.q_len - first), item.head);
        }
        __syncwarp();
      } else {
        if (lane < kFinders) shared.item_handover.full[place.stage()].arrive();
        if (item.head < 0) return;
        if (!kIsSplit) shared.next_item_wanted.wait(place.count % 2);
        place.advance();
      }
      if (lane == 0) shared.number = next_number(list);
      __syncwarp();
    }
  }

  static HSTU_DEVICE int next_number(const WorkList& list) {
    if (!list.tiles) return kNoItem;
    wait_for_previous_kernel();
    return blocks_anew() + atomicAdd(list.next, 1);
  }

  // Item shared.number, if there is one. By a warp: a lane each finds what a warpgroup's rows see,
  // and the next one what all rows see.
  static HSTU_DEVICE void find_item(const ForwardParams& params, const WorkList& list,
                                    const KeyShares& shares, const SharedMemory& shared,
                                    Item& item) {
    const int lane = static_cast<int>(threadIdx.x);
    const int number = shared.number;
    const int tile = number / list.parts;
    const int part = number - tile * list.parts;
    bool exists = number != kNoItem;
    const bool is_listed = list.tiles && tile >= list.unlisted;
    if (kIsPaged && exists && !is_listed) {
      const bool has_rows = find_paged_tile(params, tile, kRows, item.work, item.pages);
      exists = has_rows || list.tiles != nullptr;  // others come after one without rows
    }
    if (lane == 0) {
      if (exists && is_listed) {
        wait_for_previous_kernel();
        exists = tile - list.unlisted < *list.count;
        if (exists) item.work = list.tiles[tile - list.unlisted];
        if (kIsPaged && exists) item.pages = PageList(params.paged, item.work.sequence_number);
      } else if (!kIsPaged && exists && !find_row_tile(params.batch, tile, kRows, item.work)) {
        item.work = {};                  // without rows
        exists = list.tiles != nullptr;  // others come after it
      }
      item.head = exists ? (kIsShared ? part % params.heads : part) : -1;
      if constexpr (kIsShared) item.share = shares.of(part / params.heads);
    }
    __syncwarp();
    if (item.head < 0 || lane >= kFinders) return;
    forget_registers();
    const Sequence& sequence = item.work.sequence;
    const int first = item.work.tile * kRows;
    const int r0 = first + lane % kConsumers * kWarpgroupRows;
    const int r1 = min(lane < kConsumers ? r0 + kWarpgroupRows : first + kRows, sequence.q_len);
    if (list.summaries.data) {
      if (lane < kConsumers) {
        item.keys[lane] = r0 < r1 ? INT_MAX : 0;
      } else {
        const int64_t before = first_tile(sequence.q_begin, item.work.sequence_number, kRows);
        item.summary = list.summaries.at(before + item.work.tile, item.head);
        // NOTE: offsets that lie may leave a summary unwritten.
        for (Interval& keys : item.summary.hull) keys.end = min(keys.end, sequence.k_len);
        if constexpr (kIsPaged) to_columns(item);
        if constexpr (kIsShared) count_shares(shares, item);
      }
      return;
    }
    MaskParams closed_form = params.mask;
    closed_form.row_spans = nullptr;
    closed_form.func = nullptr;
    const KeyIntervals keys = Mask(closed_form, sequence, 0).kv_intervals(r0, r1);
    if (lane < kConsumers) {
      const int end = max(keys.interval[0].end, keys.interval[1].end);
      item.keys[lane] = kIsPaged ? PagedColumns<kKeys>(sequence).end(end) : end;
    } else {
      item.summary = {};
      item.summary.set_hull(keys);
      forget_registers();
      Mask(closed_form, sequence, 0).shared_intervals(r0, r1, item.summary.shared);
      if constexpr (kIsPaged) to_columns(item);
      if constexpr (kIsShared) count_shares(shares, item);
      if constexpr (kIsSplit) take_share<kKeys, kSplits>(item.summary.hull);
    }
  }

  static HSTU_DEVICE void count_shares(const KeyShares& shares, Item& item) {
    int others = -1;
#pragma unroll 1
    for (int n = 0; n < shares.count; ++n) others += has_keys(item, shares.of(n));
    item.other_shares = others;
  }
  static HSTU_DEVICE bool has_keys(const Item& item, Interval share) {
    return item.tile_of(share.begin, share.end) != kNoKey;
  }

  // What rows see, from keys to columns of tiles: see paged_keys.h.
  static HSTU_DEVICE void to_columns(Item& item) {
    const Sequence& sequence = item.work.sequence;
    const PagedColumns<kKeys> paged(sequence);
    for (int n = 0; n < 2; ++n) {
      item.summary.hull[n] = paged.columns(item.summary.hull[n], sequence.k_len);
      item.summary.shared[n] = paged.columns(item.summary.shared[n], sequence.k_len);
    }
  }

  // Q, K and V are copied by a thread each, so that none waits for another's stage; with pages, K
  // and V by a warp each.

  static HSTU_DEVICE bool is_leader() { return !kIsPaged || threadIdx.x % 32 == 0; }

  static HSTU_DEVICE void copy_queries(const ForwardMaps& maps, SharedMemory& shared) {
    QueryPlace place;
    for_each_item(shared.items, shared.item_handover, [&](const Item& item) {
      if (kIsSplit && item.tile_from(0) == kNoKey) return;
      const Sequence& sequence = item.work.sequence;
      const RaggedRows rows{sequence.q_begin, sequence.q_len, item.head};
      const int first = item.work.tile * kRows;
      shared.q_handover.wait_empty(place);
      copy_rows<kRows, kHeadDim, kWarpgroupRows>(maps.q, rows, first, shared.q[place.stage()][0],
                                                 shared.q_handover.full[place.stage()]);
      place.advance();
    });
  }

  static HSTU_DEVICE void copy_keys(const ForwardParams& params, const ForwardMaps& maps,
                                    SharedMemory& shared) {
    BiasPlace bias_place;
    PageWindow window;
    bool is_next_wanted = false;
    for_each_key_tile(shared, [&](const Item& item, int first, int next, KeyPlace place) {
      // NOTE: the keys of an item may end behind its last tile, where a share ends in a gap.
      const bool is_end = next == kNoKey || first + kTilesLeft * kKeys >= item.end();
      if (is_leader() && !is_next_wanted && is_end) {
        shared.next_item_wanted.arrive();
        is_next_wanted = true;
      }
      if (next == kNoKey) is_next_wanted = false;
      shared.k_handover.wait_empty(place);
      if (is_leader()) {
        int bits = first;
        const bool is_full = item.summary.classify(first, first + kKeys) == TileKind::kFull;
        if (!is_full) bits |= KeyTile::kPartial;
        if (next == kNoKey) bits |= KeyTile::kLast;
        for (int n = 0; n < kConsumers; ++n) {
          if (next >= item.keys[n]) bits |= KeyTile::kLastOfFirst << n;
        }
        shared.key_tiles[place.stage()] = {bits};
      }
      copy_tile<PagePart::kKeys>(params, maps, maps.k, window, item, first, shared.k[place.stage()],
                                 shared.k_handover.full[place.stage()]);
      if (kHasBias && is_leader()) {
        const Sequence& sequence = item.work.sequence;
        shared.bias_handover.wait_empty(bias_place);
        auto& bias_full = shared.bias_handover.full[bias_place.stage()];
        bias_full.arrive_and_expect_tx(kRows * kKeys * sizeof(Element));
        start_copy_bias<kRows, kKeys>(
            maps.bias, item.work.sequence_number, item.head / (params.heads / params.rab.heads),
            item.work.tile * kRows + sequence.offset, first_key(sequence, first),
            shared.bias[bias_place.stage()], bias_full);
        bias_place.advance();
      }
    });
  }

  static HSTU_DEVICE void copy_values(const ForwardParams& params, const ForwardMaps& maps,
                                      SharedMemory& shared) {
    PageWindow window;
    for_each_key_tile(shared, [&](const Item& item, int first, int, KeyPlace place) {
      shared.v_handover.wait_empty(place);
      copy_tile<PagePart::kValues>(params, maps, maps.v, window, item, first,
                                   shared.v[place.stage()], shared.v_handover.full[place.stage()]);
    });
  }

  // The tile of K or V that begins with column `first`.
  template <PagePart kPart>
  static HSTU_DEVICE void copy_tile(const ForwardParams& params, const ForwardMaps& maps,
                                    const CUtensorMap& packed, PageWindow& window, const Item& item,
                                    int first, Element* to,
                                    cutlass::arch::ClusterTransactionBarrier& full) {
    const Sequence& sequence = item.work.sequence;
    if constexpr (!kIsPaged) {
      copy_rows<kKeys, kHeadDim>(packed, {sequence.k_begin, sequence.k_len, item.head}, first, to,
                                 full);
    } else {
      if (is_leader()) full.arrive_and_expect_tx(kKeys * kHeadDim * sizeof(Element));
      const PagedColumns<kKeys> paged(sequence);
      if (!paged.is_target(first)) {
        window.enter(item.pages);
        start_copy_pages<kPart, kKeys, kHeadDim>(params.paged, maps.pages, window, sequence,
                                                 item.head, first, to, full);
      } else if (is_leader()) {
        start_copy_rows<kKeys, kHeadDim>(packed, target_rows(sequence, item.head),
                                         first - paged.first_target(), to, full);
      }
    }
  }

  // The first key of the tile that begins with column `first`.
  static HSTU_DEVICE int first_key(const Sequence& sequence, int first) {
    return kIsPaged ? PagedColumns<kKeys>(sequence).key(first) : first;
  }

  // Calls visit(item, first, next, place) for each tile of keys, told by its first key.
  template <typename Visit>
  static HSTU_DEVICE void for_each_key_tile(SharedMemory& shared, Visit visit) {
    KeyPlace place;
    for_each_item(shared.items, shared.item_handover, [&](const Item& item) {
      for (int first = item.tile_from(0); first != kNoKey;) {
        const int next = item.tile_from(first + kKeys);
        visit(item, first, next, place);
        place.advance();
        first = next;
      }
    });
  }

  // --------------------------------------------------------------------------------- consumers

  using Scores =
      decltype(partition_fragment_C(ScoreMma{}, Shape<Int<kWarpgroupRows>, Int<kKeys>>{}));
  using Out = decltype(partition_fragment_C(OutMma{}, Shape<Int<kWarpgroupRows>, Int<kHeadDim>>{}));

  // All tiles of all items are one sequence of steps: S of a tile is started, then P V of the tile
  // before it, which runs beside the activation of S. The sequence is broken where the warpgroup's
  // rows see fewer keys than the others'.
  static HSTU_DEVICE void consume(const ForwardParams& params, const KeyShares& shares,
                                  SharedMemory& shared, int warpgroup) {
    const Turns<kTiles.takes_turns, kConsumers> turns{warpgroup};
    turns.begin();
    ItemPlace item_place;
    QueryPlace q_place;
    KeyPlace k_place;
    BiasPlace bias_place;
    Scores scores;
    Out out;
    GMMA::ScaleOut out_scale = GMMA::ScaleOut::Zero;
    Tensor weights = make_tensor_like<Element>(scores);

    const auto item_of = [&](ItemPlace place) -> const Item& {
      return shared.items[place.stage()];
    };
    // S = Q K^T + bias, started
    const auto start_scores = [&] {
      start_gemm(ScoreMma{},
                 rows_tensor<kWarpgroupRows, kHeadDim>(shared.q[q_place.stage()][warpgroup]),
                 rows_tensor<kKeys, kHeadDim>(shared.k[k_place.stage()]), scores,
                 kHasBias ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero);
    };
    // O += P V, started
    const auto start_out = [&](KeyPlace place) {
      start_gemm_registers(OutMma{}, weights,
                           transposed_tensor<kKeys, kHeadDim>(shared.v[place.stage()]), out,
                           out_scale);
      out_scale = GMMA::ScaleOut::One;
    };
    const auto has_item = [&] {
      shared.item_handover.wait_full(item_place);
      const Item& item = item_of(item_place);
      if (item.head < 0 || (kIsSplit && item.tile_from(0) == kNoKey)) return false;
      shared.q_handover.wait_full(q_place);
      return true;
    };
    const auto add_bias = [&] {
      if constexpr (kHasBias) {
        shared.bias_handover.wait_full(bias_place);
        load_bias<kKeys>(shared.bias[bias_place.stage()] + warpgroup * (kWarpgroupRows * kKeys),
                         scores);
        shared.bias_handover.release_by_warp(bias_place);
        bias_place.advance();
      }
    };
    // P = silu(alpha * S), before the mask
    KeyTile tile;
    const auto activate_scores = [&] {
      tile = read_by_warp(shared.key_tiles[k_place.stage()]);
      shared.k_handover.release_by_warp(k_place);
      activate(params, scores);
      // NOTE: a branch, behind which the compiler does not move the activation: to wait for P V.
      if (tile.is_last_of(warpgroup)) shared.q_handover.release_by_warp(q_place);
    };
    // P = M * P, rounded
    const auto finish_weights = [&] {
      round_to(scores, weights);
      if (tile.is_partial()) {
        hide(find_visible(params, item_of(item_place), warpgroup, tile), weights);
      }
    };
    const auto end_item = [&](ItemPlace place) {
      if constexpr (!kIsSplit) {
        if (kIsShared && item_of(place).other_shares > 0) {
          add_shares(params, shares, item_of(place), warpgroup, out);
        } else {
          store_out(params, item_of(place), warpgroup, out);
        }
      }
      shared.item_handover.release(place);
      out_scale = GMMA::ScaleOut::Zero;
    };

    // The tiles of an item behind the last one that the warpgroup's rows see
    const auto let_tiles_pass = [&] {
      while (!tile.is_last()) {
        turns.take();
        turns.pass();
        wait_full(shared.k_handover, k_place, shared.v_handover, k_place);
        tile = read_by_warp(shared.key_tiles[k_place.stage()]);
        shared.k_handover.release_by_warp(k_place);
        shared.v_handover.release_by_warp(k_place);
        if constexpr (kHasBias) {
          shared.bias_handover.wait_full(bias_place);
          shared.bias_handover.release_by_warp(bias_place);
          bias_place.advance();
        }
        k_place.advance();
      }
    };

    while (has_item()) {
      shared.k_handover.wait_full(k_place);
      add_bias();
      turns.take();
      start_scores();
      turns.pass();
      wait_for_products<0>(scores);
      activate_scores();
      finish_weights();

      for (;;) {
        const bool ends_item = tile.is_last_of(warpgroup);
        k_place.advance();
        if (ends_item) {
          item_place.advance();
          q_place.advance();
          if (!tile.is_last() || !has_item()) break;
        }
        wait_full(shared.k_handover, k_place, shared.v_handover, k_place.before());
        add_bias();
        turns.take();
        start_scores();
        start_out(k_place.before());
        turns.pass();
        wait_for_products<1>(scores);
        activate_scores();
        wait_for_products<0>(out);
        shared.v_handover.release_by_warp(k_place.before());
        finish_weights();
        if (ends_item) end_item(item_place.before());
      }

      // P V of the last tile
      shared.v_handover.wait_full(k_place.before());
      start_out(k_place.before());
      wait_for_products<0>(out);
      shared.v_handover.release_by_warp(k_place.before());
      let_tiles_pass();
      end_item(item_place.before());
    }
    if constexpr (kIsSplit) {
      if (item_place.count == 0) clear(out);  // the block had no tile
      add_up(params, shared, warpgroup, out);
    }
  }

  // Which of 64 keys one row sees: lane n of a warp finds it for row n % 16 of the warp's, and the
  // first or second 64 keys of the tile.
  static HSTU_DEVICE uint64_t find_visible(const ForwardParams& params, const Item& item,
                                           int warpgroup, KeyTile tile) {
    static_assert(kKeys <= 128, "two lanes find what a row sees");
    const Sequence& sequence = item.work.sequence;
    const int lane = thread_anew() % 32;
    const int row = first_row(item, warpgroup) + lane % 16;
    if (row >= sequence.q_len) return 0;
    const Mask mask(params.mask, sequence, item.head);
    const int column = tile.first_key() + lane / 16 * 64;
    if constexpr (!kIsPaged) return mask.row_bits(row, column);
    const PagedColumns<kKeys> paged(sequence);
    return paged.without_gap(mask.row_bits(row, paged.key(column)), column);
  }

  // P = silu(alpha * S)
  static HSTU_DEVICE void activate(const ForwardParams& params, Scores& scores) {
    const float half_alpha = 0.5f * static_cast<float>(params.alpha);
#pragma unroll
    for (int n = 0; n < size(scores); ++n) {
      const float x = half_alpha * scores(n);
      scores(n) = silu_of_half(x, tanh_approx(x));
    }
  }

  // Zeroes what the mask hides. Four lanes share a row, and each gets the bits of it.
  template <typename Weights>
  static HSTU_DEVICE void hide(uint64_t visible, Weights& weights) {
    const int lane = thread_anew() % 32;
    Tensor words = recast<uint32_t>(weights);  // for each 8 keys one of row m = 0, one of m = 1
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int first = 0; first < kKeys; first += 64) {
        const int owner = first / 4 + m * 8 + lane / 4;
        const uint64_t bits = __shfl_sync(0xffffffff, visible, owner) >> lane % 4 * 2;
#pragma unroll
        for (int key = 0; key < 64 && first + key < kKeys; key += 8) {
          const uint32_t low = bits >> key & 1 ? 0x0000ffff : 0;
          const uint32_t high = bits >> (key + 1) & 1 ? 0xffff0000 : 0;
          words((first + key) / 4 + m) &= low | high;
        }
      }
    }
  }

  // The first of the 16 rows of the thread's warp.
  static HSTU_DEVICE int first_row(const Item& item, int warpgroup) {
    const int warp = thread_anew() / 32 % 4;
    return item.work.tile * kRows + warpgroup * kWarpgroupRows + warp * 16;
  }

  static HSTU_DEVICE float scale_of(const ForwardParams& params, const Sequence& sequence,
                                    int row) {
    if (!params.attn_scale) return static_cast<float>(params.scale);
    const bool is_own = params.attn_scale_per_row && row < sequence.q_len;
    return params.attn_scale[is_own ? sequence.q_begin + row : 0];
  }

  // Of a thread's two rows
  struct RowScales {
    float of[2];

    HSTU_DEVICE RowScales(const ForwardParams& params, const Item& item, int warpgroup) {
      const int row = first_row(item, warpgroup) + thread_anew() % 32 / 4;
      for (int m = 0; m < 2; ++m) of[m] = scale_of(params, item.work.sequence, row + 8 * m);
    }
  };

  // O = scale * sum over the cluster's blocks, rounded once
  static HSTU_DEVICE void add_up(const ForwardParams& params, SharedMemory& shared, int warpgroup,
                                 const Out& out) {
    static_assert(kRows * kHeadDim * sizeof(float) <= sizeof(shared.k) + sizeof(shared.v),
                  "the sums take the place of K and V");
    asm volatile("bar.sync %0, %1;" ::"n"(static_cast<int>(NamedBarrier::kConsumers)),
                 "n"(kConsumers * kWarpgroup)
                 : "memory");  // K and V have been read
    float* const sums =
        reinterpret_cast<float*>(shared.k[0]) + warpgroup * kWarpgroupRows * kHeadDim;
    const Item& item = shared.items[0];
    const Sequence& sequence = item.work.sequence;
    const int first = first_row(item, warpgroup) + thread_anew() % 32 / 4;
    add_up_cluster<kSplits>(out, sums, [&](int column, int m, float x, float y) {
      const int row = first + 8 * m;
      if (item.head < 0 || row >= sequence.q_len || column >= params.out.head_dim) return;
      const float scale = scale_of(params, sequence, row);
      Element* to = static_cast<Element*>(params.out.data) +
                    (sequence.q_begin + row) * params.out.row_stride +
                    item.head * params.out.head_stride + column;
      const cutlass::NumericArrayConverter<Element, float, 2> convert;
      *reinterpret_cast<cutlass::Array<Element, 2>*>(to) = convert({scale * x, scale * y});
    });
  }

  // Where an item's keys are shared: leaves the sum over this share, and the last warpgroup to come
  // stores O = scale * the sum over all of them.
  static HSTU_DEVICE void add_shares(const ForwardParams& params, const KeyShares& shares,
                                     const Item& item, int warpgroup, const Out& out) {
    wait_for_previous_kernel();  // which has zeroed what is counted
    const Sequence& sequence = item.work.sequence;
    const int64_t tile =
        first_tile(sequence.q_begin, item.work.sequence_number, kRows) + item.work.tile;
    const int64_t place = (tile * params.heads + item.head) * kConsumers + warpgroup;
    constexpr int kSize = kWarpgroupRows * kHeadDim;
    float* const sums = shares.sums + place * shares.count * kSize;
    leave_sum(out, sums + item.share.begin / shares.keys * kSize);
    if (!arrives_last(shares.arrived + place, item.other_shares, warpgroup)) return;
    uint32_t seen = 0;  // a bit for each share in which its rows see keys
#pragma unroll 1
    for (int n = 0; n < shares.count; ++n) seen |= uint32_t{has_keys(item, shares.of(n))} << n;
    const RowScales scales(params, item, warpgroup);
#pragma unroll 1
    for (int column = 0; column < kHeadDim; column += kStoredColumns) {
      auto sum = make_stored_columns();
      add_sums(sums, seen, shares.count, kSize, column, sum);
      store_columns(params, item, warpgroup, scales, column, sum);
    }
  }

  // O = scale * O
  static HSTU_DEVICE void store_out(const ForwardParams& params, const Item& item, int warpgroup,
                                    const Out& out) {
    const RowScales scales(params, item, warpgroup);
#pragma unroll
    for (int column = 0; column < kHeadDim; column += kStoredColumns) {
      auto sum = make_stored_columns();
#pragma unroll
      for (int n = 0; n < size(sum); ++n) sum(n) = out(column / 2 + n);
      store_columns(params, item, warpgroup, scales, column, sum);
      forget_registers();
    }
  }  // Of a warpgroup's rows at a time. With two ways to store them, there are registers for a few.
  static constexpr int kStoredColumns = kIsShared ? 32 : kHeadDim;
  static HSTU_DEVICE auto make_stored_columns() {
    return make_tensor<float>(Int<kStoredColumns / 2>{});
  }
  // Scaled, and rounded once.
  template <typename Sum>
  static HSTU_DEVICE void store_columns(const ForwardParams& params, const Item& item,
                                        int warpgroup, const RowScales& scales, int column,
                                        Sum& sum) {
#pragma unroll
    for (int n = 0; n < size(sum); ++n) sum(n) *= scales.of[n / 2 % 2];
    const Sequence& sequence = item.work.sequence;
    const int first = item.work.tile * kRows + warpgroup * kWarpgroupRows;
    store_sum<Element, kStoredColumns>(sum, params.out, item.head, sequence.q_begin + first,
                                       sequence.q_len - first, column);
  }
};

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    run_forward(const __grid_constant__ ForwardParams params,
                const __grid_constant__ ForwardMaps maps, const WorkList list,
                const __grid_constant__ KeyShares shares) {
  extern __shared__ __align__(1024) char shared[];
  Kernel::run(params, maps, list, shares,
              *reinterpret_cast<typename Kernel::SharedMemory*>(shared));
}

}  // namespace hstu::sm90
