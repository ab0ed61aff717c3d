// The interface between the CPU runner, compiled once, and the kernels, compiled per instruction
// set.
#pragma once

#include <cstdint>

#include "../params.h"
#include "schedule.h"

namespace hstu::cpu {

// The workspace of a backward call.
struct BackwardBuffers {
  // For sequences of several key chunks, dQ is summed chunk by chunk in a fixed order. Row tile t
  // of sequence b and head n is number (first_row_tile[b] + t) * heads + n; first_row_tile[b] is -1
  // where one chunk holds all keys.
  const int64_t* first_row_tile = nullptr;  // [B]
  int* dq_semaphore = nullptr;              // [row tiles, heads]: how many chunks have added
  char* dq = nullptr;                       // [row tiles, heads] of dq_tile_bytes each
};

// Partial table gradients of one work tile.
struct TableGradients {
  double* position = nullptr;  // [2 * reach - 1], indexed j - i + reach - 1; or null
  int reach = 0;               // min(R, Lk) of the sequence
  double* time = nullptr;      // [num_buckets]; or null
};

struct Kernel {
  const char* name;

  // NOTE: a thread calls begin_thread before its work tiles and end_thread after them, for the tile
  // registers of AMX and for non-temporal stores.
  void (*begin_thread)();
  void (*end_thread)();

  int forward_chunk;
  int64_t (*forward_scratch_bytes)(const ForwardParams& params);
  void (*forward)(const ForwardParams& params, const WorkTile& work_tile, char* scratch);

  int backward_chunk;
  int64_t (*backward_scratch_bytes)(const BackwardParams& params, int heads_per_work_tile);
  int64_t (*dq_tile_bytes)(const BackwardParams& params);
  void (*backward)(const BackwardParams& params, const BackwardBuffers& buffers,
                   const TableGradients& tables, const WorkTile& work_tile, int heads_per_work_tile,
                   char* scratch);
};

constexpr int kTileRows = 64;
constexpr int kTileKeys = 64;

// The kernels of each instruction set; null where it has none for the dtype.
const Kernel* baseline_kernel(DType dtype);
const Kernel* avx2_kernel(DType dtype);
const Kernel* avx512_kernel(DType dtype);
const Kernel* avx512bf16_kernel(DType dtype);
const Kernel* amx_kernel(DType dtype);

}  // namespace hstu::cpu
