// The producers of the backward: four warps that find items, copy tiles, and add dQ.
#pragma once

#include "backward_block.h"

namespace hstu::sm90 {

template <typename Block>
struct BackwardProducers : Block {
  using typename Block::DqPlace;
  using typename Block::Element;
  using typename Block::Item;
  using typename Block::ItemPlace;
  using typename Block::KeyPlace;
  using typename Block::MaskPlace;
  using typename Block::RowPlace;
  using typename Block::RowTile;
  using typename Block::SharedMemory;
  using Dq = typename Block::Dq;
  using Block::kHeadDim;
  using Block::kIsDeterministic;
  using Block::kKeys;
  using Block::kRows;
  using Block::kSplitsColumns;

  static HSTU_DEVICE void run(const BackwardParams& params, const BackwardMaps& maps,
                              const BackwardBuffers& buffers, SharedMemory& shared) {
    if (threadIdx.x < 32) find_items(params, maps, buffers, shared);
    if (threadIdx.x / 32 == 1) copy_rows_of_items(params, maps, shared);
    for (int stage = 0; stage < DqPlace::kStages; ++stage) {
      if (threadIdx.x == 64 + 32 * stage) add_dq(params, buffers, shared, stage);
    }
  }

 private:
  // By one warp, which copies K and V of each item; but zeroes dK and dV of those that no row sees,
  // which consumers do not get.
  static HSTU_DEVICE void find_items(const BackwardParams& params, const BackwardMaps& maps,
                                     const BackwardBuffers& buffers, SharedMemory& shared) {
    const WorkList& list = buffers.list;
    const int lane = static_cast<int>(threadIdx.x);
    ItemPlace place;
    if (lane == 0) shared.number = static_cast<int>(blockIdx.x);
    for (;;) {
      Item& item = shared.items[place.stage()];
      shared.item_handover.wait_empty(place);
      __syncwarp();
      if (lane == 0) {
        const int tile = shared.number / list.parts;
        const bool exists = tile < *list.count;
        item.head = exists ? shared.number - tile * list.parts : -1;
        if (exists) {
          item.work = list.tiles[tile];
          const Sequence& sequence = item.work.sequence;
          item.first_row_tile = first_tile(sequence.q_begin, item.work.sequence_number, kRows);
        }
      }
      __syncwarp();
      if (item.head >= 0) {
        const int tiles = (item.work.sequence.q_len + kRows - 1) / kRows;
        item.map.fill(tiles, lane, 32, [&](int m) { return classify(buffers, item, m); });
        __syncwarp();
      }
      if (item.head >= 0 && item.map.last() < 0) {
        const Sequence& sequence = item.work.sequence;
        const int first = item.work.tile * kKeys;
        const int count = min(kKeys, sequence.k_len - first);
        zero_rows_of_head<Element>(params.dk, sequence.k_begin + first, count, item.head);
        zero_rows_of_head<Element>(params.dv, sequence.k_begin + first, count, item.head);
        __syncwarp();
      } else {
        if (lane == 0) shared.item_handover.full[place.stage()].arrive();
        if (item.head < 0) return;
        if (lane == 0) copy_keys(maps, item, KeyPlace{place.count}, shared);
        // NOTE: an item taken earlier than needed is one that no idle block can have.
        shared.item_nears_its_end.wait(place.count % 2);
        __syncwarp();
        place.advance();
      }
      if (lane == 0) shared.number = static_cast<int>(gridDim.x) + atomicAdd(list.next, 1);
    }
  }

  static HSTU_DEVICE void copy_keys(const BackwardMaps& maps, const Item& item, KeyPlace place,
                                    SharedMemory& shared) {
    const Sequence& sequence = item.work.sequence;
    const RaggedRows rows{sequence.k_begin, sequence.k_len, item.head};
    const int first = item.work.tile * kKeys;
    shared.key_handover.wait_empty(place);
    auto& barrier = shared.key_handover.full[place.stage()];
    barrier.arrive_and_expect_tx(2 * kKeys * kHeadDim * sizeof(Element));
    start_copy_rows<kKeys, kHeadDim>(maps.k, rows, first, shared.k, barrier);
    start_copy_rows<kKeys, kHeadDim>(maps.v, rows, first, shared.v, barrier);
  }

  // What the item's keys are to tile m of rows.
  static HSTU_DEVICE TileKind classify(const BackwardBuffers& buffers, const Item& item, int m) {
    const int tile = item.work.tile;
    const int64_t row_tile = item.first_row_tile + m;
    if constexpr (kIsDeterministic) {
      if (!buffers.turns[row_tile].hold(tile)) return TileKind::kEmpty;
    }
    const SpanSummary summary = buffers.list.summaries.at(row_tile, item.head);
    const int k0 = tile * kKeys;
    const TileKind kind = summary.classify(k0, min(k0 + kKeys, item.work.sequence.k_len));
    return kIsDeterministic && kind == TileKind::kEmpty ? TileKind::kPartial : kind;
  }

  // By one warp; see also kProducersLook.
  static HSTU_DEVICE void copy_rows_of_items(const BackwardParams& params, const BackwardMaps& maps,
                                             SharedMemory& shared) {
    constexpr int kTilesAhead = 3;
    const bool copies = threadIdx.x % 32 == 0;
    bool has_told = false;
    RowPlace place;
    MaskPlace mask_place;
    for_each_row_tile(shared, [&](const Item& item, int m, int next) {
      const int stage = place.stage();
      const int first = m * kRows;
      const bool is_partial = item.map.has_partial(m);
      auto& q_full = shared.q_handover.full[stage];
      shared.q_handover.wait_empty(place);
      if (copies) {
        const Sequence& sequence = item.work.sequence;
        const RaggedRows rows{sequence.q_begin, sequence.q_len, item.head};
        shared.row_tiles[stage] = {first | (is_partial ? RowTile::kPartial : 0) |
                                   (next < 0 ? RowTile::kLast : 0)};
        q_full.expect_transaction(kRows * kHeadDim * sizeof(Element));
        start_copy_rows<kRows, kHeadDim>(maps.q, rows, first, shared.q[stage], q_full);
        shared.dout_handover.wait_empty(place);
        copy_rows<kRows, kHeadDim>(maps.dout, rows, first, shared.dout[stage],
                                   shared.dout_handover.full[stage]);
        // NOTE: to find the next item and copy its first tiles takes as long as a few steps.
        const int last = kIsDeterministic ? item.map.first() : item.map.last();
        const bool is_near = abs(last - m) <= kTilesAhead;
        if (is_near && !has_told) shared.item_nears_its_end.arrive();
        has_told = is_near && next >= 0;
      }
      __syncwarp();
      if constexpr (Block::kProducersLook) {
        if (is_partial) {
          shared.mask_handover.wait_empty(mask_place);
          for (int group = 0; group < Block::kKeyGroups; ++group) {
            Block::template look_at_rows<kRows, 32>(params, item, first, group,
                                                    shared.visible[mask_place.stage()][group]);
          }
          mask_place.advance();
        }
      }
      q_full.arrive();
      place.advance();
    });
  }

  // Adds those tiles of dQ to their sums that come in a stage. By a thread for each stage.
  static HSTU_DEVICE void add_dq(const BackwardParams& params, const BackwardBuffers& buffers,
                                 SharedMemory& shared, int stage) {
    DqPlace place;
    for_each_row_tile(shared, [&](const Item& item, int m, int) {
      if (place.stage() != stage) {
        place.advance();
        return;
      }
      const int64_t row_tile = item.first_row_tile + m;
      const int64_t number = row_tile * params.heads + item.head;
      if constexpr (kIsDeterministic) {
        const int before = buffers.turns[row_tile].count_before(item.work.tile);
        // NOTE: less, not unequal: offsets that overlap let sequences share a tile.
        while (load_turns(buffers.turns_taken + number) < before) {
        }
        asm volatile("fence.proxy.async.global;" ::: "memory");
      }
      shared.dq_handover.wait_full(place);
#pragma unroll
      for (int piece = 0; piece < Dq::kPieces; ++piece) {
        start_adding(buffers.dq + number * Dq::kSize + piece * Dq::kPieceSize,
                     Block::dq_piece(shared, place, piece));
      }
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      if constexpr (kSplitsColumns) {  // it lay in place of the rows
        const RowPlace rows{place.count};
        shared.q_handover.release(rows);
        shared.dout_handover.release(rows);
      } else {
        shared.dq_handover.release(place);
      }
      if constexpr (kIsDeterministic) {
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        asm volatile("fence.proxy.async.global;" ::: "memory");
        asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(buffers.turns_taken + number)
                     : "memory");
      }
      place.advance();
    });
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }

  // Starts adding a piece of dQ to sums.
  static HSTU_DEVICE void start_adding(float* sums, const float* piece) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 :
                 : "l"(sums), "r"(cute::cast_smem_ptr_to_uint(piece)),
                   "n"(static_cast<int>(Dq::kPieceSize * sizeof(float)))
                 : "memory");
  }

  // Deterministic: key tiles add to a dQ in ascending order, each in its turn.
  static HSTU_DEVICE int load_turns(const int* taken) {
    int seen;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(taken) : "memory");
    return seen;
  }

  // Calls visit(item, tile, next tile) for each tile of rows: upwards, so that blocks with other
  // keys of a causal sequence are at other rows; deterministic: downwards, so that a block waits
  // for each block before it for the time of a tile alone.
  template <typename Visit>
  static HSTU_DEVICE void for_each_row_tile(SharedMemory& shared, Visit visit) {
    for_each_item(shared.items, shared.item_handover, [&](const Item& item) {
      for (int m = kIsDeterministic ? item.map.last() : item.map.first(); m >= 0;) {
        const int next = kIsDeterministic ? item.map.before(m) : item.map.after(m);
        visit(item, m, next);
        m = next;
      }
    });
  }
};

}  // namespace hstu::sm90
