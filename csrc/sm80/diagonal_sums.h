// The sums along the diagonals of a tile of dS in shared memory: the scores of a diagonal have the
// same distance of key and row, and read the same entry of a relative bias's position table.
//
// Along a diagonal, chunk 0 of row b is continued by chunk n of 8 elements of row b + 8n. A warp
// takes 16 values of b at a time, and adds up the 16 x 8 elements of each chunk by mma.sync with an
// identity matrix. The result is Y[b][t][i], for element 2t + i of a chunk, with t < 4 and i < 2.
// Its distance is 2t + i - b. Elements of the same distance are added up over i and t by shuffles.
#pragma once

#include "relative_bias.h"

namespace hstu::sm80 {

// 16 bytes of shared memory that are 0: ldmatrix reads them for a row that does not exist.
struct alignas(16) ZeroChunk {
  uint32_t words[4];
};

template <int kRows, int kKeys, int kWarps, typename Mma>
class DiagonalSums {
 public:
  using Element = typename Mma::Element;

  // Adds the sums to the entries of the position table. `ds` is a RowsTile, and `distance` is the
  // distance of its first row and key. Called by all threads of the block.
  static HSTU_DEVICE void add(const Element* ds, const ZeroChunk& zeros, int distance,
                              const RelativeBias& bias, const RelativeMatrix& matrix,
                              const TableSum& sums) {
    const int thread = bounded_thread_idx();
    const int lane = thread % 32;
    const int t = lane % 4;
    const int first = kFirst + thread / 32 * (16 * kBlocks);  // the warp's first b
    float z[kCount];
    add_chunks(ds, zeros, first, lane, z);
    float all[kCount / 4];
    add_lanes(z, t, all);
    // Distances past the ends of the table read its first or its last entry.
    const int last_entry = bias.position.size - 1;
    float before = 0;
    float after = 0;
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
      const int b = first + 8 * (4 * n + t - 1) + lane / 4;
      const int entry = last_entry / 2 + distance - b;
      const float sum = all[n];
      if (entry <= 0) {
        before += sum;
      } else if (entry >= last_entry) {
        after += sum;
      } else {
        sums.add(matrix.position_entry + entry, sum);
      }
    }
    if (__any_sync(kAllLanes, before != 0)) {
      before = warp_sum(before);
      if (lane == 0) sums.add(matrix.position_entry, before);
    }
    if (__any_sync(kAllLanes, after != 0)) {
      after = warp_sum(after);
      if (lane == 0) sums.add(matrix.position_entry + last_entry, after);
    }
  }

 private:
  static constexpr int kChunks = kKeys / 8;
  static constexpr int kFirst = 8 - kKeys;  // values of b are in [kFirst, kRows)
  static constexpr int kBlocks = ceil_div(kRows - kFirst, 16 * kWarps);  // groups of 16 b
  // Groups of 8 values of b to which the warp's sums belong: its own 2 kBlocks groups and one
  // before them. kCount rounds their number up to a multiple of 4.
  static constexpr int kGroups = 2 * kBlocks + 1;
  static constexpr int kCount = ceil_div(kGroups, 4) * 4;

  // Sets z[n] to the sums over chunks and i of distance -b, for b = first + 8 (n - 1) + lane / 4.
  static HSTU_DEVICE void add_chunks(const Element* ds, const ZeroChunk& zeros, int first, int lane,
                                     float (&z)[kCount]) {
    using Tile = RowsTile<kRows, kKeys, Element>;
    // The identity as a left operand: row g has its one in column g.
    const uint32_t bits = Element(1.0f).raw();
    const uint32_t one = lane / 8 == lane % 4 ? bits << lane / 4 % 2 * 16 : 0;
    const uint32_t identity[4] = {one, 0, 0, one};

    // Lane n passes the address of a row of matrix n / 8: rows 0-7 and 8-15 of one chunk, then of
    // the next.
    const int second = lane / 16;
    const int row = first + lane % 16 + 8 * second;
    float y[2 * kBlocks + 2]
           [2];  // y[n + 1][i] has b = first + 8n + g; the first and the last are 0
    y[0][0] = y[0][1] = y[2 * kBlocks + 1][0] = y[2 * kBlocks + 1][1] = 0;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      float sum[4] = {};
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk += 2) {
        const int from = row + block * 16 + 8 * chunk;
        const void* address =
            0 <= from && from < kRows
                ? static_cast<const void*>(ds + Tile::offset(from, (chunk + second) * 8))
                : &zeros;
        uint32_t words[4];
        cute::SM75_U16x8_LDSM_T::copy(*static_cast<const cute::uint128_t*>(address), words[0],
                                      words[1], words[2], words[3]);
        Mma::multiply(sum, identity, words);
        Mma::multiply(sum, identity, words + 2);
      }
      y[2 * block + 1][0] = sum[0];
      y[2 * block + 1][1] = sum[1];
      y[2 * block + 2][0] = sum[2];
      y[2 * block + 2][1] = sum[3];
    }
    // Adds i = 1 of b + 1, which the next row's lane has, to i = 0 of b: the sum has distance 2t -
    // b.
    float pairs[kGroups + 1];
    pairs[kGroups] = 0;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const float given = lane < 4 ? y[n + 1][1] : y[n][1];
      pairs[n] = y[n][0] + __shfl_sync(kAllLanes, given, lane + 4);
    }
    // Takes the sum of b + 2t from the lane that has the row 2t further on.
    const int t = lane % 4;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      z[n] = 0;
      if (n >= kGroups) continue;
      const float given = lane / 4 < 2 * t ? pairs[n + 1] : pairs[n];
      z[n] = __shfl_sync(kAllLanes, given, lane + 8 * t);
    }
  }

  // sums[q] is the sum of z[4q + t] over the 4 lanes of a row. In each of two steps, a lane keeps
  // half of the sums and adds its partner's parts to them.
  static HSTU_DEVICE void add_lanes(const float (&z)[kCount], int t, float (&sums)[kCount / 4]) {
    const bool is_odd = t % 2 == 1;
    const bool is_upper = t >= 2;
    float u[kCount / 2];
#pragma unroll
    for (int n = 0; n < kCount / 2; ++n) {
      u[n] = (is_odd ? z[2 * n + 1] : z[2 * n]) +
             __shfl_xor_sync(kAllLanes, is_odd ? z[2 * n] : z[2 * n + 1], 1);
    }
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
      sums[n] = (is_upper ? u[2 * n + 1] : u[2 * n]) +
                __shfl_xor_sync(kAllLanes, is_upper ? u[2 * n] : u[2 * n + 1], 2);
    }
  }
};

}  // namespace hstu::sm80
