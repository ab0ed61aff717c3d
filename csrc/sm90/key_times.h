// The times of a tile of keys in shared memory, for the backward with a relative bias.
#pragma once

#include "../common/ptx.h"
#include "../common/relative_bias.h"
#include "../scheduler/work_list.h"

namespace hstu::sm90 {

// The times of kKeys keys, in blocks of 8 with the range of their times.
template <int kKeys>
struct KeyTimes {
  KeyBlockTimes blocks[kKeys / 8];

  // Starts copying the times of the keys from `first` on, which is a multiple of 8. Blocks past the
  // end of the sequence get the times of its last block. Called by kThreads threads, which call
  // ptx::cp_async_wait_all() and a barrier before they read what is copied.
  template <int kThreads>
  HSTU_DEVICE void start_copy(const RelativeBias& bias, const SequenceTile& tile, int first,
                              int thread) {
    constexpr int kParts = sizeof(KeyBlockTimes) / 16;
    static_assert(kParts * (kKeys / 8) <= kThreads);
    const int block = thread / kParts;
    if (block >= kKeys / 8) return;
    const Sequence& sequence = tile.sequence;
    const KeyBlockTimes* const from = bias.prepared.time_blocks +
                                      first_tile(sequence.k_begin, tile.sequence_index, 8) +
                                      min(first / 8 + block, (sequence.k_len - 1) / 8);
    const int part = thread % kParts;
    ptx::cp_async_cached_16(reinterpret_cast<const uint4*>(from) + part,
                            reinterpret_cast<uint4*>(blocks + block) + part);
  }
};

}  // namespace hstu::sm90
