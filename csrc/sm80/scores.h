// A tile of scores in registers: which element is whose; bias, activation and mask.
#pragma once

#include "../common/work_list.h"
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
  // key k0.
  template <typename Hide>
  HSTU_DEVICE void for_each_hidden(const Mask& mask, int q_len, int r0, int k0, Hide hide) const {
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
      const int row = r0 + first_row + row_offset(m);
#pragma unroll
      for (int word = 0; word < (kKeys + 63) / 64; ++word) {
        const uint64_t bits = row < q_len ? mask.row_bits(row, k0 + first_key + 64 * word) : 0;
#pragma unroll
        for (int n = 0; n < kThreadColumns; ++n) {
          const int key = key_offset(n);
          if (key / 64 == word && !(bits >> key % 64 & 1)) hide(m, n);
        }
      }
    }
  }

  // Calls visit(m, n, i, j, count) for each run of a thread's elements in a bias matrix of `length`
  // rows and columns: from (m, n) on, at position i, keys j .. j + count - 1. count is the whole
  // run, Order::kRun, but at the end of the sequence or the matrix.
  template <typename Visit>
  HSTU_DEVICE void for_each_run(const Sequence& sequence, int length, int r0, int k0,
                                Visit visit) const {
    const int keys = min(sequence.k_len, length) - k0 - first_key;
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
      const int row = r0 + first_row + row_offset(m);
      const int i = row + sequence.offset;
      const bool exists = row < sequence.q_len && i >= 0 && i < length;
#pragma unroll
      for (int n = 0; n < kThreadColumns; n += Order::kRun) {
        const int count = min(keys - key_offset(n), Order::kRun);
        if (exists && count > 0) visit(m, n, i, k0 + first_key + key_offset(n), count);
      }
    }
  }
};

// The dense bias, or its gradient, of one sequence and head: elements of type T.
template <typename T>
struct BiasView {
  T* data;
  int length;
  int64_t row_stride;
  bool aligned;  // rows can be read and written by 16 bytes

  HSTU_DEVICE BiasView(const DenseBias& bias, int b, int head, int heads)
      : length(bias.length), row_stride(bias.row_stride) {
    data = static_cast<T*>(bias.data) + b * bias.batch_stride +
           head / (heads / bias.heads) * bias.head_stride;
    constexpr int kVector = 16 / sizeof(T);
    aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_stride % kVector == 0;
  }

  template <typename Tile, typename Sum>
  HSTU_DEVICE void load(const Tile& tile, const Sequence& sequence, int r0, int k0,
                        Sum& scores) const {
    auto matrix = as_matrix(scores);
    tile.for_each_run(sequence, length, r0, k0, [&](int m, int n, int i, int j, int count) {
      constexpr int kRun = Tile::kRun;
      const T* from = data + i * row_stride + j;
      alignas(16) std::remove_const_t<T> run[kRun];
      if (aligned && count == kRun) {
        copy_vectors<kRun>(from, run);
      } else {
#pragma unroll
        for (int c = 0; c < kRun; ++c) run[c] = c < count ? from[c] : T(0.0f);
      }
#pragma unroll
      for (int c = 0; c < kRun; ++c) matrix(m, n + c) = static_cast<float>(run[c]);
    });
  }

  // Writes factor * part, added to what is there unless this is the `first` part.
  template <typename Tile, typename Sum>
  HSTU_DEVICE void add(const Tile& tile, const Sequence& sequence, int r0, int k0, const Sum& part,
                       float factor, bool first) const {
    const auto matrix = as_matrix(part);
    tile.for_each_run(sequence, length, r0, k0, [&](int m, int n, int i, int j, int count) {
      constexpr int kRun = Tile::kRun;
      T* to = data + i * row_stride + j;
      alignas(16) T run[kRun];
#pragma unroll
      for (int c = 0; c < kRun; ++c) {
        const float before = first || c >= count ? 0.0f : static_cast<float>(to[c]);
        run[c] = static_cast<T>(before + factor * matrix(m, n + c));
      }
      if (aligned && count == kRun) {
        copy_vectors<kRun>(run, to);
      } else {
#pragma unroll
        for (int c = 0; c < kRun; ++c) {
          if (c < count) to[c] = run[c];
        }
      }
    });
  }

 private:
  // By pieces of up to 16 bytes.
  template <int kCount>
  static HSTU_DEVICE void copy_vectors(const T* from, std::remove_const_t<T>* to) {
    using Piece = cute::uint_bit_t<kCount * sizeof(T) * 8 < 128 ? kCount * sizeof(T) * 8 : 128>;
#pragma unroll
    for (int n = 0; n < kCount * sizeof(T) / sizeof(Piece); ++n) {
      reinterpret_cast<Piece*>(to)[n] = reinterpret_cast<const Piece*>(from)[n];
    }
  }
};

// Scores begin with the bias: `scores` comes cleared.
template <typename Element, typename Tile, typename Sum>
HSTU_DEVICE void load_bias(const ForwardParams& params, const WorkTile& work, int head, int r0,
                           int k0, Sum& scores, const Tile& tile) {
  const DenseBias& rab = params.rab;
  if (rab.dtype == DType::kFloat32) {
    BiasView<const float>(rab, work.sequence_number, head, params.heads)
        .load(tile, work.sequence, r0, k0, scores);
  } else {
    BiasView<const Element>(rab, work.sequence_number, head, params.heads)
        .load(tile, work.sequence, r0, k0, scores);
  }
}

HSTU_DEVICE float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace hstu::sm80
