// One sequence of a packed batch: where its rows are and what they are.
#pragma once

#include "../params.h"

namespace hstu {

struct Sequence {
  int64_t q_begin = 0;  // first query row in the packed tensors
  int64_t k_begin = 0;  // first key row
  int q_len = 0;        // Lq, at most Lk
  int k_len = 0;        // Lk
  int offset = 0;       // query row r has absolute position r + offset
  int contexts = 0;     // c: positions [0, c) are contextual
  int history_end = 0;  // h: positions [c, h) are history, [h, Lk) are targets
};

HSTU_HOST_DEVICE int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : (x > high ? high : x);
}

// Reads sequence `b`. Offsets and lengths that exceed the tensors are clamped to their bounds, so
// that no later access leaves them, and counts are clamped to the sequence's length. Query rows
// before the first key see nothing: they are left out here, like rows that belong to no sequence.
HSTU_HOST_DEVICE Sequence load_sequence(const BatchParams& batch, int b) {
  Sequence s;
  s.q_begin = clamp(batch.cu_seqlens_q[b], 0, batch.total_q);
  s.k_begin = clamp(batch.cu_seqlens_k[b], 0, batch.total_k);
  const int64_t q_room = clamp(batch.cu_seqlens_q[b + 1], s.q_begin, batch.total_q) - s.q_begin;
  const int64_t k_room = clamp(batch.cu_seqlens_k[b + 1], s.k_begin, batch.total_k) - s.k_begin;
  s.q_len = static_cast<int>(batch.seqused_q ? clamp(batch.seqused_q[b], 0, q_room) : q_room);
  s.k_len = static_cast<int>(batch.seqused_k ? clamp(batch.seqused_k[b], 0, k_room) : k_room);
  const int in_front = s.q_len > s.k_len ? s.q_len - s.k_len : 0;
  s.q_begin += in_front;
  s.q_len -= in_front;
  s.offset = s.k_len - s.q_len;
  const int most_targets = batch.paged ? s.q_len : s.k_len;
  const int64_t targets = batch.num_targets ? clamp(batch.num_targets[b], 0, most_targets) : 0;
  s.history_end = static_cast<int>(s.k_len - targets);
  s.contexts =
      static_cast<int>(batch.num_contexts ? clamp(batch.num_contexts[b], 0, s.history_end) : 0);
  return s;
}

}  // namespace hstu
