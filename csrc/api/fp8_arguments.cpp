// Checks the FP8 arguments of quantize_qkv, of forward_fp8 and of the attention operators.
#include <algorithm>
#include <climits>

#include "../common/not_implemented.h"
#include "arguments.h"

namespace hstu {
namespace {

// Checks the descales of an e4m3 tensor with `total` rows. `has_rows`: each row may have its own.
GivenDescale to_descale(const char* name, const OptionalView& given, const TensorView& q,
                        int64_t batch, int64_t total, bool has_rows) {
  using Per = GivenDescale::Per;
  if (!given) fail(name, "a tensor with float8_e4m3fn", "None");
  const TensorView& descale = *given;
  const int64_t heads = q.size(1), blocks = max_blocks(total, static_cast<int>(batch));
  check_device(name, descale, q);
  check_dtype(name, descale, ScalarType::Float, "float32");
  const auto* data = static_cast<const float*>(descale.data);
  const auto has_shape = [&](std::initializer_list<int64_t> shape) {
    return std::ranges::equal(descale.sizes, shape);
  };
  if (descale.numel() == 1 && descale.dim() <= 1) return {data, Per::kTensor, 0, 0};
  if (has_shape({batch})) return {data, Per::kSequence, descale.stride(0), 0};
  if (has_shape({batch, heads})) {
    return {data, Per::kSequence, descale.stride(0), descale.stride(1)};
  }
  if (has_rows && has_shape({heads, total})) {
    return {data, Per::kRow, descale.stride(1), descale.stride(0)};
  }
  if (has_shape({heads, blocks})) return {data, Per::kBlock, descale.stride(1), descale.stride(0)};
  fail(name,
       join("shape (), (1), (batch) = (", batch, "), (batch, heads) = (", batch, ", ", heads,
            ") or (heads, total / 128 + batch) = (", heads, ", ", blocks, ")",
            has_rows ? join(" or (heads, total) = (", heads, ", ", total, ")") : ""),
       describe_shape(descale));
}

// Checks that there are descales if q is e4m3, and none otherwise.
template <typename Args>
void set_descales(const Args& args, const BatchParams& batch, QuantizeParams& params) {
  const TensorView& q = args.q;
  if (q.dtype == ScalarType::Float8_e4m3fn) {
    params.given_q = to_descale("q_descale", args.q_descale, q, batch.batch, batch.total_q, true);
    params.given_k = to_descale("k_descale", args.k_descale, q, batch.batch, batch.total_k, false);
    params.given_v = to_descale("v_descale", args.v_descale, q, batch.batch, batch.total_k, false);
    return;
  }
  for (const auto& [name, given] : {std::pair("q_descale", args.q_descale.has_value()),
                                    std::pair("k_descale", args.k_descale.has_value()),
                                    std::pair("v_descale", args.v_descale.has_value())}) {
    if (given) fail(name, "None without float8_e4m3fn", "a tensor");
  }
}

// Checks a contiguous fp32 tensor (heads, columns).
const float* to_factors(const char* name, const TensorView& tensor, const TensorView& q,
                        int64_t columns, const char* meaning) {
  check_device(name, tensor, q);
  check_dtype(name, tensor, ScalarType::Float, "float32");
  check_shape(name, tensor, {q.size(1), columns}, meaning);
  if (!tensor.is_contiguous()) fail(name, "a contiguous tensor", describe_strides(tensor));
  return static_cast<const float*>(tensor.data);
}

// Checks e4m3 rows, which TMA reads.
PackedTensor to_e4m3_rows(const char* name, const TensorView& tensor, const TensorView& q,
                          int64_t rows, const char* meaning) {
  const PackedTensor packed = to_packed(name, tensor, q, rows, q.size(1), q.size(2), meaning);
  const bool aligned = reinterpret_cast<uintptr_t>(packed.data) % 16 == 0 &&
                       packed.row_stride % 16 == 0 && packed.head_stride % 16 == 0;
  if (!aligned) fail(name, "rows that begin at multiples of 16 bytes", describe_strides(tensor));
  return packed;
}

}  // namespace

// The modes are those of FBGEMM's hstu package: FP8 with scales of various granularities.
void check_quantization(const Arguments& args, const ForwardParams& params) {
  const bool is_e4m3 = params.dtype == DType::kFloat8E4M3;
  const int64_t mode = args.quant_mode;
  if (is_e4m3) check_range("quant_mode", mode, -1, -1, "-1 with float8_e4m3fn");
  check_range("quant_mode", mode, -1, 5, "-1, or an FP8 mode from 0 to 5");
  if (mode == -1 && args.smooth_k) fail("smooth_k", "false with quant_mode -1", "true");
  if (mode != -1 && params.dtype != DType::kBFloat16 && params.dtype != DType::kFloat16) {
    fail("q", "bfloat16 or float16 with quant_mode", describe_dtype(args.q));
  }
  if (args.backward_e4m3 && params.dtype != DType::kBFloat16 && params.dtype != DType::kFloat16) {
    fail("q", "bfloat16 or float16 with backward_e4m3", describe_dtype(args.q));
  }
  if (args.kv_cache && is_e4m3) {
    throw NotImplemented("q: with kv_cache, FP8 attention quantizes bfloat16 or float16 itself");
  }
  if (args.kv_cache && mode != -1) {
    check_range("quant_mode", mode, 1, 1, "-1, or 1, scales of rows, with kv_cache");
    if (args.smooth_k) fail("smooth_k", "false with kv_cache", "true");
    if (!params.paged.scales) {
      throw NotImplemented("kv_cache: FP8 attention reads pages of float8_e4m3fn, got " +
                           describe_dtype(*args.kv_cache));
    }
  }
  QuantizeParams descales;
  set_descales(args, params.batch, descales);
}

void to_params(const Arguments& args, const ForwardParams& checked, QuantizeParams& params) {
  params.q = checked.q;
  params.k = checked.k;
  params.v = checked.v;
  params.heads = checked.heads;
  params.dtype = checked.dtype;
  params.batch = checked.batch;
  if (args.quant_mode >= 0) params.mode = static_cast<QuantMode>(args.quant_mode);
  params.smooth_k = args.smooth_k;
  set_descales(args, params.batch, params);
}

void check_fp8_tensors(const Arguments& args, const Fp8Arguments& fp8, ForwardParams& params) {
  const TensorView &q = args.q, &k = args.k, &v = args.v;
  check_dtype("q", q, ScalarType::Float8_e4m3fn, "float8_e4m3fn");
  if (q.dim() != 3) fail("q", "shape (total_q, heads, head_dim)", describe_shape(q));
  if (k.dim() != 3) fail("k", "shape (total_k, heads, head_dim)", describe_shape(k));
  if (v.dim() != 4) fail("v", "shape (blocks, heads, head_dim_v, 128)", describe_shape(v));
  const int64_t total_q = q.size(0), total_k = k.size(0), heads = q.size(1);
  const int64_t batch = std::max<int64_t>(args.cu_seqlens_k.size(0) - 1, 0);
  const int64_t blocks = max_blocks(total_k, static_cast<int>(batch));
  check_range("q", heads, 1, INT_MAX, "at least one head");
  check_range("q", q.size(2), 8, 256, "a head_dim from 8 to 256");
  check_range("v", v.size(2), 8, 256, "a head_dim_v from 8 to 256");
  params.heads = static_cast<int>(heads);
  params.batch.total_q = total_q;
  params.batch.total_k = total_k;
  params.dtype = DType::kFloat8E4M3;
  params.q = to_e4m3_rows("q", q, q, -1, "(total_q, heads, head_dim)");
  params.k = to_e4m3_rows("k", k, q, -1, "(total_k, heads, head_dim)");
  check_device("v", v, q);
  check_dtype("v", v, q);
  check_shape("v", v, {blocks, heads, -1, Fp8Params::kBlock}, "(blocks, heads, head_dim_v, 128)");
  if (!v.is_contiguous()) fail("v", "a contiguous tensor", describe_strides(v));
  params.v = {v.data, v.stride(0), v.stride(1), static_cast<int>(v.size(2))};
  for (const auto& [name, given] : {std::pair("q_descale", args.q_descale.has_value()),
                                    std::pair("k_descale", args.k_descale.has_value()),
                                    std::pair("v_descale", args.v_descale.has_value())}) {
    if (!given) fail(name, "a tensor", "None");
  }
  const char *by_row = "(heads, total_q)", *by_block = "(heads, blocks)";
  Fp8Params& to = params.fp8;
  to.q_descale = to_factors("q_descale", *args.q_descale, q, total_q, by_row);
  to.k_descale = to_factors("k_descale", *args.k_descale, q, blocks, by_block);
  to.v_descale = to_factors("v_descale", *args.v_descale, q, blocks, by_block);
  to.q_norm = to_factors("q_norm", fp8.q_norm, q, total_q, by_row);
  to.k_norm = to_factors("k_norm", fp8.k_norm, q, blocks, by_block);
  if (fp8.q_mean_product) {
    to.q_mean_product = to_factors("q_mean_product", *fp8.q_mean_product, q, total_q, by_row);
  }
  to.blocks = blocks;
  to.half_sums = fp8.half_sums;
}

void to_params(const QuantizeArguments& args, QuantizeParams& params) {
  const TensorView& q = args.q;
  const bool is_e4m3 = q.dtype == ScalarType::Float8_e4m3fn;
  if (!is_e4m3 && q.dtype != ScalarType::BFloat16 && q.dtype != ScalarType::Half) {
    fail("q", "bfloat16, float16 or float8_e4m3fn", describe_dtype(q));
  }
  if (q.dim() != 3) fail("q", "shape (total_q, heads, head_dim)", describe_shape(q));
  if (args.v.dim() != 3) fail("v", "shape (total_k, heads, head_dim_v)", describe_shape(args.v));
  const int64_t heads = q.size(1), head_dim = q.size(2), total_k = args.v.size(0);
  if (heads < 1) fail("q", "at least one head", describe_shape(q));
  for (const auto& [name, tensor] : {std::pair("q", &args.q), std::pair("v", &args.v)}) {
    const int64_t d = tensor->size(2);
    if (d < 8 || d > 256 || d % 8)
      fail(name, "a head_dim that is a multiple of 8, 8 to 256", std::to_string(d));
  }
  params.q = to_packed("q", q, q, -1, heads, head_dim, "(total_q, heads, head_dim)");
  params.k = to_packed("k", args.k, q, total_k, heads, head_dim, "(total_k, heads, head_dim)");
  params.v = to_packed("v", args.v, q, total_k, heads, -1, "(total_k, heads, head_dim_v)");
  params.heads = static_cast<int>(heads);

  BatchParams& batch = params.batch;
  batch.total_q = q.size(0);
  batch.total_k = total_k;
  batch.cu_seqlens_q = to_index_array("cu_seqlens_q", args.cu_seqlens_q, q, -1, "(batch + 1)");
  const int64_t b = args.cu_seqlens_q.size(0) - 1;
  check_range("cu_seqlens_q", b, 0, INT_MAX, "1 to 2^31 offsets");
  batch.batch = static_cast<int>(b);
  batch.cu_seqlens_k = to_index_array("cu_seqlens_k", args.cu_seqlens_k, q, b + 1, "(batch + 1)");
  batch.seqused_q = to_index_array("seqused_q", args.seqused_q, q, b, "(batch)");
  batch.seqused_k = to_index_array("seqused_k", args.seqused_k, q, b, "(batch)");

  params.smooth_k = args.smooth_k;
  params.silu_q = params.silu_kv = args.silu;
  if (is_e4m3) {
    params.dtype = DType::kFloat8E4M3;
    check_range("mode", args.mode, -1, -1, "-1 with float8_e4m3fn");
    if (args.smooth_k) fail("smooth_k", "false with float8_e4m3fn", "true");
    if (args.silu) fail("silu", "false with float8_e4m3fn", "true");
  } else {
    params.dtype = to_dtype("q", q);
    check_range("mode", args.mode, 0, 5, "a mode from 0 to 5");
    params.mode = static_cast<QuantMode>(args.mode);
  }
  set_descales(args, batch, params);
}

}  // namespace hstu
