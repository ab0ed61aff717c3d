// A tile of scores in registers: which element is whose; bias, activation and mask.
#pragma once

#include "../common/work_list.h"
#include "tensors.h"

namespace hstu::sm80 {

// Where the elements of a thread's part of a tile of scores stand, whose keys are in Order. Row m
// of the part is first_row + row_offset(m) of the tile, column n key first_key + key_offset(n); in
// unrolled loops the offsets are constants. Neighbouring columns, Order::kRun of them, are
// neighbouring keys.
template <int kRows, int kKeys, typename TiledMma, typename Order>
struct ScoreTile {
  static constexpr int kThreadRows =
      kRows / (decltype(size<1>(typename TiledMma::ThrLayoutVMNK{}))::value * 8);
  static constexpr int kThreadColumns =
      kKeys / (decltype(size<2>(typename TiledMma::ThrLayoutVMNK{}))::value * 4);

  static constexpr int kBlockThreads = decltype(size(TiledMma{}))::value;
  static constexpr int kTileRows = kRows;
  static constexpr int kTileKeys = kKeys;
  static constexpr int kRun = Order::kRun;

  int first_row;
  int first_key;

  HSTU_DEVICE ScoreTile() {
    const auto first = coordinates(thread_index())(_0{}, _0{});
    first_row = get<0>(first);
    first_key = Order::key(get<1>(first));
  }

  static HSTU_DEVICE int row_offset(int m) { return get<0>(coordinates(_0{})(m, _0{})); }
  static HSTU_DEVICE int key_offset(int n) {
    return Order::key(get<1>(coordinates(_0{})(_0{}, n)));
  }

  // (row, slot) of each element of a thread's part.
  template <typename Thread>
  static HSTU_DEVICE auto coordinates(Thread thread) {
    const auto tile = make_identity_tensor(Shape<Int<kRows>, Int<kKeys>>{});
    return as_matrix(TiledMma{}.get_thread_slice(thread).partition_C(tile));
  }

  // Calls hide(m, n) for the elements that the mask hides, of a tile that begins with row r0 and
  // key k0. A lane finds the bits of one of its warp's rows, for the four lanes that share the row.
  template <typename Hide>
  HSTU_DEVICE void for_each_hidden(const Mask& mask, int q_len, int r0, int k0, Hide hide) const {
    static_assert(kThreadRows == 2 || kThreadRows == 4, "a warp has 16 or 32 rows");
    const int lane = thread_index() % 32;
    const int second_half = kThreadRows > 2 && lane >= 16 ? row_offset(2) : 0;
    const int row = r0 + first_row - lane / 4 + lane % 16 + second_half;
    const int quad_key = lane % 4 * kRun;  // after the warp's first key
#pragma unroll
    for (int word = 0; word <= key_offset(kThreadColumns - 1) / 64; ++word) {
      const int first = k0 + first_key - quad_key + 64 * word;
      const uint64_t bits = row < q_len ? mask.row_bits(row, first) : 0;
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m) {
        const int owner = m / 2 * 16 + m % 2 * 8 + lane / 4;
        const uint64_t visible = __shfl_sync(0xffffffff, bits, owner) >> quad_key;
#pragma unroll
        for (int n = 0; n < kThreadColumns; ++n) {
          const int key = key_offset(n);
          if (key / 64 == word && !(visible >> key % 64 & 1)) hide(m, n);
        }
      }
    }
  }

  // Calls visit(m, n, i, j, count) for each run of a thread's elements in a bias matrix of `length`
  // rows and columns: from (m, n) on, at position i, keys j .. j + count - 1. count is the whole
  // run, Order::kRun, but at the end of the sequence or the matrix, and 0 or less outside.
  template <typename Visit>
  HSTU_DEVICE void for_each_run(const Sequence& sequence, int length, int r0, int k0,
                                Visit visit) const {
    const int keys = min(sequence.k_len, length) - k0 - first_key;
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
      const int row = r0 + first_row + row_offset(m);
      const int i = row + sequence.offset;
      const bool exists = row < sequence.q_len && i >= 0 && i < length;
      const int keys_of_row = exists ? keys : 0;
#pragma unroll
      for (int n = 0; n < kThreadColumns; n += Order::kRun) {
        const int count = min(keys_of_row - key_offset(n), Order::kRun);
        visit(m, n, i, k0 + first_key + key_offset(n), count);
      }
    }
  }
};

}  // namespace hstu::sm80
