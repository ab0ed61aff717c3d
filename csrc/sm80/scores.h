// A tile of scores in registers: which element is whose; bias, activation and mask.
#pragma once

#include "../common/mask.h"
#include "tensors.h"

namespace hstu::sm80 {

// A thread's part of a product as a matrix: ((2, 2), m, n) -> ((2, m), (2, n)).
template <typename Fragment>
HSTU_DEVICE auto as_matrix(Fragment&& fragment) {
  const auto layout = fragment.layout();
  const auto rows = make_layout(get<0, 1>(layout), get<1>(layout));
  const auto columns = make_layout(get<0, 0>(layout), get<2>(layout));
  return make_tensor(fragment.data(), make_layout(rows, columns));
}

// Where the elements of a thread's part of a kRows x kColumns tile stand. Row m of the part is
// first_row + row_offset(m) of the tile, and so for columns; in unrolled loops the offsets are
// constants.
template <int kRows, int kColumns, typename TiledMma>
struct ScoreTile {
  int first_row;
  int first_column;

  HSTU_DEVICE ScoreTile() {
    const auto first = coordinates(static_cast<int>(threadIdx.x))(_0{}, _0{});
    first_row = get<0>(first);
    first_column = get<1>(first);
  }

  static constexpr int kThreadRows =
      kRows / (decltype(size<1>(typename TiledMma::ThrLayoutVMNK{}))::value * 8);
  static constexpr int kThreadColumns =
      kColumns / (decltype(size<2>(typename TiledMma::ThrLayoutVMNK{}))::value * 4);

  static HSTU_DEVICE int row_offset(int m) { return get<0>(coordinates(_0{})(m, _0{})); }
  static HSTU_DEVICE int column_offset(int n) { return get<1>(coordinates(_0{})(_0{}, n)); }

  // (row, column) of each element of a thread's part.
  template <typename Thread>
  static HSTU_DEVICE auto coordinates(Thread thread) {
    const auto tile = make_identity_tensor(Shape<Int<kRows>, Int<kColumns>>{});
    return as_matrix(TiledMma{}.get_thread_slice(thread).partition_C(tile));
  }

  // Calls hide(m, n) for the elements that the mask hides, of a tile that begins with row r0 and
  // key k0.
  template <typename Hide>
  HSTU_DEVICE void for_each_hidden(const Mask& mask, int q_len, int r0, int k0, Hide hide) const {
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
      const int row = r0 + first_row + row_offset(m);
#pragma unroll
      for (int word = 0; word < (kColumns + 63) / 64; ++word) {
        const uint64_t bits =
            row < q_len ? mask.row_bits(row, k0 + 64 * word) >> first_column : 0;
#pragma unroll
        for (int n = 0; n < kThreadColumns; ++n) {
          const int column = column_offset(n);
          if (column / 64 == word && !(bits >> column % 64 & 1)) hide(m, n);
        }
      }
    }
  }

  // Calls visit(m, n, i, j) for the elements that exist: absolute position i, key j.
  template <typename Visit>
  HSTU_DEVICE void for_each_existing(const Sequence& sequence, int length, int r0, int k0,
                                     Visit visit) const {
    const int columns = (sequence.k_len < length ? sequence.k_len : length) - k0 - first_column;
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
      const int row = r0 + first_row + row_offset(m);
      const int i = row + sequence.offset;
      const bool exists = row < sequence.q_len && i >= 0 && i < length;
#pragma unroll
      for (int n = 0; n < kThreadColumns; ++n) {
        if (exists && column_offset(n) < columns) {
          visit(m, n, i, k0 + first_column + column_offset(n));
        }
      }
    }
  }
};

// The dense bias of one sequence and head.
struct BiasView {
  const void* data;
  bool is_fp32;
  int length;
  int64_t row_stride;

  HSTU_DEVICE BiasView(const DenseBias& bias, int b, int head, int heads)
      : is_fp32(bias.dtype == DType::kFloat32),
        length(bias.length),
        row_stride(bias.row_stride) {
    const int64_t offset = b * bias.batch_stride + head / (heads / bias.heads) * bias.head_stride;
    data = static_cast<const char*>(bias.data) + offset * (is_fp32 ? 4 : 2);
  }

  // Scores begin with the bias.
  template <typename Element, typename Tile, typename Sum>
  HSTU_DEVICE void load(const Tile& tile, const Sequence& sequence, int r0, int k0,
                        Sum& scores) const {
    clear(scores);
    auto matrix = as_matrix(scores);
    if (is_fp32) {
      tile.for_each_existing(sequence, length, r0, k0, [&](int m, int n, int i, int j) {
        matrix(m, n) = static_cast<const float*>(data)[i * row_stride + j];
      });
    } else {
      tile.for_each_existing(sequence, length, r0, k0, [&](int m, int n, int i, int j) {
        matrix(m, n) = static_cast<float>(static_cast<const Element*>(data)[i * row_stride + j]);
      });
    }
  }
};

HSTU_DEVICE float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace hstu::sm80
