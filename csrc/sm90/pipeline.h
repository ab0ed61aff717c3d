// How the producer and the consumers of a block hand over shared memory.
#pragma once

#include <cutlass/arch/barrier.h>

#include "tile_config.h"

namespace hstu::sm90 {

// A place in a ring of stages: how many places came before it.
// NOTE: one register for stage and parity.
template <int kStages_>
struct RingPlace {
  static constexpr int kStages = kStages_;

  uint32_t count = 0;

  HSTU_DEVICE int stage() const { return static_cast<int>(count % kStages); }
  HSTU_DEVICE uint32_t parity() const { return count / kStages % 2; }
  HSTU_DEVICE void advance() { ++count; }
  HSTU_DEVICE RingPlace before() const { return {count - 1}; }
};

// Tells consumers that a stage is full, and its producers that it is empty again.
template <int kStages>
struct Handover {
  // Every producer arrives, and the bytes that it has announced.
  cutlass::arch::ClusterTransactionBarrier full[kStages];
  cutlass::arch::ClusterBarrier empty[kStages];  // every consumer arrives, see release()

  HSTU_DEVICE void init(int consumers, int producers = 1) {
    for (int stage = 0; stage < kStages; ++stage) {
      full[stage].init(producers);
      empty[stage].init(consumers);
    }
  }
  HSTU_DEVICE void wait_full(const RingPlace<kStages>& place) const {
    full[place.stage()].wait(place.parity());
  }
  // NOTE: the parity of the round before; nothing has to arrive for the first one.
  HSTU_DEVICE void wait_empty(const RingPlace<kStages>& place) const {
    empty[place.stage()].wait(place.parity() ^ 1);
  }
  // The producer is a warp, by all of whose threads this is called.
  HSTU_DEVICE void fill_by_warp(const RingPlace<kStages>& place) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) full[place.stage()].arrive();
  }
  // The consumer is a thread.
  HSTU_DEVICE void release(const RingPlace<kStages>& place) const { empty[place.stage()].arrive(); }
  // The consumer is a warp, by all of whose threads this is called.
  HSTU_DEVICE void release_by_warp(const RingPlace<kStages>& place) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) empty[place.stage()].arrive();
  }
};

// Waits for a stage of each.
template <int kStages>
HSTU_DEVICE void wait_full(const Handover<kStages>& a, RingPlace<kStages> a_place,
                           const Handover<kStages>& b, RingPlace<kStages> b_place) {
  const bool a_full = a.full[a_place.stage()].try_wait(a_place.parity());
  const bool b_full = b.full[b_place.stage()].try_wait(b_place.parity());
  if (!a_full) a.wait_full(a_place);
  if (!b_full) b.wait_full(b_place);
}

// Calls visit(item) for each item of a ring until one has no head. By one thread.
template <int kStages, typename Item, typename Visit>
HSTU_DEVICE void for_each_item(const Item (&items)[kStages], const Handover<kStages>& handover,
                               Visit visit) {
  for (RingPlace<kStages> place;; place.advance()) {
    handover.wait_full(place);
    const Item& item = items[place.stage()];
    if (item.head < 0) return;
    visit(item);
    handover.release(place);
  }
}

// What a tile in shared memory says, in one register.
// NOTE: by the lane that tells for its warp that the stage is empty.
template <typename Tile>
HSTU_DEVICE Tile read_by_warp(const Tile& tile) {
  const int bits = threadIdx.x % 32 == 0 ? tile.bits : 0;
  return {__shfl_sync(0xffffffff, bits, 0)};
}

// Named barriers. Barrier 0 is __syncthreads(). Of those that begin with kFirst, each consumer
// warpgroup has one.
enum class NamedBarrier : int { kFirstTurn = 1, kConsumers = 4, kFirstOfWarpgroup = 5 };

// Consumer warpgroups issue their products in turn, so that one's products run beside another's
// activation.
template <int kConsumers>
struct Turns {
  int warpgroup;

  // The first warpgroup's first turn, given by the last one.
  HSTU_DEVICE void begin() const {
    if (warpgroup == kConsumers - 1) pass();
  }
  HSTU_DEVICE void take() const {
    asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(NamedBarrier::kFirstTurn) + warpgroup),
                 "n"(2 * kWarpgroup)
                 : "memory");
  }
  HSTU_DEVICE void pass() const {
    const int next = warpgroup + 1 == kConsumers ? 0 : warpgroup + 1;
    asm volatile("bar.arrive %0, %1;" ::"r"(static_cast<int>(NamedBarrier::kFirstTurn) + next),
                 "n"(2 * kWarpgroup)
                 : "memory");
  }
};

}  // namespace hstu::sm90
