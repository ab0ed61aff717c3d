// What the ops are called with, as torch tensors: reading, checking, and conversion to params.h.
// Beside this only ops.cpp and cuda/ops.cpp see torch.
//
// A bad argument is a std::invalid_argument (ValueError in Python) that names the argument, what
// was expected and what came.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "paged/append.h"
#include "params.h"

namespace hstu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The part of the schemas that all ops share, in the order in which Arguments reads it.
#define HSTU_SHARED_SCHEMA                                                                      \
  "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, " \
  "Tensor? seqused_k, SymInt max_seqlen_q, SymInt max_seqlen_k, SymInt scaling_seqlen, "        \
  "Tensor? attn_scale, float alpha, Tensor? num_contexts, Tensor? num_targets, "                \
  "SymInt target_group_size, SymInt window_left, SymInt window_right, "                         \
  "SymInt min_full_attn_seq_len, Tensor? row_spans, Tensor? func, Tensor? rab, "                \
  "Tensor? pos_weight, Tensor? ts_weight, Tensor? timestamps, Tensor? row_timestamps, "         \
  "Tensor? ts_thresholds, "
#define HSTU_PAGED_SCHEMA \
  "Tensor? kv_cache, Tensor? page_offsets, Tensor? page_ids, Tensor? last_page_lens, "
#define HSTU_OPTIONS_SCHEMA                                                   \
  "int quant_mode, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, " \
  "bool deterministic, int sm_margin"

// Reads the arguments of a boxed call one after another.
class ArgumentReader {
 public:
  explicit ArgumentReader(StableIValue* stack) : next_(stack) {}

  template <typename T>
  T read() {
    return torch::stable::detail::to<T>(*next_++);
  }
  template <typename T>
  void read(T& value) {
    value = read<T>();
  }

 private:
  StableIValue* next_;
};

struct Arguments {
  Tensor q, k, v, cu_seqlens_q, cu_seqlens_k;
  OptionalTensor seqused_q, seqused_k;
  int64_t max_seqlen_q, max_seqlen_k, scaling_seqlen;
  OptionalTensor attn_scale;
  double alpha;
  OptionalTensor num_contexts, num_targets;
  int64_t target_group_size, window_left, window_right, min_full_attn_seq_len;
  OptionalTensor row_spans, func, rab;
  OptionalTensor pos_weight, ts_weight, timestamps, row_timestamps, ts_thresholds;
  OptionalTensor kv_cache, page_offsets, page_ids, last_page_lens;
  int64_t quant_mode;
  OptionalTensor q_descale, k_descale, v_descale;
  bool deterministic;
  int64_t sm_margin;

  // The forward ops have the paged arguments, the backward ops have not.
  Arguments(ArgumentReader& in, bool has_paged);
};

inline Arguments::Arguments(ArgumentReader& in, bool has_paged)
    : q(in.read<Tensor>()),
      k(in.read<Tensor>()),
      v(in.read<Tensor>()),
      cu_seqlens_q(in.read<Tensor>()),
      cu_seqlens_k(in.read<Tensor>()) {
  in.read(seqused_q);
  in.read(seqused_k);
  in.read(max_seqlen_q);
  in.read(max_seqlen_k);
  in.read(scaling_seqlen);
  in.read(attn_scale);
  in.read(alpha);
  in.read(num_contexts);
  in.read(num_targets);
  in.read(target_group_size);
  in.read(window_left);
  in.read(window_right);
  in.read(min_full_attn_seq_len);
  in.read(row_spans);
  in.read(func);
  in.read(rab);
  in.read(pos_weight);
  in.read(ts_weight);
  in.read(timestamps);
  in.read(row_timestamps);
  in.read(ts_thresholds);
  if (has_paged) {
    in.read(kv_cache);
    in.read(page_offsets);
    in.read(page_ids);
    in.read(last_page_lens);
  }
  in.read(quant_mode);
  in.read(q_descale);
  in.read(k_descale);
  in.read(v_descale);
  in.read(deterministic);
  in.read(sm_margin);
}

// What append_paged_kv is called with.
struct AppendArguments {
  Tensor k, v, kv_cache, page_offsets, page_ids, cu_seqlens_q, cu_seqlens_k;
  OptionalTensor num_targets;

  explicit AppendArguments(ArgumentReader& in)
      : k(in.read<Tensor>()),
        v(in.read<Tensor>()),
        kv_cache(in.read<Tensor>()),
        page_offsets(in.read<Tensor>()),
        page_ids(in.read<Tensor>()),
        cu_seqlens_q(in.read<Tensor>()),
        cu_seqlens_k(in.read<Tensor>()) {
    in.read(num_targets);
  }
};

// ------------------------------------------------------------------------------------- checks

// NOTE: every call passes these checks, so no text is put together before one has failed.
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

inline std::string describe_shape(const Tensor& tensor) {
  std::string text = "shape (";
  for (int64_t n = 0; n < tensor.dim(); ++n) {
    text += (n ? ", " : "") + std::to_string(tensor.size(n));
  }
  return text + ")";
}

inline std::string describe_strides(const Tensor& tensor) {
  std::string text = "strides (";
  for (int64_t n = 0; n < tensor.dim(); ++n) {
    text += (n ? ", " : "") + std::to_string(tensor.stride(n));
  }
  return text + ")";
}

inline std::string describe_dtype(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
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
    default:
      return torch::headeronly::toString(tensor.scalar_type());
  }
}

inline void check_range(const char* name, int64_t value, int64_t low, int64_t high,
                        const char* expected) {
  if (value < low || value > high) fail(name, expected, std::to_string(value));
}

inline void check_device(const char* name, const Tensor& tensor, const Tensor& q,
                         const char* whose = "q") {
  if (tensor.is_cpu() == q.is_cpu() && tensor.get_device_index() == q.get_device_index()) return;
  const auto describe = [](const Tensor& t) -> std::string {
    return t.is_cpu()    ? "cpu"
           : t.is_cuda() ? join("cuda:", t.get_device_index())
                         : "another device";
  };
  fail(name, join("the device of ", whose, " (", describe(q), ")"), describe(tensor));
}

// A shape entry of -1 accepts any size.
inline void check_shape(const char* name, const Tensor& tensor,
                        std::initializer_list<int64_t> shape, const char* meaning) {
  const auto matches = [](int64_t size, int64_t wanted) { return wanted < 0 || size == wanted; };
  if (std::ranges::equal(tensor.sizes(), shape, matches)) return;
  std::string expected;
  for (const int64_t size : shape) {
    expected += (expected.empty() ? "" : ", ") + (size < 0 ? "any" : std::to_string(size));
  }
  fail(name, join("shape ", meaning, " = (", expected, ")"), describe_shape(tensor));
}

inline void check_last_stride(const char* name, const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.size(last) > 1 && tensor.numel() > 0 && tensor.stride(last) != 1) {
    fail(name, "a contiguous last dimension", describe_strides(tensor));
  }
}

inline DType to_dtype(const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
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

inline void check_dtype(const char* name, const Tensor& tensor, const Tensor& q,
                        const char* whose = "q") {
  if (tensor.scalar_type() != q.scalar_type()) {
    fail(name, join("the dtype of ", whose, " (", describe_dtype(q), ")"), describe_dtype(tensor));
  }
}

inline void check_dtype(const char* name, const Tensor& tensor, ScalarType dtype,
                        const char* expected) {
  if (tensor.scalar_type() != dtype) fail(name, expected, describe_dtype(tensor));
}

// A bias may have the dtype of q or be float32.
inline DType bias_dtype(const char* name, const Tensor& tensor, const Tensor& q) {
  const bool good =
      tensor.scalar_type() == q.scalar_type() || tensor.scalar_type() == ScalarType::Float;
  if (!good)
    fail(name, "float32 or the dtype of q (" + describe_dtype(q) + ")", describe_dtype(tensor));
  return to_dtype(name, tensor);
}

// --------------------------------------------------------------------------------- conversion

// An int32 or int64 vector of `size` values.
inline IndexArray to_index_array(const char* name, const Tensor& tensor, const Tensor& q,
                                 int64_t size, const char* meaning, const char* whose = "q") {
  check_device(name, tensor, q, whose);
  check_shape(name, tensor, {size}, meaning);
  check_last_stride(name, tensor);
  const bool is_int64 = tensor.scalar_type() == ScalarType::Long;
  if (!is_int64 && tensor.scalar_type() != ScalarType::Int) {
    fail(name, "int32 or int64", describe_dtype(tensor));
  }
  return {tensor.const_data_ptr(), is_int64};
}

inline IndexArray to_index_array(const char* name, const OptionalTensor& tensor, const Tensor& q,
                                 int64_t size, const char* meaning, const char* whose = "q") {
  return tensor ? to_index_array(name, *tensor, q, size, meaning, whose) : IndexArray{};
}

// Uninitialised memory, on the device of `like` and by default of its dtype. It does not look an
// operator up by its name, as torch::stable::new_empty does in every call.
inline Tensor allocate(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                       std::optional<ScalarType> dtype = std::nullopt) {
  using torch::stable::detail::from, torch::stable::detail::to;
  int32_t code = dtype ? to<int32_t>(from(*dtype)) : 0;
  AtenTensorHandle tensor = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_aten_new_empty(like.get(), sizes.data(), static_cast<int64_t>(sizes.size()),
                                dtype ? &code : nullptr, nullptr, nullptr, 0, nullptr, &tensor));
  return Tensor(tensor);
}

inline void* writable(const Tensor& tensor) { return tensor.mutable_data_ptr(); }
inline void* readable(const Tensor& tensor) { return const_cast<void*>(tensor.const_data_ptr()); }

// A packed tensor (rows, heads, head_dim) like q in dtype and device.
inline PackedTensor to_packed(const char* name, const Tensor& tensor, const Tensor& q, int64_t rows,
                              int64_t heads, int64_t head_dim, const char* meaning, bool write) {
  check_device(name, tensor, q);
  check_dtype(name, tensor, q);
  check_shape(name, tensor, {rows, heads, head_dim}, meaning);
  check_last_stride(name, tensor);
  return {write ? writable(tensor) : readable(tensor), tensor.stride(0), tensor.stride(1),
          static_cast<int>(tensor.size(2))};
}

inline DenseBias to_dense_bias(const Tensor& tensor, DType dtype, bool write) {
  return {write ? writable(tensor) : readable(tensor),
          dtype,
          static_cast<int>(tensor.size(1)),
          static_cast<int>(tensor.size(2)),
          tensor.stride(0),
          tensor.stride(1),
          tensor.stride(2)};
}

// Checks everything that needs no value of a tensor on a device, and fills `params`.
void to_params(const Arguments& args, ForwardParams& params);
void to_params(const AppendArguments& args, AppendParams& params);

// Checks offsets, lengths, counts and pages, all in host memory.
void check_values(const ForwardParams& params, const Arguments& args);
void check_values(const AppendParams& params);

}  // namespace hstu
