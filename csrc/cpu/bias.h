// The bias of a tile of scores, dense or from the relative-bias tables, and its gradient.
//
// Tiles are addressed as tile[row * row_stride + key * key_stride], so that the forward (scores by
// row) and the backward (scores by key) share the code.
#pragma once

#include "../common/sequence.h"
#include "element.h"
#include "kernel.h"

namespace hstu::cpu::HSTU_CPU_ISA {

struct TileShape {
  int r0, rows;  // query rows [r0, r0 + rows)
  int k0, keys;
  int64_t row_stride, key_stride;
};

// Calls `function(row, key, index in the position table)` for each score of the tile. `reach` is R,
// or the sequence's length if that is less.
template <typename Function>
HSTU_INLINE void for_each_distance(const Sequence& sequence, const TileShape& shape, int reach,
                                   Function function) {
  for (int row = 0; row < shape.rows; ++row) {
    const int i = shape.r0 + row + sequence.offset;
    for (int key = 0; key < shape.keys; ++key) {
      const int64_t distance = clamp(shape.k0 + key - i, 1 - reach, reach - 1);
      function(row, key, static_cast<int>(distance) + reach - 1);
    }
  }
}

// Calls `function(row, key, index in the time table)` for each score of the tile.
template <typename Function>
HSTU_INLINE void for_each_bucket(const RelativeBias& bias, const Sequence& sequence,
                                 const TileShape& shape, Function function) {
  const int64_t* timestamps = bias.timestamps + sequence.k_begin;
  const int last_bucket = bias.time.size - 1;
  for (int row = 0; row < shape.rows; ++row) {
    const int r = shape.r0 + row;
    const int next = static_cast<int>(clamp(r + sequence.offset + 1, 0, sequence.k_len - 1));
    const int64_t row_time =
        bias.row_timestamps ? bias.row_timestamps[sequence.q_begin + r] : timestamps[next];
    // Times are usually sorted, so the search for a bucket begins at the last one that was found.
    int bucket = 0;
    for (int key = 0; key < shape.keys; ++key) {
      const int64_t key_time = timestamps[shape.k0 + key];
      const uint64_t difference =
          row_time > key_time ? static_cast<uint64_t>(row_time) - static_cast<uint64_t>(key_time)
                              : static_cast<uint64_t>(key_time) - static_cast<uint64_t>(row_time);
      const auto reached = [&](int n) {
        return static_cast<uint64_t>(bias.thresholds[n]) <= difference;
      };
      while (bucket > 0 && !reached(bucket - 1)) --bucket;
      while (bucket < bias.num_thresholds && reached(bucket)) ++bucket;
      function(row, key, bucket < last_bucket ? bucket : last_bucket);
    }
  }
}

template <typename Function>
HSTU_INLINE void with_element_type(DType dtype, Function function) {
  switch (dtype) {
    case DType::kFloat32:
      return function(float{});
    case DType::kBFloat16:
      return function(BFloat16{});
    case DType::kFloat16:
      return function(Float16{});
    case DType::kFloat64:
      return function(double{});
    case DType::kFloat8E4M3:
      break;
  }
}

template <typename Accum>
void add_dense_bias(const DenseBias& bias, const Sequence& sequence, int b, int bias_head,
                    const TileShape& shape, Accum* tile) {
  with_element_type(bias.dtype, [&](auto element) {
    using T = decltype(element);
    const T* data =
        static_cast<const T*>(bias.data) + b * bias.batch_stride + bias_head * bias.head_stride;
    for (int row = 0; row < shape.rows; ++row) {
      const T* bias_row = data + (shape.r0 + row + sequence.offset) * bias.row_stride + shape.k0;
      for (int key = 0; key < shape.keys; ++key) {
        tile[row * shape.row_stride + key * shape.key_stride] += to_float(bias_row[key]);
      }
    }
  });
}

// Adds the bias of head `head` to a tile of scores.
template <typename Accum>
void add_bias(const ForwardParams& params, const Sequence& sequence, int b, int head,
              const TileShape& shape, Accum* tile) {
  if (params.rab.data) {
    const int bias_head = head / (params.heads / params.rab.heads);
    add_dense_bias(params.rab, sequence, b, bias_head, shape, tile);
  }
  const RelativeBias& bias = params.relative_bias;
  const auto add_table = [&](const BiasTable& table, auto for_each) {
    with_element_type(table.dtype, [&](auto element) {
      using T = decltype(element);
      const int table_head = head / (params.heads / table.heads);
      const T* weights = static_cast<const T*>(table.data) + table_head * table.head_stride;
      for_each([&](int row, int key, int index) {
        tile[row * shape.row_stride + key * shape.key_stride] += to_float(weights[index]);
      });
    });
  };
  if (bias.position.data) {
    const int reach = (bias.position.size + 1) / 2;
    add_table(bias.position, [&](auto add) { for_each_distance(sequence, shape, reach, add); });
  }
  if (bias.time.data) {
    add_table(bias.time, [&](auto add) { for_each_bucket(bias, sequence, shape, add); });
  }
}

// Stores factor * tile as the gradient of the dense bias.
template <typename Accum>
void store_dense_gradient(const DenseBias& gradient, const Sequence& sequence, int b, int bias_head,
                          const TileShape& shape, const Accum* tile, Accum factor) {
  with_element_type(gradient.dtype, [&](auto element) {
    using T = decltype(element);
    T* data = static_cast<T*>(gradient.data) + b * gradient.batch_stride +
              bias_head * gradient.head_stride;
    for (int row = 0; row < shape.rows; ++row) {
      T* out = data + (shape.r0 + row + sequence.offset) * gradient.row_stride + shape.k0;
      for (int key = 0; key < shape.keys; ++key) {
        out[key] = from_float<T>(factor * tile[row * shape.row_stride + key * shape.key_stride]);
      }
    }
  });
}

// Adds factor * tile to the partial gradients of the tables.
template <typename Accum>
void add_table_gradients(const TableGradients& gradients, const RelativeBias& bias,
                         const Sequence& sequence, const TileShape& shape, const Accum* tile,
                         Accum factor) {
  const auto value = [&](int row, int key) {
    return static_cast<double>(factor * tile[row * shape.row_stride + key * shape.key_stride]);
  };
  if (gradients.position) {
    for_each_distance(sequence, shape, gradients.reach, [&](int row, int key, int index) {
      gradients.position[index] += value(row, key);
    });
  }
  if (gradients.time) {
    for_each_bucket(bias, sequence, shape, [&](int row, int key, int bucket) {
      gradients.time[bucket] += value(row, key);
    });
  }
}

}  // namespace hstu::cpu::HSTU_CPU_ISA
