// The kernel that runs before an attention kernel that needs it: it makes the work list, the mask
// summaries, the prepared tiles and the order of dQ additions, and zeroes workspace and the
// outputs' unowned rows.
#pragma once

#include "../dispatch.h"
#include "work_list.h"

namespace hstu {

struct PrepareParams {
  BatchParams batch;
  MaskParams mask;
  PagedParams paged;
  WorkList list;         // written, with list.summaries or list.prepared_tiles
  bool by_keys = false;  // the list holds tiles of keys (backward), not of rows
  int tile_rows = 0;
  int tile_keys = 0;

  // These four decide the order of the list: within a chunk, the tile with the longest processing
  // time comes first. See set_chunks().
  static constexpr int kMaxChunks = 128;
  int num_chunks = 1;  // a power of two; the last one is the tail, not a chunk
  int chunk_shift = 62;
  int mantissa_bits = 5;  // bits of a cost that decide the order; fewer with many chunks
  // The cheaper tiles of the last 1 / tail_divisor of the batch come last of all (the tail), so
  // that blocks finish at about the same time.
  int tail_divisor = 1;

  // The outputs. Output rows that belong to no sequence become zeros.
  int heads = 0;
  PackedTensor row_output;      // [total_q, H, head_dim]
  PackedTensor key_outputs[2];  // [total_k, H, head_dim]; null data: no such output

  // A 16-bit bias gradient, zeroed where no tile of rows and keys writes it; null data: not wanted.
  DenseBias bias_gradient;

  // For each tile of rows, the key tiles that add to its dQ, in ascending order; null: not wanted.
  TileSpans* dq_writers = nullptr;  // [row tiles], see first_tile()

  void* zeros = nullptr;  // workspace to zero, aligned to 16 bytes
  int64_t zero_bytes = 0;

  // Divides `total` key rows into chunks of at most `rows` rows (more if there would be more than
  // kMaxChunks), so that the K and V of a chunk stay in the L2 cache.
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
