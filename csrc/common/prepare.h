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

  // Outputs that get zeros where no sequence has rows.
  int heads = 0;
  PackedTensor row_output;      // [total_q, H, head_dim]
  PackedTensor key_outputs[2];  // [total_k, H, head_dim]; null data: none

  // For each tile of rows, the key tiles that take turns to add to its dQ; null: not wanted.
  TileSpans* turns = nullptr;  // [row tiles], see first_tile()

  void* zeros = nullptr;  // workspace to be zeroed, aligned to 16 bytes
  int64_t zero_bytes = 0;
};

void prepare(const PrepareParams& params, const CudaLaunch& launch);

}  // namespace hstu
