// A tile of scores in registers: the row and key of each element, and loops over the elements that
// the mask hides or that a bias has.
#pragma once

#include "../scheduler/work_list.h"
#include "products.h"

namespace hstu::sm80 {

// The rows and keys of a thread's fragment of a tile of scores, whose keys are in Order. Row m of
// the fragment is row first_row + row_offset(m) of the tile, and column n is key first_key +
// key_offset(n). In unrolled loops the offsets are constants. Each Order::kRun neighboring columns
// are neighboring keys.
template <int kRows, int kKeys, typename Mma, typename Order>
struct ScoreTile {
  using Sum = typename Mma::template Sum<kRows, kKeys>;
  static constexpr int kThreadRows = Sum::kRows;
  static constexpr int kThreadColumns = Sum::kColumns;

  static constexpr int kBlockThreads = Mma::kThreads;
  static constexpr int kTileRows = kRows;
  static constexpr int kTileKeys = kKeys;
  static constexpr int kRun = Order::kRun;

  int first_row;
  int first_key;

  HSTU_DEVICE ScoreTile() {
    const int thread = bounded_thread_idx();
    first_row = Mma::first_row(thread) + thread % 32 / 4;
    first_key = Order::key(Mma::first_column(thread) + thread % 4 * 2);
  }

  static HSTU_DEVICE int row_offset(int m) { return Mma::row_offset(m / 2) + m % 2 * 8; }
  static HSTU_DEVICE int key_offset(int n) { return Order::key(Mma::column_offset(n / 2) + n % 2); }

  // Returns which keys a row sees in the tile that begins with row r0 and key k0: bit n is set if
  // it sees key 64 * word + n of the warp's keys. Each lane has one of the warp's rows.
  HSTU_DEVICE uint64_t visible_keys(const Mask& mask, int q_len, int r0, int k0, int word) const {
    static_assert(kThreadRows == 2 || kThreadRows == 4, "a warp has 16 or 32 rows");
    // NOTE: with bounded_thread_idx(), the backward for head dim 128 would spill.
    const int lane = opaque_thread_idx() % 32;
    const int second_half = kThreadRows > 2 && lane >= 16 ? row_offset(2) : 0;
    const int row = r0 + first_row - lane / 4 + lane % 16 + second_half;
    const int first = k0 + first_key - lane % 4 * kRun + 64 * word;
    return row < q_len ? mask.row_bits(row, first) : 0;
  }

  // Calls hide(m, n) for the elements that the mask hides. visible(word) returns visible_keys() of
  // the lane; the four lanes that have a row get its bits by a shuffle. A tile of at most 64 keys
  // has word 0 alone.
  template <typename Visible, typename Hide>
  HSTU_DEVICE void for_each_hidden(Visible visible, Hide hide) const {
    const int lane = opaque_thread_idx() % 32;
    const int quad_key = lane % 4 * kRun;  // relative to the warp's first key
#pragma unroll
    for (int word = 0; word <= key_offset(kThreadColumns - 1) / 64; ++word) {
      const uint64_t bits = visible(word);
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m) {
        const int owner = m / 2 * 16 + m % 2 * 8 + lane / 4;
        const uint64_t of_row = __shfl_sync(0xffffffff, bits, owner) >> quad_key;
#pragma unroll
        for (int n = 0; n < kThreadColumns; ++n) {
          const int key = key_offset(n);
          if (key / 64 == word && !(of_row >> key % 64 & 1)) hide(m, n);
        }
      }
    }
  }

  // Calls visit(m, n, i, j, count) for each run of a thread's elements in a bias matrix of `length`
  // rows and columns: the run begins with element (m, n) and has position i and keys [j, j +
  // count). `count` is Order::kRun inside, fewer at the end of the sequence or the matrix, and 0 or
  // less outside.
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
