// The interface between the CPU runner, compiled once, and the kernels, compiled per instruction
// set.
#pragma once

#include <cstdint>

#include "../params.h"
#include "schedule.h"

namespace hstu::cpu {

// What the work items of one backward call share.
struct BackwardShared {
  // For sequences of several key chunks, dQ is summed chunk by chunk in a fixed order. Row tile t
  // of sequence b and head n is number (first_row_tile[b] + t) * heads + n; first_row_tile[b] is -1
  // where one chunk holds all keys.
  const int64_t* first_row_tile = nullptr;  // [B]
  int* turn = nullptr;                      // [row tiles, heads] chunks that have added their dQ
  char* dq_sum = nullptr;                   // [row tiles, heads] of dq_tile_bytes each
};

// Partial table gradients of one work item.
struct TableGradients {
  double* position = nullptr;  // [2 * reach - 1], indexed j - i + reach - 1; or null
  int reach = 0;               // min(R, Lk) of the sequence
  double* time = nullptr;      // [num_buckets]; or null
};

struct Kernel {
  const char* name;

  // NOTE: begin_thread and end_thread enclose the items that one thread works on (tile registers).
  void (*begin_thread)();
  void (*end_thread)();

  int forward_chunk;
  int64_t (*forward_scratch_bytes)(const ForwardParams& params);
  void (*forward)(const ForwardParams& params, const WorkItem& item, char* scratch);

  int backward_chunk;
  int64_t (*backward_scratch_bytes)(const BackwardParams& params, int heads_per_item);
  int64_t (*dq_tile_bytes)(const BackwardParams& params);
  void (*backward)(const BackwardParams& params, const BackwardShared& shared,
                   const TableGradients& tables, const WorkItem& item, int heads_per_item,
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
