// Quantizes Q, K and V to e4m3 for the attention kernels of sm90, with descales: x ~ x8 * descale.
#pragma once

#include "../params.h"

namespace hstu {

// The last dimension of q8 and k8 is a multiple of this, so that TMA can read rows. The elements
// beyond the head dim are zero.
constexpr int kQuantizedHeadDimUnit = 16;

// Granularity of the descales: what one descale serves.
enum class QuantMode : int {
  kCast,      // no scaling: every descale is 1
  kRow,       // a row of a head of Q; 128 keys of a head of K and V
  kBlock,     // 128 rows of a head
  kHead,      // a sequence of a head
  kSequence,  // a sequence
  kTensor,
};

// Descales of e4m3 inputs. The descale of a row is data[index * stride + head * head_stride], where
// `index` is the number of the row's sequence, of its block or of the row itself, or 0, as `per`
// says.
struct GivenDescale {
  enum class Per : int { kTensor, kSequence, kBlock, kRow };

  const float* data = nullptr;
  Per per = Per::kTensor;
  int64_t stride = 0;
  int64_t head_stride = 0;
};

struct QuantizeParams {
  PackedTensor q;  // [total_q, H, D]
  PackedTensor k;  // [total_k, H, D]
  PackedTensor v;  // [total_k, H, Dv]
  int heads = 0;
  DType dtype = DType::kBFloat16;  // of q, k and v: 16 bits, or e4m3, whose codes are kept
  BatchParams batch;               // max_seqlen_q and max_seqlen_k are not used
  QuantMode mode = QuantMode::kBlock;
  bool smooth_k = false;  // subtract K's mean over each sequence and head
  bool silu_q = false;    // quantize SiLU of q, rounded to its dtype
  bool silu_kv = false;   // the same for k and v

  // Descales of e4m3 inputs.
  GivenDescale given_q, given_k, given_v;

  // Outputs, contiguous, as Fp8Params has them. `blocks` is max_blocks(); blocks and rows that
  // belong to no sequence are not written.
  uint8_t* q8 = nullptr;            // [total_q, H, D rounded up], or null: not wanted
  uint8_t* k8 = nullptr;            // [total_k, H, D rounded up], or null: not wanted
  uint8_t* v8 = nullptr;            // [blocks, H, Dv, 128], keys in the order of key_at()
  float* q_descale = nullptr;       // [H, total_q]
  float* k_descale = nullptr;       // [H, blocks]
  float* v_descale = nullptr;       // [H, blocks]
  float* q_norm = nullptr;          // [H, total_q]: an upper bound of the norm of the row of q8
  float* k_norm = nullptr;          // [H, blocks]: an upper bound of the norms of the rows of k8
  float* q_mean_product = nullptr;  // [H, total_q] with smooth_k: the row of q times K's mean
  float* k_mean = nullptr;          // [B, H, D] with smooth_k, or null: not wanted
  void* workspace = nullptr;        // quantize_workspace_bytes(), aligned to 16 bytes

  // For the backward in e4m3: also writes q and k transposed, and neither v nor norms. The mode is
  // kHead.
  bool for_backward = false;
  uint8_t* q_columns = nullptr;  // [blocks of total_q, H, D, 128], in the order of v8, or null
  uint8_t* k_columns = nullptr;  // [blocks, H, D, 128], or null
  // Powers of two, [H, total_q]: the least by which the descale of a row of q can be multiplied
  // without overflow. The codes in q8 are those of the row divided by it, and those in q_columns
  // are not. Null: not wanted.
  float* q_row_scale = nullptr;
  // [H, total_q]: rows of q are multiplied by it before they go to q_columns, or null.
  const float* q_column_scale = nullptr;
};

// True if rows of q8 and k8 have norms of at most Fp8Params::kHalfSumNorm.
HSTU_HOST_DEVICE bool limits_norms(const QuantizeParams& params) {
  return params.dtype != DType::kFloat8E4M3 &&
         (params.mode == QuantMode::kRow || params.mode == QuantMode::kBlock);
}

// The number of blocks of keys that a batch may have.
HSTU_HOST_DEVICE int64_t max_blocks(int64_t rows, int batch) {
  return rows / Fp8Params::kBlock + batch;
}

// Returns which of 32 consecutive keys has its value at `position` in v8. This is the order in
// which a thread's accumulators of S hold the keys that its registers of P need.
HSTU_HOST_DEVICE constexpr int key_at(int position) {
  const int thread = position % 16 / 4;
  return position / 16 * 16 + position % 4 / 2 * 8 + 2 * thread + position % 2;
}

int64_t quantize_workspace_bytes(const QuantizeParams& params);

// Launches the kernels on `stream`, a cudaStream_t. q, k and v must be aligned to 16 bytes, with
// strides that are multiples of 8 elements.
void quantize_qkv(const QuantizeParams& params, void* stream);

}  // namespace hstu
