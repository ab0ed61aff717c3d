// The plain structs of pointers and strides that kernels receive; api/arguments.h has the user's
// tensors. Any backend can include this file: it needs neither torch nor CUTLASS.
//
// Every pointer says its [shape] and whether it may be null. Strides count elements, not bytes.
// Names used throughout: B batch, H heads, D head dim of q and k, Dv head dim of v.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace hstu {

// Only q, k and v can be kFloat8E4M3, and only in the forward on a GPU.
enum class DType : int { kFloat32, kBFloat16, kFloat16, kFloat64, kFloat8E4M3 };

// A read-only array of int32 or int64 values.
struct IndexArray {
  const void* data = nullptr;
  bool is_int64 = false;

  HSTU_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
  HSTU_HOST_DEVICE int64_t operator[](int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i]
                    : static_cast<int64_t>(static_cast<const int32_t*>(data)[i]);
  }
  // The lower 32 bits of element i.
  HSTU_HOST_DEVICE uint32_t low_word(int64_t i) const {
    return static_cast<const uint32_t*>(data)[is_int64 ? 2 * i : i];
  }
};

// A packed tensor [rows, heads, head_dim]; head_dim is contiguous.
struct PackedTensor {
  void* data = nullptr;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
  int head_dim = 0;
};

// The place of each sequence of the batch, and the tokens that it consists of.
struct BatchParams {
  int batch = 0;
  int64_t total_q = 0;
  int64_t total_k = 0;      // if paged: the keys that the pages and targets have room for
  int max_seqlen_q = 0;     // as the caller states it; not checked against cu_seqlens_q
  int max_seqlen_k = 0;     // as max_seqlen_q, for keys, including cached keys and targets
  bool paged = false;       // keys before the targets are in pages; targets are rows of q
  IndexArray cu_seqlens_q;  // [B + 1]
  IndexArray cu_seqlens_k;  // [B + 1]
  IndexArray seqused_q;     // [B] or null: the whole sequence
  IndexArray seqused_k;     // [B] or null
  IndexArray num_contexts;  // [B] or null: 0
  IndexArray num_targets;   // [B] or null: 0
};

// The parameters of the mask; common/mask.h defines what they mean.
struct MaskParams {
  int window_left = -1;   // -1: unlimited
  int window_right = -1;  // -1: unlimited
  int min_full_attn_seq_len = 0;
  int target_group_size = 1;

  const int32_t* row_spans = nullptr;  // [row_span_heads, total_q, 4] or null
  int64_t row_spans_head_stride = 0;   // 0 where all heads share them
  int64_t row_spans_row_stride = 0;

  const int32_t* func = nullptr;  // [Hf, func_length, >= total_q] or null
  int func_length = 0;            // odd
  int64_t func_head_stride = 0;   // 0 where all heads share it
  int64_t func_entry_stride = 0;
  bool func_causal = false;  // intersect with causal
};

// True if the mask is stored as tensors of spans per row and has no closed form.
HSTU_HOST_DEVICE bool is_given_by_row(const MaskParams& mask) {
  return mask.row_spans || mask.func;
}

// Dense bias: element (b, n, i, j) is data[b * batch_stride + n * head_stride + i * row_stride +
// j].
struct DenseBias {
  void* data = nullptr;  // [B, heads, length, length] or null
  DType dtype = DType::kFloat32;
  int heads = 0;
  int length = 0;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
};

// A table of relative-bias weights [heads, size], size contiguous.
struct BiasTable {
  const void* data = nullptr;  // may be null: no such term
  DType dtype = DType::kFloat32;
  int heads = 0;
  int size = 0;
  int64_t head_stride = 0;
};

// The earliest and the latest time of 8 keys, or of 8 rows.
struct TimeRange {
  int64_t earliest;
  int64_t latest;
};

// The times of 8 keys, or of 8 rows. After the last one of a sequence, its time is repeated.
struct alignas(16) KeyBlockTimes {
  TimeRange range;
  uint32_t times[8];  // the low words
};

// Time differences that share their highest bits; see difference_cell().
struct alignas(16) BucketCell {
  uint64_t threshold;  // the first one above the smallest difference, or UINT64_MAX
  int first;           // number of thresholds up to the smallest difference
  int count;           // number of thresholds above it, up to the largest difference
};

// The weights of the differences of a cell with at most one threshold above its smallest
// difference. In a cell with more thresholds, `threshold` is kSeveral.
struct alignas(16) WeightCell {
  static constexpr uint64_t kSeveral = uint64_t{1} << 63;

  uint64_t threshold;  // UINT64_MAX: there is none, and low = high
  float low;           // of differences below the threshold
  float high;
};

// A WeightCell of differences below 2^31, with their bucket.
struct alignas(16) NarrowCell {
  static constexpr uint32_t kSeveral = uint32_t{1} << 31;

  uint32_t threshold;  // UINT32_MAX: there is none
  uint32_t bucket;     // of differences below the threshold, or kSeveral
  float low;
  float high;
};

// The tables and ranges of times in the form that the GPU kernels read. prepare_relative_bias()
// writes them to the workspace.
struct PreparedBias {
  // Aligned to 16 bytes. The first and the last entry of the table are repeated position_margin
  // times.
  // sm90: [position.heads, 4, position_copy_stride]. Four copies, of which copy n begins with entry
  // n.
  // sm80: [position.heads, position_copy_stride, 4]. For each entry e the entries e, e + 1, e - 8
  // and e - 7, which a thread needs in a 16 x 8 block of an accumulator.
  float* position = nullptr;
  bool has_position_of_blocks = false;  // the layout of sm80
  int64_t position_head_stride = 0;
  int position_copy_stride = 0;
  int position_margin = 8;               // how often the first and the last entry are repeated
  int reach = 0;                         // R
  float* time = nullptr;                 // [time.heads, time.size]
  BucketCell* cells = nullptr;           // [kDifferenceCells]
  WeightCell* weight_cells = nullptr;    // [time.heads, kDifferenceCells]
  NarrowCell* narrow_cells = nullptr;    // [time.heads, kNarrowCells]
  KeyBlockTimes* time_blocks = nullptr;  // [total_k / 8 + B], each for 8 keys, see first_tile()
  KeyBlockTimes* row_blocks = nullptr;   // [total_q / 8 + B], each for 8 rows, see first_tile()
};

// Bias computed in the kernel from positions and event times.
struct RelativeBias {
  BiasTable position;                       // size 2R - 1, indexed j - i + R - 1, clamped
  BiasTable time;                           // size num_buckets
  const int64_t* timestamps = nullptr;      // [total_k] or null
  const int64_t* row_timestamps = nullptr;  // [total_q] or null: the next event's time
  const int64_t* thresholds = nullptr;      // [num_thresholds], increasing
  int num_thresholds = 0;

  PreparedBias prepared;  // not used by the CPU kernel

  HSTU_HOST_DEVICE explicit operator bool() const {
    return position.data != nullptr || time.data != nullptr;
  }
};

// Pages [num_pages, 2, page_size, H, D] with keys and values [0, Lk - T) of each sequence. Their
// dtype is q's, or e4m3; an e4m3 value is multiplied by the scale of its row and head.
struct PagedParams {
  const void* kv_cache = nullptr;  // null: k and v hold every key
  int64_t num_pages = 0;
  int page_size = 0;  // a power of two
  int page_size_log2 = 0;
  int64_t page_stride = 0;
  int64_t kv_stride = 0;  // from K to V within a page
  int64_t slot_stride = 0;
  int64_t head_stride = 0;
  IndexArray page_offsets;  // [B + 1]; the buffer may be longer
  IndexArray page_ids;      // [num_page_ids]; the first page_offsets[B] are used
  int64_t num_page_ids = 0;
  IndexArray last_page_lens;  // [B]; the buffer may be longer

  // [num_pages, 2, page_size, H] for an e4m3 cache; null: the cache has q's dtype.
  const float* scales = nullptr;
  int64_t scale_page_stride = 0;
  int64_t scale_kv_stride = 0;
  int64_t scale_slot_stride = 0;

  // The index of a key's page among the pages of its sequence, and the key's slot in the page.
  template <typename Int>
  HSTU_HOST_DEVICE Int page_of(Int key) const {
    return key >> page_size_log2;
  }
  template <typename Int>
  HSTU_HOST_DEVICE Int slot_of(Int key) const {
    return key & (page_size - 1);
  }
};

// The scales and norms of a call with e4m3 q, k and v. An element is its e4m3 value times a
// descale, which belongs to its row of q, or to its block of 128 keys of k and v.
//
// A block has keys [128 j, 128 j + 128) of one sequence and is number first_tile(k_begin, b, 128) +
// j of N = total_k / 128 + B, so that offsets alone tell its number. The v of a block is
// transposed: [N, H, Dv, 128], with zeros behind the last key of the sequence. Each 32 keys of it
// are in the order of key_at() in quantize/quantize.h, in which a thread has them in a wgmma
// accumulator.
struct Fp8Params {
  static constexpr int kBlock = 128;  // keys of a block

  const float* q_descale = nullptr;  // [H, total_q]
  const float* k_descale = nullptr;  // [H, N]
  const float* v_descale = nullptr;  // [H, N]
  // Upper bounds of the Euclidean norms of a row of q, and of all rows of k in a block.
  const float* q_norm = nullptr;  // [H, total_q]
  const float* k_norm = nullptr;  // [H, N]
  // [H, total_q], added to Q K^T; or null. If the mean of k has been subtracted from k, this is the
  // product of q with that mean.
  const float* q_mean_product = nullptr;
  int64_t blocks = 0;  // N
  // True if the codes of each row of q, and of each row of k, have a Euclidean norm of at most
  // kHalfSumNorm. Then Q K^T fits into fp16, and a faster kernel adds it up in fp16.
  bool half_sums = false;
  static constexpr float kHalfSumNorm = 240;  // 240 * 240 < 65504
  // In the workspace: [rab.heads, total_q], or [H] for a relative bias; see
  // bias/bias_bounds.h.
  float* bias_bounds = nullptr;
  // With pages of e4m3, q, k and v have the codes of rows, and k_descale and v_descale are [H,
  // total_q]. For each entry of page_ids, page_scales has the scales of the rows of its page, and
  // page_descales the largest of them. The scale is 0 for rows that do not belong to the sequence,
  // and for rows whose codes are all zero or NaN.
  const float* page_scales = nullptr;    // [num_page_ids, 2, H, page_size]
  const float* page_descales = nullptr;  // [num_page_ids, 2, H]
};

struct ForwardParams {
  PackedTensor q;    // [total_q, H, D]
  PackedTensor k;    // [total_k, H, D]; with pages [total_q, H, D]
  PackedTensor v;    // [total_k, H, Dv]; with pages [total_q, H, Dv]; in e4m3 see Fp8Params
  PackedTensor out;  // [total_q, H, Dv]
  DType dtype = DType::kFloat32;      // of q, k and v
  DType out_dtype = DType::kFloat32;  // `dtype`; where that is e4m3, bfloat16 or float16
  int heads = 0;

  BatchParams batch;
  MaskParams mask;
  DenseBias rab;
  RelativeBias relative_bias;
  PagedParams paged;
  Fp8Params fp8;  // read where dtype is kFloat8E4M3

  double alpha = 1.0;
  double scale = 1.0;                 // 1 / scaling_seqlen; used where attn_scale is null
  const float* attn_scale = nullptr;  // [1] or [total_q], or null
  bool attn_scale_per_row = false;
  bool backward_e4m3 = false;  // the backward quantizes q, k, v and dout; its products are in e4m3
};

struct BackwardParams : ForwardParams {
  // With backward_e4m3: q, k and v are SiLU of the tensors, and dq, dk and dv are the gradients of
  // what SiLU returns.
  bool silu = false;
  PackedTensor dout;  // [total_q, H, Dv]
  PackedTensor dq;    // [total_q, H, D]
  PackedTensor dk;    // [total_k, H, D]
  PackedTensor dv;    // [total_k, H, Dv]

  // shape of rab, or null; zeroed by the caller unless BackwardKernel::writes_drab_whole
  DenseBias drab;
  float* dpos_weight = nullptr;  // [position.heads, position.size], zeroed by the caller, or null
  float* dts_weight = nullptr;   // [time.heads, time.size], zeroed by the caller, or null
};

constexpr int kProjectionColumns = 256;        // of a work tile; u, v, q and k have multiples of it
constexpr int kMaxProjectionSequences = 1024;  // of a batch

// An e4m3 linear map of a layer: the projection to u, v, q and k, with SiLU of v, q and k quantized
// for FP8 attention, or the output map, which adds the residual.
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
