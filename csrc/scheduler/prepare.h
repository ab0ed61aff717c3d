// The kernel that runs before every attention kernel: it makes the work list and writes the zeros.
#pragma once

#include "../dispatch.h"
#include "work_list.h"

namespace hstu {

struct PrepareParams {
  BatchParams batch;
  MaskParams mask;
  WorkList list;         // and the summaries that go with it
  bool by_keys = false;  // items are tiles of keys, else of rows
  int tile_rows = 0;
  int tile_keys = 0;

  // The order of tiles: see set_chunks().
  static constexpr int kMaxChunks = 128;
  int num_chunks = 1;  // a power of two: the chunks, and what comes after them
  int chunk_shift = 62;
  int mantissa_bits = 5;  // of the costs that decide the order: fewer where there are many parts
  // The shorter tiles of the batch's last 1 / late come last of all, to fill the end evenly.
  int tail_divisor = 1;

  // Outputs that get zeros where no sequence has rows.
  int heads = 0;
  PackedTensor row_output;      // [total_q, H, head_dim]
  PackedTensor key_outputs[2];  // [total_k, H, head_dim]; null data: none

  // Of 16 bits; zeroed where no tile of rows meets a tile of keys; null data: not wanted.
  DenseBias bias_gradient;

  // For each tile of rows, the key tiles that take turns to add to its dQ; null: not wanted.
  TileSpans* dq_writers = nullptr;  // [row tiles], see first_tile()

  void* zeros = nullptr;  // workspace to be zeroed, aligned to 16 bytes
  int64_t zero_bytes = 0;

  // Chunks of `rows` of `total` key rows or less; of more where kMaxChunks would not do.
  void set_chunks(int64_t total, int64_t rows) {
    if (total <= rows) return;
    for (chunk_shift = 0; int64_t{2} << chunk_shift <= rows;) ++chunk_shift;
    while (total >> chunk_shift >= kMaxChunks - 1) ++chunk_shift;
    while (num_chunks < (total >> chunk_shift) + 2) num_chunks *= 2;
    while (mantissa_bits > 2 && num_chunks << mantissa_bits > 256) --mantissa_bits;
  }
};

void prepare_scheduler(const PrepareParams& params, const CudaLaunch& launch);

}  // namespace hstu
