// The producers of the backward: four warps that find items, copy tiles, and add dQ.
#pragma once

#include "backward_block.h"

namespace hstu::sm90 {

template <typename Block>
struct BackwardProducers : Block {
  using typename Block::BiasPlace;
  using typename Block::DoutPlace;
  using typename Block::DqPlace;
  using typename Block::DsPlace;
  using typename Block::Element;
  using typename Block::Item;
  using typename Block::ItemPlace;
  using typename Block::KeyPlace;
  using typename Block::MaskPlace;
  using typename Block::RowPlace;
  using typename Block::RowTile;
  using typename Block::SharedMemory;
  using Dq = typename Block::Dq;
  using Block::kBlockKeys;
  using Block::kClusterBlocks;
  using Block::kColumns;
  using Block::kHasBias;
  using Block::kHeadDim;
  using Block::kIsCluster;
  using Block::kIsDeterministic;
  using Block::kKeys;
  using Block::kRows;

  static HSTU_DEVICE void run(const BackwardParams& params, const BackwardMaps& maps,
                              const BackwardBuffers& buffers, SharedMemory& shared) {
    static_assert(DqPlace::kStages == 2, "the last two warps add dQ of a stage each");
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp == 0) {
      find_items(params, maps, buffers, shared);
    } else if (warp == 1) {
      copy_rows_of_items(params, maps, shared);
    } else if (threadIdx.x % 32 == 0) {
      add_dq(params, maps, buffers, shared, warp - 2);
    }
    __syncwarp();  // NOTE: a cluster's blocks wait for each other by whole warps.
  }

 private:
  // By one warp, which copies K and V of each item; but zeroes dK and dV of those that no row sees,
  // which consumers do not get.
  static HSTU_DEVICE void find_items(const BackwardParams& params, const BackwardMaps& maps,
                                     const BackwardBuffers& buffers, SharedMemory& shared) {
    const WorkList& list = buffers.list;
    const int lane = static_cast<int>(threadIdx.x);
    if (Block::stores_ds(params)) {
      uint4* const zeros = reinterpret_cast<uint4*>(shared.zeros);
      for (int n = lane; n < kRows * 64 / 8; n += 32) zeros[n] = uint4{};
      cutlass::arch::fence_view_async_shared();
    }
    ItemPlace place;
    if (lane == 0) shared.number = static_cast<int>(blockIdx.x) / kClusterBlocks;
    for (RingPlace<1> number_place;; number_place.advance()) {
      Item& item = shared.items[place.stage()];
      shared.item_handover.wait_empty(place);
      __syncwarp();
      if (lane == 0) {
        if constexpr (kIsCluster) share_number(number_place, shared);
        const int tile = shared.number / list.parts;
        const bool exists = tile < *list.count;
        item.head = exists ? shared.number - tile * list.parts : -1;
        if (exists) {
          if constexpr (kHasBias) item.bias_head = item.head / (params.heads / params.rab.heads);
          item.work = list.tiles[tile];
          const Sequence& sequence = item.work.sequence;
          item.first_row_tile =
              static_cast<int>(first_tile(sequence.q_begin, item.work.sequence_number, kRows));
        }
      }
      __syncwarp();
      if (item.head >= 0) {
        const int tiles = (item.work.sequence.q_len + kRows - 1) / kRows;
        item.map.fill(tiles, lane, 32, [&](int m) { return classify(buffers, item, m); });
        __syncwarp();
        if (lane == 0) item.last_row_tile = kIsDeterministic ? item.map.first() : item.map.last();
        __syncwarp();
      }
      if (item.head >= 0 && item.last_row_tile < 0) {
        const Sequence& sequence = item.work.sequence;
        const int first = Block::first_key(item);
        const int count = min(kBlockKeys, sequence.k_len - first);
        zero_rows_of_head<Element>(params.dk, sequence.k_begin + first, count, item.head);
        zero_rows_of_head<Element>(params.dv, sequence.k_begin + first, count, item.head);
        if (lane == 0 && Block::stores_ds(params)) start_zeroing_unseen(maps, item, shared);
        __syncwarp();
      } else {
        if (lane == 0) shared.item_handover.full[place.stage()].arrive();
        if (item.head < 0) break;
        if (lane == 0) copy_keys(maps, item, KeyPlace{place.count}, shared);
        if (lane == 0 && Block::stores_ds(params)) start_zeroing_unseen(maps, item, shared);
        // NOTE: an item taken earlier than needed is one that no idle block can have.
        shared.item_nears_its_end.wait(place.count % 2);
        __syncwarp();
        place.advance();
      }
      if (lane == 0 && Block::rank() == 0) {
        shared.number = blocks_anew() / kClusterBlocks + atomicAdd(list.next, 1);
      }
    }
    if (Block::stores_ds(params)) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }

  static HSTU_DEVICE void copy_keys(const BackwardMaps& maps, const Item& item, KeyPlace place,
                                    SharedMemory& shared) {
    const Sequence& sequence = item.work.sequence;
    const RaggedRows rows{sequence.k_begin, sequence.k_len, item.head};
    const int first = Block::first_key(item);
    shared.key_handover.wait_empty(place);
    auto& barrier = shared.key_handover.full[place.stage()];
    constexpr int kOthers = kIsCluster ? kBlockKeys * kColumns : 0;
    barrier.arrive_and_expect_tx((2 * kBlockKeys * kHeadDim + kOthers) * sizeof(Element));
    start_copy_rows<kBlockKeys, kHeadDim>(maps.k, rows, first, shared.k, barrier);
    start_copy_rows<kBlockKeys, kHeadDim>(maps.v, rows, first, shared.v, barrier);
    if constexpr (kIsCluster) {
      const int rank = Block::rank();
      start_copy_rows<kBlockKeys, kColumns>(maps.k, rows, first + (1 - 2 * rank) * kBlockKeys,
                                            shared.other_k, barrier, rank * kColumns);
    }
  }

  // Blocks of a cluster work on the same items: the first one sends the number to the other.
  static HSTU_DEVICE void share_number(RingPlace<1> place, SharedMemory& shared) {
    auto& handover = shared.number_handover;
    if (Block::rank() == 0) {
      handover.wait_empty(place);
      cute::store_shared_remote(shared.number, cute::cast_smem_ptr_to_uint(&shared.number),
                                cute::cast_smem_ptr_to_uint(&handover.full[0]), 1);
    } else {
      handover.full[0].arrive_and_expect_tx(sizeof(int));
      handover.wait_full(place);
      handover.empty[0].arrive(0u);
    }
  }

  // What the item's keys are to tile m of rows.
  static HSTU_DEVICE TileKind classify(const BackwardBuffers& buffers, const Item& item, int m) {
    const int tile = item.work.tile;
    const int row_tile = item.first_row_tile + m;
    if constexpr (kIsDeterministic) {
      if (!buffers.turns[row_tile].hold(tile)) return TileKind::kEmpty;
    }
    const SpanSummary summary = buffers.list.summaries.at(row_tile, item.head);
    const int k0 = tile * kKeys;
    const Sequence& sequence = item.work.sequence;
    const TileKind kind = summary.classify(k0, min(k0 + kKeys, sequence.k_len));
    if (kIsDeterministic && kind == TileKind::kEmpty) return TileKind::kPartial;
    // NOTE: past the end there is a bias all the same.
    const bool is_cut = (m + 1) * kRows > sequence.q_len || k0 + kKeys > sequence.k_len;
    return kHasBias && is_cut && kind == TileKind::kFull ? TileKind::kPartial : kind;
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
      const auto copy_dout = [&] {
        const DoutPlace dout_place{place.count};
        shared.dout_handover.wait_empty(dout_place);
        copy_rows<kRows, kHeadDim>(maps.dout, rows_of(item), first, shared.dout[dout_place.stage()],
                                   shared.dout_handover.full[dout_place.stage()]);
      };
      auto& q_full = shared.q_handover.full[stage];
      shared.q_handover.wait_empty(place);
      if (copies) {
        shared.row_tiles[stage] = {first | (is_partial ? RowTile::kPartial : 0) |
                                   (next < 0 ? RowTile::kLast : 0)};
        q_full.expect_transaction(kRows * kHeadDim * sizeof(Element));
        start_copy_rows<kRows, kHeadDim>(maps.q, rows_of(item), first, shared.q[stage], q_full);
        if constexpr (kHasBias) {
          const BiasPlace bias_place{place.count};
          shared.bias_handover.wait_empty(bias_place);
          q_full.expect_transaction(kRows * kBlockKeys * sizeof(Element));
          start_copy_bias<kRows, kBlockKeys>(maps.bias, item.work.sequence_number, item.bias_head,
                                             first + item.work.sequence.offset,
                                             Block::first_key(item),
                                             shared.bias[bias_place.stage()], q_full);
        }
        if constexpr (!kIsCluster) copy_dout();
        // NOTE: to find the next item and copy its first tiles takes as long as a few steps.
        const bool is_near = abs(item.last_row_tile - m) <= kTilesAhead;
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
      // NOTE: a cluster's consumers need the next Q before they hand back dO.
      if (kIsCluster && copies) copy_dout();
      place.advance();
    });
  }

  static HSTU_DEVICE RaggedRows rows_of(const Item& item) {
    const Sequence& sequence = item.work.sequence;
    return {sequence.q_begin, sequence.q_len, item.head};
  }

  // Adds those tiles of dQ to their sums that come in a stage. By a thread for each stage.
  static HSTU_DEVICE void add_dq(const BackwardParams& params, const BackwardMaps& maps,
                                 const BackwardBuffers& buffers, SharedMemory& shared, int stage) {
    DqPlace place;
    for_each_row_tile(shared, [&](const Item& item, int m, int) {
      if (place.stage() != stage) {
        place.advance();
        return;
      }
      if (Block::stores_ds(params)) store_ds(maps, item, m, DsPlace{place.count}, shared);
      const int row_tile = item.first_row_tile + m;
      const int number = row_tile * params.heads + item.head;
      if constexpr (kIsDeterministic) {
        const int before = buffers.turns[row_tile].count_before(item.work.tile);
        // NOTE: less, not unequal: offsets that overlap let sequences share a tile.
        while (load_turns(buffers.turns_taken + number * kClusterBlocks + Block::rank()) < before) {
        }
        asm volatile("fence.proxy.async.global;" ::: "memory");
      }
      shared.dq_handover.wait_full(place);
      start_adding(buffers.dq + int64_t{number} * Dq::kSize + Block::rank() * Dq::kBlockSize,
                   Block::dq_tile(shared, place));
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      if constexpr (kIsCluster) {  // it lay in place of Q
        shared.q_handover.release(RowPlace{place.count});
      } else {
        shared.dq_handover.release(place);
      }
      if constexpr (kIsDeterministic) {
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        asm volatile("fence.proxy.async.global;" ::: "memory");
        asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(
                         buffers.turns_taken + number * kClusterBlocks + Block::rank())
                     : "memory");
      }
      place.advance();
    });
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }

  static HSTU_DEVICE void store_ds(const BackwardMaps& maps, const Item& item, int m, DsPlace place,
                                   SharedMemory& shared) {
    shared.ds_handover.wait_full(place);
    const Element* const own = Block::ds_tile(shared, place) + Block::rank() * (kRows * kBlockKeys);
    start_storing_bias_gradient<kRows * 64>(maps, item, m, own);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    shared.ds_handover.release(place);
  }

  // Starts zeroing the bias gradient where no row sees a key of the item. By one thread.
  static HSTU_DEVICE void start_zeroing_unseen(const BackwardMaps& maps, const Item& item,
                                               const SharedMemory& shared) {
    for (int m = 0; m * kRows < item.work.sequence.q_len; ++m) {
      if (!item.map.holds(m)) start_storing_bias_gradient<0>(maps, item, m, shared.zeros);
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }

  // Starts storing a tile of the bias gradient, whose panels of 64 keys are kPanelSize apart.
  template <int kPanelSize>
  static HSTU_DEVICE void start_storing_bias_gradient(const BackwardMaps& maps, const Item& item,
                                                      int m, const Element* tile) {
    const WorkTile& work = item.work;
#pragma unroll
    for (int panel = 0; panel < kBlockKeys / 64; ++panel) {
      cute::SM90_TMA_STORE_4D::copy(
          &maps.bias_gradient, tile + panel * kPanelSize, Block::first_key(item) + panel * 64,
          m * kRows + work.sequence.offset, item.head, work.sequence_number);
    }
  }

  // Starts adding the block's parts of a dQ to sums.
  static HSTU_DEVICE void start_adding(float* sums, const float* parts) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 :
                 : "l"(sums), "r"(cute::cast_smem_ptr_to_uint(parts)),
                   "n"(static_cast<int>(Dq::kBlockSize * sizeof(float)))
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
