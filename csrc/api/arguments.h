// The arguments of the operators, as the user's tensors. They are read and checked here, and turned
// into the kernels' pointers and strides: params.h. This file uses nothing of torch but ScalarType.
//
// A bad argument throws std::invalid_argument (ValueError in Python) with the argument's name, what
// was expected and what was given.
#pragma once

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>

#include "../paged/append.h"
#include "../params.h"
#include "../quantize/quantize.h"
#include "tensor_view.h"

namespace hstu {

// The schema of the arguments that the forward and the backward share, in the order in which
// Arguments reads them: the tensors that get gradients, then the fields of AttentionCall
// (hstu_attn/call.py).
#define HSTU_CALL_SCHEMA                                                                       \
  "Tensor q, Tensor k, Tensor v, Tensor? rab, Tensor? pos_weight, Tensor? ts_weight, "         \
  "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "       \
  "Tensor? seqused_q, Tensor? seqused_k, SymInt scaling_seqlen, Tensor? attn_scale, "          \
  "float alpha, Tensor? num_contexts, Tensor? num_targets, SymInt target_group_size, "         \
  "SymInt window_left, SymInt window_right, SymInt min_full_attn_seq_len, Tensor? row_spans, " \
  "Tensor? func, Tensor? timestamps, Tensor? row_timestamps, Tensor? ts_thresholds, "          \
  "int quant_mode, bool smooth_k, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "   \
  "bool backward_e4m3, bool deterministic, int sm_margin, bool strict"
// The schema of the arguments that only the forward has, after the others.
#define HSTU_PAGED_SCHEMA                                                                \
  ", Tensor? kv_cache, Tensor? page_offsets, Tensor? page_ids, Tensor? last_page_lens, " \
  "Tensor? kv_scales"
// The schema of quantize_qkv, in the order in which QuantizeArguments reads it. `None` and `False`
// are empty, or the defaults "=None" and "=False".
#define HSTU_QUANTIZE_SCHEMA(None, False)                                                 \
  "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "              \
  "Tensor? seqused_q, Tensor? seqused_k, int mode, bool smooth_k, Tensor? q_descale" None \
  ", Tensor? k_descale" None ", Tensor? v_descale" None ", bool silu" False

// The arguments of the attention operators. The views own nothing: `in` keeps the tensors.
struct Arguments {
  TensorView q, k, v;
  OptionalView rab, pos_weight, ts_weight;
  TensorView cu_seqlens_q, cu_seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k;
  OptionalView seqused_q, seqused_k;
  int64_t scaling_seqlen;
  OptionalView attn_scale;
  double alpha;
  OptionalView num_contexts, num_targets;
  int64_t target_group_size, window_left, window_right, min_full_attn_seq_len;
  OptionalView row_spans, func, timestamps, row_timestamps, ts_thresholds;
  int64_t quant_mode;
  bool smooth_k;
  OptionalView q_descale, k_descale, v_descale;
  bool backward_e4m3;
  bool deterministic;
  int64_t sm_margin;
  // If true, check_values() refuses counts and lengths that a sequence cannot have. If false, the
  // kernels clamp them (load_sequence in common/sequence.h).
  bool strict;
  OptionalView kv_cache, page_offsets, page_ids, last_page_lens, kv_scales;

  // Reads the arguments: each `in.read(x)` gives the next one.
  template <typename Reader>
  Arguments(Reader& in, bool has_paged) {
    for_each([&in](auto& value) { in.read(value); }, has_paged);
  }

  // Calls `function(argument)` in the order of the schema.
  template <typename Function>
  void for_each(Function function, bool has_paged) {
    visit(*this, function, has_paged);
  }
  template <typename Function>
  void for_each(Function function, bool has_paged) const {
    visit(*this, function, has_paged);
  }

 private:
  template <typename Self, typename Function>
  static void visit(Self& self, Function function, bool has_paged) {
    const auto call = [&function](auto&... values) { (function(values), ...); };
    call(self.q, self.k, self.v, self.rab, self.pos_weight, self.ts_weight);
    call(self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k);
    call(self.seqused_q, self.seqused_k, self.scaling_seqlen, self.attn_scale, self.alpha);
    call(self.num_contexts, self.num_targets, self.target_group_size);
    call(self.window_left, self.window_right, self.min_full_attn_seq_len);
    call(self.row_spans, self.func);
    call(self.timestamps, self.row_timestamps, self.ts_thresholds);
    call(self.quant_mode, self.smooth_k, self.q_descale, self.k_descale, self.v_descale);
    call(self.backward_e4m3, self.deterministic, self.sm_margin, self.strict);
    if (!has_paged) return;
    call(self.kv_cache, self.page_offsets, self.page_ids, self.last_page_lens, self.kv_scales);
  }
};

// The schema of the further arguments of forward_fp8: norms of rows of q and blocks of k, and
// whether norms of codes are limited; see Fp8Params.
#define HSTU_FP8_SCHEMA ", Tensor q_norm, Tensor k_norm, Tensor? q_mean_product, bool half_sums"

// The further arguments of forward_fp8. In its Arguments, q and k are e4m3, v is (blocks, heads,
// head_dim_v, 128) in e4m3, and the descales are given. Fp8Params explains all of them.
struct Fp8Arguments {
  TensorView q_norm, k_norm;
  OptionalView q_mean_product;
  bool half_sums = false;

  template <typename Reader>
  explicit Fp8Arguments(Reader& in) {
    in.read(q_norm);
    in.read(k_norm);
    in.read(q_mean_product);
    in.read(half_sums);
  }
};

// The schema of the arguments that linear_fp8 and project_fp8 share.
#define HSTU_PROJECTION_SCHEMA \
  "Tensor x, Tensor x_descale, Tensor weight, Tensor weight_descale, Tensor bias, "

// The arguments of linear_fp8, or of project_fp8 if `is_linear` is false.
struct ProjectionArguments {
  TensorView x, x_descale, weight, weight_descale, bias;
  TensorView residual;    // of linear_fp8
  TensorView cu_seqlens;  // of project_fp8
  int64_t heads = 0;
  bool keeps_z = true;

  template <typename Reader>
  ProjectionArguments(Reader& in, bool is_linear) {
    in.read(x);
    in.read(x_descale);
    in.read(weight);
    in.read(weight_descale);
    in.read(bias);
    if (is_linear) {
      in.read(residual);
    } else {
      in.read(cu_seqlens);
      in.read(heads);
      in.read(keeps_z);
    }
  }
};

// The arguments of append_paged_kv.
struct AppendArguments {
  TensorView k, v, kv_cache, page_offsets, page_ids, cu_seqlens_q, cu_seqlens_k;
  OptionalView num_targets, kv_scales;

  template <typename Reader>
  explicit AppendArguments(Reader& in) {
    in.read(k);
    in.read(v);
    in.read_written(kv_cache);
    in.read(page_offsets);
    in.read(page_ids);
    in.read(cu_seqlens_q);
    in.read(cu_seqlens_k);
    in.read(num_targets);
    in.read_written(kv_scales);
  }
};

// The arguments of quantize_qkv.
struct QuantizeArguments {
  TensorView q, k, v, cu_seqlens_q, cu_seqlens_k;
  OptionalView seqused_q, seqused_k;
  int64_t mode;
  bool smooth_k;
  OptionalView q_descale, k_descale, v_descale;
  bool silu;

  template <typename Reader>
  explicit QuantizeArguments(Reader& in) {
    visit(*this, [&in](auto& value) { in.read(value); });
  }

  // Calls `function(argument)` in the order of the schema.
  template <typename Function>
  void for_each(Function function) const {
    visit(*this, function);
  }

 private:
  template <typename Self, typename Function>
  static void visit(Self& self, Function function) {
    const auto call = [&function](auto&... values) { (function(values), ...); };
    call(self.q, self.k, self.v, self.cu_seqlens_q, self.cu_seqlens_k);
    call(self.seqused_q, self.seqused_k, self.mode, self.smooth_k);
    call(self.q_descale, self.k_descale, self.v_descale, self.silu);
  }
};

// ------------------------------------------------------------------------------------- checks

// NOTE: every call makes these checks, so texts are put together only after one has failed.
template <typename... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// Throws "NAME: expected EXPECTED, got GOT".
[[noreturn]] inline void fail(const std::string& name, const std::string& expected,
                              const std::string& got) {
  throw std::invalid_argument(name + ": expected " + expected + ", got " + got);
}

inline std::string describe_shape(const TensorView& tensor) {
  std::string text = "shape (";
  for (int64_t n = 0; n < tensor.dim(); ++n) {
    text += (n ? ", " : "") + std::to_string(tensor.size(n));
  }
  return text + ")";
}

inline std::string describe_strides(const TensorView& tensor) {
  std::string text = "strides (";
  for (int64_t n = 0; n < tensor.dim(); ++n) {
    text += (n ? ", " : "") + std::to_string(tensor.stride(n));
  }
  return text + ")";
}

inline std::string describe_dtype(const TensorView& tensor) {
  switch (tensor.dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    default:
      return torch::headeronly::toString(tensor.dtype);
  }
}

inline void check_range(const char* name, int64_t value, int64_t low, int64_t high,
                        const char* expected) {
  if (value < low || value > high) fail(name, expected, std::to_string(value));
}

inline void check_device(const char* name, const TensorView& tensor, const TensorView& q,
                         const char* whose = "q") {
  if (tensor.is_on_device_of(q)) return;
  const auto describe = [](const TensorView& t) -> std::string {
    return t.device_type == DeviceType::kCpu    ? "cpu"
           : t.device_type == DeviceType::kCuda ? join("cuda:", t.device_index)
                                                : "another device";
  };
  fail(name, join("the device of ", whose, " (", describe(q), ")"), describe(tensor));
}

// Checks a shape. An entry of -1 in `shape` accepts any size; `meaning` names the dimensions.
inline void check_shape(const char* name, const TensorView& tensor,
                        std::initializer_list<int64_t> shape, const char* meaning) {
  const auto matches = [](int64_t size, int64_t wanted) { return wanted < 0 || size == wanted; };
  if (std::ranges::equal(tensor.sizes, shape, matches)) return;
  std::string expected;
  for (const int64_t size : shape) {
    expected += (expected.empty() ? "" : ", ") + (size < 0 ? "any" : std::to_string(size));
  }
  fail(name, join("shape ", meaning, " = (", expected, ")"), describe_shape(tensor));
}

inline void check_last_stride(const char* name, const TensorView& tensor) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.size(last) > 1 && tensor.numel() > 0 && tensor.stride(last) != 1) {
    fail(name, "a contiguous last dimension", describe_strides(tensor));
  }
}

inline DType to_dtype(const char* name, const TensorView& tensor) {
  switch (tensor.dtype) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::Double:
      return DType::kFloat64;
    default:
      fail(name, "float32, bfloat16, float16 or float64", describe_dtype(tensor));
  }
}

inline void check_dtype(const char* name, const TensorView& tensor, const TensorView& q,
                        const char* whose = "q") {
  if (tensor.dtype != q.dtype) {
    fail(name, join("the dtype of ", whose, " (", describe_dtype(q), ")"), describe_dtype(tensor));
  }
}

inline void check_dtype(const char* name, const TensorView& tensor, ScalarType dtype,
                        const char* expected) {
  if (tensor.dtype != dtype) fail(name, expected, describe_dtype(tensor));
}

// Returns the dtype of a bias. It may be float32 or q's dtype; if q is e4m3, float32, bf16 or fp16.
inline DType bias_dtype(const char* name, const TensorView& tensor, const TensorView& q) {
  const bool is_e4m3 = q.dtype == ScalarType::Float8_e4m3fn;
  const bool has_16_bits = tensor.dtype == ScalarType::BFloat16 || tensor.dtype == ScalarType::Half;
  if (tensor.dtype != ScalarType::Float && !(is_e4m3 ? has_16_bits : tensor.dtype == q.dtype)) {
    fail(name,
         is_e4m3 ? "float32, bfloat16 or float16"
                 : "float32 or the dtype of q (" + describe_dtype(q) + ")",
         describe_dtype(tensor));
  }
  return to_dtype(name, tensor);
}

// --------------------------------------------------------------------------------- conversion

// Checks an int32 or int64 vector of `size` values; -1 accepts any number.
inline IndexArray to_index_array(const char* name, const TensorView& tensor, const TensorView& q,
                                 int64_t size, const char* meaning, const char* whose = "q") {
  check_device(name, tensor, q, whose);
  check_shape(name, tensor, {size}, meaning);
  check_last_stride(name, tensor);
  const bool is_int64 = tensor.dtype == ScalarType::Long;
  if (!is_int64 && tensor.dtype != ScalarType::Int) {
    fail(name, "int32 or int64", describe_dtype(tensor));
  }
  return {tensor.data, is_int64};
}

inline IndexArray to_index_array(const char* name, const OptionalView& tensor, const TensorView& q,
                                 int64_t size, const char* meaning, const char* whose = "q") {
  return tensor ? to_index_array(name, *tensor, q, size, meaning, whose) : IndexArray{};
}

// Checks a vector of at least `size` values: page tables may be buffers of the largest batch.
inline IndexArray to_index_prefix(const char* name, const TensorView& tensor, const TensorView& q,
                                  int64_t size, const char* meaning, const char* whose = "q") {
  const IndexArray array = to_index_array(name, tensor, q, -1, meaning, whose);
  if (tensor.size(0) < size) {
    fail(name, join("at least ", size, " values ", meaning), describe_shape(tensor));
  }
  return array;
}

// Checks a packed tensor (rows, heads, head_dim), which has the dtype and the device of q.
inline PackedTensor to_packed(const char* name, const TensorView& tensor, const TensorView& q,
                              int64_t rows, int64_t heads, int64_t head_dim, const char* meaning) {
  check_device(name, tensor, q);
  check_dtype(name, tensor, q);
  check_shape(name, tensor, {rows, heads, head_dim}, meaning);
  check_last_stride(name, tensor);
  return {tensor.data, tensor.stride(0), tensor.stride(1), static_cast<int>(tensor.size(2))};
}

inline DenseBias to_dense_bias(const TensorView& tensor, DType dtype) {
  return {tensor.data,
          dtype,
          static_cast<int>(tensor.size(1)),
          static_cast<int>(tensor.size(2)),
          tensor.stride(0),
          tensor.stride(1),
          tensor.stride(2)};
}

// Check everything but the values of tensors, which may be on a device, and fill `params`.
void to_params(const Arguments& args, ForwardParams& params);
void to_params(const Arguments& args, const Fp8Arguments& fp8, ForwardParams& params);
void to_params(const ProjectionArguments& args, bool is_linear, ProjectionParams& params);
void to_params(const AppendArguments& args, AppendParams& params);
void to_params(const QuantizeArguments& args, QuantizeParams& params);
// Fills `params` for the quantization of q, k and v of an attention call. `checked` has been filled
// from the same arguments.
void to_params(const Arguments& args, const ForwardParams& checked, QuantizeParams& params);

// These are parts of to_params(), in fp8_arguments.cpp.
void check_quantization(const Arguments& args, const ForwardParams& params);
void check_fp8_tensors(const Arguments& args, const Fp8Arguments& fp8, ForwardParams& params);

// Check the values of offsets, lengths, counts and pages, which must be in host memory. See
// Arguments::strict.
void check_values(const ForwardParams& params, const Arguments& args);
void check_values(const AppendParams& params);
void check_values(const QuantizeParams& params);

}  // namespace hstu
