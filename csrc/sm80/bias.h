// Tiles of the dense bias and of its gradient, between device memory and the registers of the
// scores.
#pragma once

#include "scores.h"

namespace hstu::sm80 {

// Reads kCount words, 4 or 2 at a time, if `condition` is true. The loads are predicated, so that
// several of them are in flight: there is no branch between them.
template <int kCount>
HSTU_DEVICE void load_if(bool condition, const void* from, uint32_t* words) {
  static_assert(kCount == 2 || kCount % 4 == 0, "words are read by 8 or 16 bytes");
  const auto* source = static_cast<const uint32_t*>(from);
  if constexpr (kCount == 2) ptx::ld_if(condition, source, words[0], words[1]);
#pragma unroll
  for (int n = 0; n + 4 <= kCount; n += 4) {
    ptx::ld_if(condition, source + n, words[n], words[n + 1], words[n + 2], words[n + 3]);
  }
}

// Writes kBytes bytes, 8 or 16 at a time.
template <int kBytes>
HSTU_DEVICE void store_pieces(const void* from, void* to) {
  using Piece = std::conditional_t<kBytes == 8, uint2, uint4>;
#pragma unroll
  for (int n = 0; n < kBytes / static_cast<int>(sizeof(Piece)); ++n) {
    static_cast<Piece*>(to)[n] = static_cast<const Piece*>(from)[n];
  }
}

// The bias, or its gradient, of one sequence and head.
// NOTE: kernels keep it in shared memory, to leave the registers to the accumulators.
struct BiasMatrix {
  char* data;  // null: there is none
  int64_t row_stride;
  int length;
  bool is_fp32;     // false: the dtype of q
  bool is_aligned;  // rows can be read and written 16 bytes at a time

  HSTU_DEVICE BiasMatrix(const DenseBias& bias, int b, int head, int heads)
      : data(nullptr),
        row_stride(bias.row_stride),
        length(bias.length),
        is_fp32(bias.dtype == DType::kFloat32),
        is_aligned(false) {
    if (!bias.data) return;
    const int size = is_fp32 ? 4 : 2;
    const int64_t first = b * bias.batch_stride + head / (heads / bias.heads) * bias.head_stride;
    data = static_cast<char*>(bias.data) + first * size;
    is_aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_stride * size % 16 == 0;
  }

  template <typename T>
  HSTU_DEVICE T* at(int i, int j) const {
    return reinterpret_cast<T*>(data) + i * row_stride + j;
  }
};

// A thread's fragment of a tile of the bias, prefetched to initialize the scores.
template <typename Element, typename Tile>
class BiasTile {
 public:
  HSTU_DEVICE BiasTile(const BiasMatrix& bias, const Sequence& sequence)
      : bias_(bias), sequence_(sequence) {}

  // Prefetches the tile that begins with row r0 and key k0 into the L2 cache. Called by all threads
  // of the block.
  HSTU_DEVICE void prefetch(int r0, int k0) const {
    bias_.is_fp32 ? prefetch_as<float>(r0, k0) : prefetch_as<Element>(r0, k0);
  }

  // Starts to read the tile into registers, with zeros past the end of the bias.
  HSTU_DEVICE void fetch(int r0, int k0) {
    bias_.is_fp32 ? fetch_as<float>(r0, k0) : fetch_as<Element>(r0, k0);
  }

  // scores = bias
  template <typename Sum>
  HSTU_DEVICE void copy_to(Sum& scores) const {
    bias_.is_fp32 ? copy_as<float>(scores) : copy_as<Element>(scores);
  }

 private:
  static constexpr int kRun = Tile::kRun;

  template <typename T>
  HSTU_DEVICE void prefetch_as(int r0, int k0) const {
    constexpr int kLine = 128 / sizeof(T);
    constexpr int kLines = ceil_div(Tile::kTileKeys, kLine);  // cache lines of a row
    const int thread = bounded_thread_idx();
    const int rows = min(r0 + Tile::kTileRows, sequence_.q_len);
    const int keys = min(sequence_.k_len, bias_.length);
    const int j = k0 + thread % kLines * kLine;
#pragma unroll
    for (int n = 0; n < Tile::kTileRows * kLines; n += Tile::kBlockThreads) {
      const int row = r0 + (n + thread) / kLines;
      const int i = row + sequence_.offset;
      if (row < rows && i >= 0 && i < bias_.length && j < keys) {
        ptx::prefetch_l2(bias_.at<T>(i, j));
      }
    }
  }

  // Reads whole runs of aligned rows by vector loads first, then the other elements one by one.
  template <typename T>
  HSTU_DEVICE void fetch_as(int r0, int k0) {
    constexpr int kWords = kRun * sizeof(T) / 4;  // words of a run
    const Tile tile;
#pragma unroll
    for (int m = 0; m < Tile::kThreadRows; ++m) {
#pragma unroll
      for (int n = 0; n < Tile::kThreadColumns; ++n) words_[m][n] = 0;
    }
    tile.for_each_run(sequence_, bias_.length, r0, k0, [&](int m, int n, int i, int j, int count) {
      load_if<kWords>(bias_.is_aligned && count == kRun, bias_.at<T>(i, j),
                      &words_[m][n / kRun * kWords]);
    });
    const bool is_whole = k0 + Tile::kTileKeys <= min(sequence_.k_len, bias_.length);
    if (bias_.is_aligned && is_whole) return;
    tile.for_each_run(sequence_, bias_.length, r0, k0, [&](int m, int n, int i, int j, int count) {
      if (bias_.is_aligned && count == kRun) return;
#pragma unroll
      for (int c = 0; c < kRun; ++c) {
        if (c < count) set(m, n + c, bias_.at<const T>(i, j)[c]);
      }
    });
  }

  template <typename T, typename Sum>
  HSTU_DEVICE void copy_as(Sum& scores) const {
#pragma unroll
    for (int m = 0; m < Tile::kThreadRows; ++m) {
#pragma unroll
      for (int n = 0; n < Tile::kThreadColumns; ++n) {
        scores.at(m, n) = get<T>(m, n);
      }
    }
  }

  template <typename T>
  HSTU_DEVICE float get(int m, int n) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words_[m][n]);
    } else {
      return static_cast<float>(T::bitcast(static_cast<uint16_t>(words_[m][n / 2] >> n % 2 * 16)));
    }
  }

  // Sets an element that was 0.
  HSTU_DEVICE void set(int m, int n, float value) { words_[m][n] = __float_as_uint(value); }
  HSTU_DEVICE void set(int m, int n, Element value) {
    words_[m][n / 2] |= static_cast<uint32_t>(value.raw()) << n % 2 * 16;
  }

  const BiasMatrix& bias_;
  const Sequence& sequence_;
  // words_[m] holds the values of row m, one fp32 value or two 16-bit values in a word.
  uint32_t words_[Tile::kThreadRows][Tile::kThreadColumns];
};

// Stores factor * part in a tile of the gradient of dtype T, or, unless `first`, adds it to the
// tile.
template <typename T, typename Tile, typename Sum>
HSTU_DEVICE void add_to_bias_as(const BiasMatrix& bias, const Tile& tile, const Sequence& sequence,
                                int r0, int k0, const Sum& part, float factor, bool first) {
  tile.for_each_run(sequence, bias.length, r0, k0, [&](int m, int n, int i, int j, int count) {
    if (count <= 0) return;
    constexpr int kRun = Tile::kRun;
    T* to = bias.at<T>(i, j);
    alignas(16) T run[kRun];
#pragma unroll
    for (int c = 0; c < kRun; ++c) {
      const float before = first || c >= count ? 0.0f : static_cast<float>(to[c]);
      run[c] = static_cast<T>(before + factor * part.at(m, n + c));
    }
    if (bias.is_aligned && count == kRun) {
      store_pieces<sizeof(run)>(run, to);
    } else {
#pragma unroll
      for (int c = 0; c < kRun; ++c) {
        if (c < count) to[c] = run[c];
      }
    }
  });
}

template <typename Element, typename Tile, typename Sum>
HSTU_DEVICE void add_to_bias(const BiasMatrix& bias, const Tile& tile, const Sequence& sequence,
                             int r0, int k0, const Sum& part, float factor, bool first) {
  if (bias.is_fp32) {
    add_to_bias_as<float>(bias, tile, sequence, r0, k0, part, factor, first);
  } else {
    add_to_bias_as<Element>(bias, tile, sequence, r0, k0, part, factor, first);
  }
}

}  // namespace hstu::sm80
