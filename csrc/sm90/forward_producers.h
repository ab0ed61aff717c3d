// The producers of the forward: four warps that find items, and copy Q, K and V.
#pragma once

#include "../common/launch.h"
#include "bias.h"
#include "forward_block.h"

namespace hstu::sm90 {

template <typename Block>
struct ForwardProducers : Block {
  using Block::kConsumers;
  using Block::kCopiers;
  using Block::kFinders;
  using Block::kHasBias;
  using Block::kHeadDim;
  using Block::kIsPaged;
  using Block::kIsQuantised;
  using Block::kIsShared;
  using Block::kIsSplit;
  using Block::kKeys;
  using Block::kNoItem;
  using Block::kNoKey;
  using Block::kQueryCopiers;
  using Block::kRows;
  using Block::kSplits;
  using Block::kTilesLeft;
  using typename Block::BiasPlace;
  using typename Block::Element;
  using typename Block::Item;
  using typename Block::ItemPlace;
  using typename Block::KeyPlace;
  using typename Block::KeyTile;
  using typename Block::QueryPlace;
  using typename Block::SharedMemory;
  using QuantisedPlace = typename Block::Quantised::Place;

  static HSTU_DEVICE void run(const ForwardParams& params, const ForwardMaps& maps,
                              const WorkList& list, const KeyShares& shares, SharedMemory& shared) {
    if (threadIdx.x < 32) find_items(params, list, shares, shared);
    if (threadIdx.x >= 32 && threadIdx.x < 32 + kQueryCopiers) copy_queries(params, maps, shared);
    if (threadIdx.x >= 64 && threadIdx.x < 64 + kCopiers) copy_keys(params, maps, shared);
    if (threadIdx.x >= 96 && threadIdx.x < 96 + kCopiers) copy_values(params, maps, shared);
  }

 private:
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
    // One share of all tiles and heads comes after another.
    const int items = list.capacity * params.heads;  // of a share
    const int share = kIsShared ? shared.number / items : 0;
    const int number = kIsShared ? shared.number - share * items : shared.number;
    const int tile = number / params.heads;
    bool exists = kIsShared ? share < shares.count : number != kNoItem;
    const bool is_listed = list.tiles && tile >= list.unlisted;
    if (kIsPaged && exists && !is_listed) {
      const bool has_rows = find_paged_tile(params, tile, kRows, item.work, item.pages);
      exists = has_rows || list.tiles != nullptr;  // others come after one without rows
    }
    if (lane == 0) {
      if (exists && is_listed) {
        wait_for_previous_kernel();
        const bool is_there = tile - list.unlisted < *list.count;
        item.work = is_there ? list.tiles[tile - list.unlisted] : WorkTile{};
        exists = is_there || share + 1 < shares.count;
        // The rest of this share is not there either.
        if (!is_there && exists) atomicMax(list.next, (share + 1) * items - blocks_anew());
        if (kIsPaged && is_there) item.pages = PageList(params.paged, item.work.sequence_number);
      } else if (!kIsPaged && exists && !find_row_tile(params.batch, tile, kRows, item.work)) {
        item.work = {};                  // without rows
        exists = list.tiles != nullptr;  // others come after it
      }
      item.head = exists ? number - tile * params.heads : -1;
      if constexpr (kIsShared) item.share = shares.of(share);
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
    for (int n = 0; n < shares.count; ++n) others += item.sees(shares.of(n));
    item.other_shares = others;
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

  // Q, K and V are copied by a thread each, so that none waits for another's stage; with pages, by
  // a warp each. If these hold e4m3, the first warp copies it, too, and the others convert it.

  static HSTU_DEVICE bool is_leader() { return !kIsPaged || threadIdx.x % 32 == 0; }

  static HSTU_DEVICE void copy_queries(const ForwardParams& params, const ForwardMaps& maps,
                                       SharedMemory& shared) {
    QueryPlace place;
    KeyPlace key_place;
    QuantisedPlace quantised_place;
    PageWindow window;
    for_each_item(shared.items, shared.item_handover, [&](const Item& item) {
      if (kIsSplit && item.tile_from(0) == kNoKey) return;
      const Sequence& sequence = item.work.sequence;
      const RaggedRows rows{sequence.q_begin, sequence.q_len, item.head};
      const int first = item.work.tile * kRows;
      if (threadIdx.x == 32) {
        shared.q_handover.wait_empty(place);
        copy_rows<kRows, kHeadDim, kWarpgroupRows>(maps.q, rows, first, shared.q[place.stage()][0],
                                                   shared.q_handover.full[place.stage()]);
      }
      place.advance();
      if constexpr (kIsQuantised) {
        __syncwarp();
        copy_quantised(params, maps, shared, item, key_place, quantised_place, window);
      }
    });
  }

  // The stored keys and values of an item.
  static HSTU_DEVICE void copy_quantised(const ForwardParams& params, const ForwardMaps& maps,
                                         SharedMemory& shared, const Item& item,
                                         KeyPlace& key_place, QuantisedPlace& quantised_place,
                                         PageWindow& window) {
    const Sequence& sequence = item.work.sequence;
    const PagedColumns<kKeys> paged(sequence);
    window.enter(item.pages);
    for (int first = item.tile_from(0); first != kNoKey; first = item.tile_from(first + kKeys)) {
      const int stage = key_place.stage();
      if (!paged.is_target(first)) {
        shared.k_handover.wait_empty(key_place);
        start_copy_quantised<PagePart::kKeys, kKeys, kHeadDim>(
            params.paged, maps.pages, window, sequence, item.head, first, shared.k[stage],
            shared.quantised[0], quantised_place);
        shared.v_handover.wait_empty(key_place);
        start_copy_quantised<PagePart::kValues, kKeys, kHeadDim>(
            params.paged, maps.pages, window, sequence, item.head, first, shared.v[stage],
            shared.quantised[1], quantised_place);
        quantised_place.advance();
      }
      key_place.advance();
    }
  }

  static HSTU_DEVICE void copy_keys(const ForwardParams& params, const ForwardMaps& maps,
                                    SharedMemory& shared) {
    BiasPlace bias_place;
    QuantisedPlace quantised_place;
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
      copy_tile<PagePart::kKeys>(params, maps, maps.k, shared, window, quantised_place, item, first,
                                 shared.k[place.stage()], shared.k_handover.full[place.stage()]);
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
    QuantisedPlace quantised_place;
    for_each_key_tile(shared, [&](const Item& item, int first, int, KeyPlace place) {
      shared.v_handover.wait_empty(place);
      copy_tile<PagePart::kValues>(params, maps, maps.v, shared, window, quantised_place, item,
                                   first, shared.v[place.stage()],
                                   shared.v_handover.full[place.stage()]);
    });
  }

  // The tile of K or V that begins with column `first`.
  template <PagePart kPart>
  static HSTU_DEVICE void copy_tile(const ForwardParams& params, const ForwardMaps& maps,
                                    const CUtensorMap& packed, SharedMemory& shared,
                                    PageWindow& window, QuantisedPlace& quantised_place,
                                    const Item& item, int first, Element* to,
                                    cutlass::arch::ClusterTransactionBarrier& full) {
    const Sequence& sequence = item.work.sequence;
    if constexpr (!kIsPaged) {
      copy_rows<kKeys, kHeadDim>(packed, {sequence.k_begin, sequence.k_len, item.head}, first, to,
                                 full);
    } else {
      const PagedColumns<kKeys> paged(sequence);
      const bool is_target = paged.is_target(first);
      if constexpr (kIsQuantised) {
        if (!is_target) {
          dequantise_tile<kKeys, kHeadDim>(shared.quantised[static_cast<int>(kPart)],
                                           quantised_place, to);
          quantised_place.advance();
          if (is_leader()) full.arrive();
          return;
        }
      }
      if (is_leader()) full.arrive_and_expect_tx(kKeys * kHeadDim * sizeof(Element));
      if (!is_target) {
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
};

}  // namespace hstu::sm90
