// How the producer and the consumers of a block hand over shared memory.
#pragma once

#include <cutlass/arch/barrier.h>

#include "tile_config.h"

namespace hstu::sm90 {

// A place in a ring of stages: how many places came before it.
// NOTE: one register for stage and parity.
template <int kStages_>
struct PipelineState {
  static constexpr int kStages = kStages_;

  uint32_t count = 0;

  HSTU_DEVICE int index() const { return static_cast<int>(count % kStages); }
  HSTU_DEVICE uint32_t phase() const { return count / kStages % 2; }
  HSTU_DEVICE void advance() { ++count; }
  HSTU_DEVICE PipelineState prev() const { return {count - 1}; }
};

// Tells consumers that a stage is full, and its producers that it is empty again.
template <int kStages>
struct Pipeline {
  // Every producer arrives, and the bytes that it has announced.
  cutlass::arch::ClusterTransactionBarrier full[kStages];
  cutlass::arch::ClusterBarrier empty[kStages];  // every consumer arrives, see consumer_release()

  HSTU_DEVICE void init(int consumers, int producers = 1) {
    for (int stage = 0; stage < kStages; ++stage) {
      full[stage].init(producers);
      empty[stage].init(consumers);
    }
  }
  HSTU_DEVICE void consumer_wait(const PipelineState<kStages>& state) const {
    full[state.index()].wait(state.phase());
  }
  // NOTE: the parity of the round before; nothing has to arrive for the first one.
  HSTU_DEVICE void producer_acquire(const PipelineState<kStages>& state) const {
    empty[state.index()].wait(state.phase() ^ 1);
  }
  // The producer is a warp, by all of whose threads this is called.
  HSTU_DEVICE void producer_commit_by_warp(const PipelineState<kStages>& state) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) full[state.index()].arrive();
  }
  // The consumer is a thread.
  HSTU_DEVICE void consumer_release(const PipelineState<kStages>& state) const {
    empty[state.index()].arrive();
  }
  // The consumer is a warp, by all of whose threads this is called.
  HSTU_DEVICE void consumer_release_by_warp(const PipelineState<kStages>& state) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) empty[state.index()].arrive();
  }
};

// Waits for a stage of each.
template <int kStages>
HSTU_DEVICE void consumer_wait(const Pipeline<kStages>& a, PipelineState<kStages> a_state,
                               const Pipeline<kStages>& b, PipelineState<kStages> b_state) {
  const bool a_full = a.full[a_state.index()].try_wait(a_state.phase());
  const bool b_full = b.full[b_state.index()].try_wait(b_state.phase());
  if (!a_full) a.consumer_wait(a_state);
  if (!b_full) b.consumer_wait(b_state);
}

// Calls visit(item) for each item of a ring until one has no head. By one thread.
template <int kStages, typename WorkTile, typename Visit>
HSTU_DEVICE void for_each_work_tile(const WorkTile (&work_tiles)[kStages],
                                    const Pipeline<kStages>& pipeline, Visit visit) {
  for (PipelineState<kStages> state;; state.advance()) {
    pipeline.consumer_wait(state);
    const WorkTile& work_tile = work_tiles[state.index()];
    if (work_tile.head < 0) return;
    visit(work_tile);
    pipeline.consumer_release(state);
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
enum class NamedBarrier : int { kWarpSchedulerWG0 = 1, kConsumers = 4, kWarpgroup0 = 5 };

// Consumer warpgroups issue their products in turn, so that one's products run beside another's
// activation.
template <int kConsumers>
struct WarpSchedulerBarrier {
  int warpgroup;

  // The first warpgroup's first turn, given by the last one.
  HSTU_DEVICE void init() const {
    if (warpgroup == kConsumers - 1) arrive();
  }
  HSTU_DEVICE void sync() const {
    asm volatile(
        "bar.sync %0, %1;" ::"r"(static_cast<int>(NamedBarrier::kWarpSchedulerWG0) + warpgroup),
        "n"(2 * kWarpgroup)
        : "memory");
  }
  HSTU_DEVICE void arrive() const {
    const int next = warpgroup + 1 == kConsumers ? 0 : warpgroup + 1;
    asm volatile(
        "bar.arrive %0, %1;" ::"r"(static_cast<int>(NamedBarrier::kWarpSchedulerWG0) + next),
        "n"(2 * kWarpgroup)
        : "memory");
  }
};

}  // namespace hstu::sm90
