// Synchronization of the producers and consumers of a block: pipelines of stages in shared memory,
// and named barriers.
#pragma once

#include <cutlass/arch/barrier.h>

#include "../common/ptx.h"
#include "tile_config.h"

namespace hstu::sm90 {

// A warp arrives at a barrier once: its first lane does, after __syncwarp(). The racecheck
// tool of compute-sanitizer knows only what the arriving thread did before, so in a build for it,
// all lanes arrive.
#if defined(HSTU_ATTN_RACECHECK)
constexpr int kArrivalsOfWarp = 32;
#else
constexpr int kArrivalsOfWarp = 1;
#endif

// True in the threads of a warp that arrive for the warp.
HSTU_DEVICE bool arrives_for_warp() { return kArrivalsOfWarp == 32 || threadIdx.x % 32 == 0; }

// A position in a ring of kStages stages, as in CUTLASS: index() is the stage and phase() the
// parity that its barriers have.
// NOTE: both are derived from one counter, which takes one register.
template <int kStages_>
struct PipelineState {
  static constexpr int kStages = kStages_;

  uint32_t count = 0;

  HSTU_DEVICE int index() const { return static_cast<int>(count % kStages); }
  HSTU_DEVICE uint32_t phase() const { return count / kStages % 2; }
  HSTU_DEVICE void advance() { ++count; }
  HSTU_DEVICE PipelineState prev() const { return {count - 1}; }
};

// The barriers of a ring of stages: `full` tells consumers that a stage has been written, `empty`
// tells producers that it has been read.
template <int kStages>
struct Pipeline {
  // Completes when every producer has arrived and all bytes that they expect have been written.
  cutlass::arch::ClusterTransactionBarrier full[kStages];
  cutlass::arch::ClusterBarrier empty[kStages];  // completes when every consumer has arrived

  HSTU_DEVICE void init(int consumers, int producers = 1) {
    for (int stage = 0; stage < kStages; ++stage) {
      full[stage].init(producers);
      empty[stage].init(consumers);
    }
  }
  HSTU_DEVICE void consumer_wait(const PipelineState<kStages>& state) const {
    full[state.index()].wait(state.phase());
  }
  // NOTE: this waits for the previous phase, so that the first round does not wait.
  HSTU_DEVICE void producer_acquire(const PipelineState<kStages>& state) const {
    empty[state.index()].wait(state.phase() ^ 1);
  }
  // Called by all threads of a warp, which is one producer.
  HSTU_DEVICE void producer_commit_by_warp(const PipelineState<kStages>& state) const {
    __syncwarp();
    if (arrives_for_warp()) full[state.index()].arrive();
  }
  // Called by a thread, which is one consumer.
  HSTU_DEVICE void consumer_release(const PipelineState<kStages>& state) const {
    empty[state.index()].arrive();
  }
  // consumer_release_by_warp() if `condition` holds, which is the same in all lanes. There is no
  // branch, because the compiler moves a branch behind arithmetic that follows it.
  HSTU_DEVICE void consumer_release_by_warp_if(const PipelineState<kStages>& state,
                                               bool condition) const {
    __syncwarp();
    ptx::mbarrier_arrive_if(&empty[state.index()], condition && arrives_for_warp());
  }
  // Called by all threads of a warp, which is one consumer.
  HSTU_DEVICE void consumer_release_by_warp(const PipelineState<kStages>& state) const {
    __syncwarp();
    if (arrives_for_warp()) empty[state.index()].arrive();
  }
};

// Waits for a stage of each of two pipelines.
template <int kStages>
HSTU_DEVICE void consumer_wait(const Pipeline<kStages>& a, PipelineState<kStages> a_state,
                               const Pipeline<kStages>& b, PipelineState<kStages> b_state) {
  const bool a_full = a.full[a_state.index()].try_wait(a_state.phase());
  const bool b_full = b.full[b_state.index()].try_wait(b_state.phase());
  if (!a_full) a.consumer_wait(a_state);
  if (!b_full) b.consumer_wait(b_state);
}

// Calls visit(work_tile) for each work tile of a ring, until one has head < 0: the end. Called by
// each consumer thread of the ring.
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

// Reads a KeyTile or RowTile from shared memory.
// NOTE: lane 0 reads it, because that lane releases the stage for its warp.
template <typename Tile>
HSTU_DEVICE Tile read_by_warp(const Tile& tile) {
  const int bits = threadIdx.x % 32 == 0 ? tile.bits : 0;
  return {__shfl_sync(0xffffffff, bits, 0)};
}

// Ids of named barriers. Id 0 is __syncthreads(). kWarpSchedulerWG0 and kWarpgroupWG0 each begin a
// range of ids, one per warpgroup.
// NOTE: CUTLASS reserves ids from 1 on for its collectives, none of which is used here. With
// kWarpSchedulerWG0 = 1, the id of a consumer is the warpgroup's index in the block, which is in a
// register anyway.
enum class NamedBarriers : int { kWarpSchedulerWG0 = 1, kConsumers = 5, kWarpgroupWG0 = 6 };

HSTU_DEVICE auto barrier_id(NamedBarriers first, int warpgroup = 0) {
  return static_cast<cutlass::arch::ReservedNamedBarriers>(static_cast<int>(first) + warpgroup);
}

template <int kConsumers>
HSTU_DEVICE void sync_consumers() {
  cutlass::arch::NamedBarrier::sync(kConsumers * kWarpgroup, barrier_id(NamedBarriers::kConsumers));
}
HSTU_DEVICE void sync_warpgroup(int warpgroup) {
  cutlass::arch::NamedBarrier::sync(kWarpgroup,
                                    barrier_id(NamedBarriers::kWarpgroupWG0, warpgroup));
}

// Orders the products of the consumer warpgroups as in FlashAttention-3: each warpgroup waits in
// sync() until the one before it has issued its products and called arrive(), so that the products
// of one run while another applies its activation. Without kTakesTurns, no warpgroup waits.
template <int kConsumers, bool kTakesTurns>
struct WarpSchedulerBarrier {
  int warpgroup;
  int next = uniform_next();

  // The last warpgroup arrives first, so that warpgroup 0 can begin.
  HSTU_DEVICE void init() const {
    if (warpgroup == kConsumers - 1) arrive();
  }
  HSTU_DEVICE void sync() const {
    if constexpr (!kTakesTurns) return;
    cutlass::arch::NamedBarrier::sync(2 * kWarpgroup,
                                      barrier_id(NamedBarriers::kWarpSchedulerWG0, warpgroup));
  }
  HSTU_DEVICE void arrive() const {
    if constexpr (!kTakesTurns) return;
    cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup,
                                        barrier_id(NamedBarriers::kWarpSchedulerWG0, next));
  }

 private:
  // NOTE: after a shuffle, the compiler keeps the value in a uniform register. Three consumers
  // would spill it otherwise; two or four compute it where they need it.
  HSTU_DEVICE int uniform_next() const {
    const int next = warpgroup + 1 == kConsumers ? 0 : warpgroup + 1;
    return kTakesTurns && kConsumers == 3 ? __shfl_sync(0xffffffff, next, 0) : next;
  }
};

}  // namespace hstu::sm90
