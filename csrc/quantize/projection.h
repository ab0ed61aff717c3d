// Linear maps of e4m3 rows: a layer's projection to u, v, q and k, with SiLU of v, q and k
// quantized for FP8 attention, and its output map, which adds the residual.
#pragma once

#include "../params.h"

namespace hstu {

constexpr int kProjectionColumns = 256;        // of a work tile; u, v, q and k have multiples of it
constexpr int kMaxProjectionSequences = 1024;  // of a batch

struct ProjectionParams {
  // Codes and descales of the rows, and of the weight, whose rows are the columns of the product.
  const uint8_t* x8 = nullptr;            // [total, depth]
  const float* x_descale = nullptr;       // [total]
  const uint8_t* weight8 = nullptr;       // [columns, depth]
  const float* weight_descale = nullptr;  // [columns]
  const float* bias = nullptr;            // [columns]
  int depth = 0;                          // a multiple of 16
  int columns = 0;                        // a multiple of kProjectionColumns
  BatchParams batch;                      // of k; rows of no sequence have a z, but no codes

  uint16_t* z = nullptr;  // [total, z_columns] bf16: the first columns of the product
  int z_columns = 0;      // those of u, or all

  // The output map: the matrix that is added to the product, and no sequences.
  const uint16_t* residual = nullptr;  // [total, columns] bf16

  // The projection: see QuantizeParams; the mode is kBlock. As many columns as those of u are those
  // of v, of q and of k. u_columns = heads * head_dim is a multiple of kProjectionColumns.
  int u_columns = 0;
  int heads = 0;
  int head_dim = 0;  // of u, v, q and k: 64, 128 or 256
  uint8_t* q8 = nullptr;
  uint8_t* k8 = nullptr;
  uint8_t* v8 = nullptr;
  float* q_descale = nullptr;
  float* k_descale = nullptr;
  float* v_descale = nullptr;
  float* q_norm = nullptr;
  float* k_norm = nullptr;

  HSTU_HOST_DEVICE int column_tiles() const { return columns / kProjectionColumns; }
};

}  // namespace hstu
