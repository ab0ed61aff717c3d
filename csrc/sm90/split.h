// An item shared by the blocks of a cluster: each takes some of its tiles of keys, and since the
// sums need no rescaling, these are added up in the end.
#pragma once

#include "../common/pages.h"
#include "../common/work_list.h"
#include "stores.h"

namespace hstu::sm90 {

// find_row_tile(), and the sequence's pages, by a warp, each lane of which looks at some sequences:
// a block that has one item would wait for each step of a search.
HSTU_DEVICE bool find_paged_tile(const ForwardParams& params, int number, int size, WorkTile& found,
                                 PageList& pages) {
  const BatchParams& batch = params.batch;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int before = 0;  // sequences whose first tile is not behind it
  for (int first = 0; first < batch.batch; first += 32) {
    const int b = first + lane;
    const bool is_before =
        b < batch.batch &&
        first_tile(clamp(batch.cu_seqlens_q[b], 0, batch.total_q), b, size) <= number;
    const int count = __popc(__ballot_sync(0xffffffff, is_before));
    before += count;
    if (count < 32) break;
  }
  const int b = max(before - 1, 0);
  const PageList list(params.paged, b);
  const Sequence sequence = load_sequence(batch, b);
  const int tile = number - static_cast<int>(first_tile(sequence.q_begin, b, size));
  if (lane == 0) {
    found = {sequence, b, tile};
    pages = list;
  }
  return tile >= 0 && tile * size < sequence.q_len;
}

// Leaves of what an item's rows see the tiles that the block takes.
template <int kKeys, int kSplits>
HSTU_DEVICE void take_share(Interval (&hull)[2]) {
  Interval tiles[2];
  for (int n = 0; n < 2; ++n) {
    tiles[n] = {hull[n].begin / kKeys, (hull[n].end + kKeys - 1) / kKeys};
    if (hull[n].empty()) tiles[n] = {};
  }
  tiles[1].begin = max(tiles[1].begin, tiles[0].end);
  const int first = max(tiles[0].end - tiles[0].begin, 0);
  const int count = first + max(tiles[1].end - tiles[1].begin, 0);
  const int rank = static_cast<int>(block_rank_in_cluster());
  const int begin = count * rank / kSplits;
  const int end = count * (rank + 1) / kSplits;
  for (int n = 0; n < 2; ++n) {
    const int origin = tiles[n].begin - n * first;
    hull[n] = {max(hull[n].begin, (origin + begin) * kKeys),
               min(hull[n].end, (origin + end) * kKeys)};
  }
}

// Adds up a warpgroup's sums over the blocks of the cluster, in the order of their ranks. Each
// leaves its own in shared memory in the order of registers, four values of each thread and then
// the next four, which are 8 columns of all rows; each adds up every kSplits-th of these pieces,
// and calls store(column, m, x, y) for what it finds of columns `column` and the next, and of row m
// of the thread. By all warpgroups that have sums; others of the block may have ended.
template <int kSplits, typename Sum, typename Store>
HSTU_DEVICE void add_up_cluster(const Sum& sum, float* sums, Store store) {
  constexpr int kPieces = decltype(size(sum))::value / 4;
  constexpr int kPieceSize = kWarpgroup * 4;
  const int thread = thread_anew() % kWarpgroup;
  sums += thread * 4;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int n = piece * 4;
    *reinterpret_cast<float4*>(sums + piece * kPieceSize) = {sum(n), sum(n + 1), sum(n + 2),
                                                             sum(n + 3)};
  }
  forget_registers();
  cluster_sync();
  const uint32_t own = cast_smem_ptr_to_uint(sums);
  const int rank = static_cast<int>(block_rank_in_cluster());
  // NOTE: all of it is asked for at once, since each answer takes a microsecond.
  constexpr int kShare = (kPieces + kSplits - 1) / kSplits;
  float4 parts[kShare][kSplits];
#pragma unroll
  for (int n = 0; n < kShare; ++n) {
    const int piece = min(rank + n * kSplits, kPieces - 1);
#pragma unroll
    for (int block = 0; block < kSplits; ++block) {
      const uint32_t from = set_block_rank(own + piece * kPieceSize * sizeof(float), block);
      float4& part = parts[n][block];
      asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w)
                   : "r"(from));
    }
  }
#pragma unroll
  for (int n = 0; n < kShare; ++n) {
    const int piece = rank + n * kSplits;
    float4 total = parts[n][0];
#pragma unroll
    for (int block = 1; block < kSplits; ++block) {
      total.x += parts[n][block].x;
      total.y += parts[n][block].y;
      total.z += parts[n][block].z;
      total.w += parts[n][block].w;
    }
    if (piece >= kPieces) break;
    const int column = piece * 8 + thread % 4 * 2;
    store(column, 0, total.x, total.y);
    store(column, 1, total.z, total.w);
  }
  cluster_sync();  // the other blocks have read what is here
}

}  // namespace hstu::sm90
