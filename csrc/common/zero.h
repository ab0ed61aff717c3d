// Zeroes the rows of 16-bit outputs that belong to no sequence or are behind a sequence's used
// length.
#pragma once

#include "opaque.h"
#include "sequence.h"

namespace hstu {

enum class RowsOf { kQueries, kKeys };

// Zeroes rows [begin, end) of a tensor [rows, heads, head_dim]. Called by one warp.
__device__ __forceinline__ void zero_rows(const PackedTensor& tensor, int heads, int64_t begin,
                                          int64_t end) {
  const unsigned pieces = tensor.head_dim / 8;  // pieces of 16 bytes
  // NOTE: the loops are not unrolled, because few calls have such rows, and short ones wait for the
  // code of the kernel.
#pragma unroll 1
  for (int64_t row = begin; row < end; ++row) {
    uint16_t* const to = static_cast<uint16_t*>(tensor.data) + row * tensor.row_stride;
#pragma unroll 1
    for (unsigned n = threadIdx.x % 32; n < heads * pieces; n += 32) {
      const unsigned head = n / pieces;
      uint16_t* const piece = to + head * tensor.head_stride + (n - head * pieces) * 8;
      *reinterpret_cast<uint4*>(piece) = uint4{};
    }
  }
}

// Zeroes `count` rows of a head from row `begin` on. Called by one warp.
// NOTE: this is for producers, which have fewer registers than zero_rows() takes.
HSTU_DEVICE void zero_rows_of_head(const PackedTensor& tensor, int64_t begin, int count, int head) {
  const int column = reload_thread_idx() % 32 * 8;  // a row has at most 256 columns
  if (column >= tensor.head_dim) return;
  uint16_t* to = static_cast<uint16_t*>(tensor.data) + head * tensor.head_stride +
                 begin * tensor.row_stride + column;
#pragma unroll 1
  for (int row = 0; row < count; ++row, to += tensor.row_stride) {
    *reinterpret_cast<uint4*>(to) = uint4{};
  }
}

// Zeroes all rows between sequences. Called by `warps` warps; this one has number `warp`. Gap b is
// before sequence b, and the last gap reaches to the end.
template <RowsOf kRows>
__device__ void zero_unowned_rows(const BatchParams& params, const PackedTensor& tensor, int heads,
                                  int warp, int warps) {
  constexpr bool kQueries = kRows == RowsOf::kQueries;
  // Sequences of equally many queries and keys follow each other without gaps.
  const bool has_gaps = params.seqused_q || params.seqused_k || params.total_q != params.total_k ||
                        params.cu_seqlens_q.data != params.cu_seqlens_k.data;
#pragma unroll 1
  for (int b = warp; b <= params.batch; b += warps) {
    if (!has_gaps && 0 < b && b < params.batch) continue;
    int64_t begin = 0;
    int64_t end = kQueries ? params.total_q : params.total_k;
    if (b > 0) {
      const Sequence before = load_sequence(params, b - 1);
      begin = kQueries ? before.q_begin + before.q_len : before.k_begin + before.k_len;
    }
    if (b < params.batch) {
      const Sequence after = load_sequence(params, b);
      end = kQueries ? after.q_begin : after.k_begin;
    }
    zero_rows(tensor, heads, begin, end);
  }
}

}  // namespace hstu
