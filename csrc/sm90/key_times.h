// The times of a tile of keys in shared memory, for the backward with a relative bias.
#pragma once

#include "../common/ptx.h"
#include "../common/relative_bias.h"
#include "../scheduler/work_list.h"

namespace hstu::sm90 {

// The times of kKeys keys, and the range of each 8 of them.
template <int kKeys>
struct KeyTimes {
  alignas(16) int64_t times[kKeys];
  TimeRange ranges[kKeys / 8];

  // Starts copying the times of keys from `first` on, a multiple of 8; the last one in place of
  // those past the end of the sequence. Called by kThreads threads, which call
  // ptx::cp_async_wait_all() and a barrier before they read what is copied.
  template <int kThreads>
  HSTU_DEVICE void start_copy(const RelativeBias& bias, const SequenceTile& tile, int first,
                              int thread) {
    const Sequence& sequence = tile.sequence;
    const int last = sequence.k_len - 1;
    const int64_t* const from = bias.timestamps + sequence.k_begin;
    for (int n = thread; n < kKeys; n += kThreads) {
      ptx::cp_async_8(from + min(first + n, last), times + n);
    }
    const int chunk = kThreads - 1 - thread;  // other threads than those of the last times
    if (chunk >= kKeys / 8) return;
    const int64_t block = first_tile(sequence.k_begin, tile.sequence_index, 8);
    ptx::cp_async_cached_16(bias.prepared.ranges + block + min(first / 8 + chunk, last / 8),
                            ranges + chunk);
  }
};

}  // namespace hstu::sm90
