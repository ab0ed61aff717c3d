// The dispatcher operators: their schemas, outputs and registration. Arguments are checked in
// arguments.h.
#include "ops.h"

#include <string>

#include "../common/math.h"
#include "../common/not_implemented.h"
#include "../cpu/runner.h"
#include "composed.h"
#include "stable_tensor.h"

namespace hstu {
namespace {

using torch::stable::detail::from;

// An empty output stands for a gradient that is not wanted.
Tensor no_gradient(const TensorView& q) { return allocate(q, {0}); }

void set_output(const TensorView& out, const Arguments& args, ForwardParams& params) {
  const bool is_fp8 = params.dtype == DType::kFloat8E4M3;
  if (is_fp8) {
    if (out.dtype != ScalarType::BFloat16 && out.dtype != ScalarType::Half) {
      fail("out", "bfloat16 or float16 with float8_e4m3fn", describe_dtype(out));
    }
    params.out_dtype = to_dtype("out", out);
    check_device("out", out, args.q);
  }
  params.out = to_packed("out", out, is_fp8 ? out : args.q, args.q.size(0), args.q.size(1),
                         args.v.size(2), "(total_q, heads, head_dim_v)");
}

float* to_table_gradient(const char* name, const TensorView& gradient, const OptionalView& weight,
                         const char* weight_name) {
  if (!weight) fail(name, join("None without ", weight_name), "a tensor");
  check_device(name, gradient, *weight);
  check_dtype(name, gradient, ScalarType::Float, "float32");
  check_shape(name, gradient, {weight->size(0), weight->size(1)}, weight_name);
  if (!gradient.is_contiguous()) fail(name, "a contiguous tensor", describe_strides(gradient));
  return static_cast<float*>(gradient.data);
}

void set_gradients(const TensorView& dout, const Gradients& gradients, const Arguments& args,
                   BackwardParams& params) {
  if (params.dtype == DType::kFloat8E4M3) {
    throw NotImplemented("q: float8_e4m3fn gets no gradient; give bfloat16 or float16");
  }
  const TensorView& q = args.q;
  const int64_t total_q = q.size(0), total_k = args.k.size(0), heads = q.size(1);
  const int64_t d = q.size(2), dv = args.v.size(2);
  params.dout = to_packed("dout", dout, q, total_q, heads, dv, "(total_q, heads, head_dim_v)");
  params.dq = to_packed("dq", gradients.dq, q, total_q, heads, d, "(total_q, heads, head_dim)");
  params.dk = to_packed("dk", gradients.dk, q, total_k, heads, d, "(total_k, heads, head_dim)");
  params.dv = to_packed("dv", gradients.dv, q, total_k, heads, dv, "(total_k, heads, head_dim_v)");
  if (gradients.drab) {
    const TensorView& drab = *gradients.drab;
    if (!args.rab) fail("drab", "None without rab", "a tensor");
    check_device("drab", drab, q);
    check_dtype("drab", drab, args.rab->dtype, "the dtype of rab");
    check_shape("drab", drab,
                {args.rab->size(0), args.rab->size(1), args.rab->size(2), args.rab->size(3)},
                "of rab");
    check_last_stride("drab", drab);
    params.drab = to_dense_bias(drab, params.rab.dtype);
  }
  if (gradients.dpos_weight) {
    params.dpos_weight =
        to_table_gradient("dpos_weight", *gradients.dpos_weight, args.pos_weight, "pos_weight");
  }
  if (gradients.dts_weight) {
    params.dts_weight =
        to_table_gradient("dts_weight", *gradients.dts_weight, args.ts_weight, "ts_weight");
  }
}

void set_outputs(const QuantizeOutputs& outputs, QuantizeParams& params) {
  const auto at = [&outputs](int n) { return outputs.tensors[n].data; };
  params.q8 = static_cast<uint8_t*>(at(0));
  params.k8 = static_cast<uint8_t*>(at(1));
  params.v8 = static_cast<uint8_t*>(at(2));
  params.q_descale = static_cast<float*>(at(3));
  params.k_descale = static_cast<float*>(at(4));
  params.v_descale = static_cast<float*>(at(5));
  params.q_norm = static_cast<float*>(at(6));
  params.k_norm = static_cast<float*>(at(7));
  params.q_mean_product = static_cast<float*>(at(8));
  params.k_mean = static_cast<float*>(at(9));
}

// ----------------------------------------------------------------------------------------- CPU

cpu::Parallel torch_threads() {
  const auto run = [](int count, const std::function<void(int)>& function) {
    torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) function(static_cast<int>(n));
    });
  };
  return {static_cast<int>(torch::stable::get_num_threads()), run};
}

struct CpuOps {
  static void check(const Arguments& args, const ForwardParams& params) {
    check_values(params, args);
  }
  static void forward(const Arguments& args, const TensorView& out, ForwardParams& params) {
    if (args.quant_mode >= 0 || params.dtype == DType::kFloat8E4M3) {
      return composed_forward(args, out);
    }
    cpu::run_forward(params, torch_threads());
  }
  static void backward(const Arguments& args, const TensorView& dout, const Gradients& gradients,
                       BackwardParams& params) {
    if (params.backward_e4m3) return composed_backward(args, dout, gradients);
    for (const auto* bias : {&gradients.drab, &gradients.dpos_weight, &gradients.dts_weight}) {
      if (*bias) fill_with_zeros(**bias);
    }
    cpu::run_backward(params, torch_threads());
  }
  static void append(const AppendArguments&, const AppendParams& params) {
    check_values(params);
    append_on_cpu(params);
  }
  static void quantize(const QuantizeArguments& args, const QuantizeOutputs& outputs,
                       const QuantizeParams& params) {
    check_values(params);
    composed_quantize(args, outputs);
  }
};

// --------------------------------------------------------------------------------- boxed kernels

// hstu_varlen_fwd(..., ) -> Tensor
template <typename DeviceOps>
void fwd(StableIValue* stack, uint64_t, uint64_t) {
  StackReader in(stack);
  const Arguments args(in, true);
  ForwardParams params;
  to_params(args, params);
  const bool is_fp8 = params.dtype == DType::kFloat8E4M3;
  const Tensor out = allocate(args.q, {args.q.size(0), args.q.size(1), args.v.size(2)},
                              is_fp8 ? ScalarType::BFloat16 : args.q.dtype);
  DeviceOps::check(args, params);
  set_output(written_view(out), args, params);
  DeviceOps::forward(args, written_view(out), params);
  stack[0] = from(out);
}

// hstu_varlen_fwd_out(..., Tensor(a!) out) -> ()
template <typename DeviceOps>
void fwd_out(StableIValue* stack, uint64_t, uint64_t) {
  StackReader in(stack);
  const Arguments args(in, true);
  TensorView out;
  in.read_written(out);
  ForwardParams params;
  to_params(args, params);
  DeviceOps::check(args, params);
  set_output(out, args, params);
  DeviceOps::forward(args, out, params);
}

#if defined(USE_CUDA)
// backward_of_silu(Tensor dout, ..., Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv) -> (): see
// BackwardParams::silu.
void backward_of_silu(StableIValue* stack, uint64_t, uint64_t) {
  StackReader in(stack);
  TensorView dout;
  in.read(dout);
  const Arguments args(in, false);
  Gradients gradients;
  for (TensorView* gradient : {&gradients.dq, &gradients.dk, &gradients.dv}) {
    in.read_written(*gradient);
  }
  if (!args.backward_e4m3) fail("backward_e4m3", "true", "false");
  BackwardParams params;
  to_params(args, params);
  params.silu = true;
  CudaOps::check(args, params);
  set_gradients(dout, gradients, args, params);
  CudaOps::backward(args, dout, gradients, params);
}

// linear_fp8(...) -> Tensor
void linear_fp8(StableIValue* stack, uint64_t, uint64_t) {
  StackReader in(stack);
  const ProjectionArguments args(in, /*is_linear=*/true);
  ProjectionParams params;
  to_params(args, true, params);
  const Tensor out = allocate(args.residual, args.residual.sizes);
  params.z = static_cast<uint16_t*>(written_view(out).data);
  CudaOps::project(args.x, params);
  stack[0] = from(out);
}

// project_fp8(...) -> nine tensors
void project_fp8(StableIValue* stack, uint64_t, uint64_t) {
  StackReader in(stack);
  const ProjectionArguments args(in, /*is_linear=*/false);
  ProjectionParams params;
  to_params(args, false, params);
  const int64_t total = params.batch.total_k, heads = params.heads, head_dim = params.head_dim;
  const int64_t blocks = max_blocks(total, params.batch.batch);
  const auto take = [&](std::initializer_list<int64_t> sizes, ScalarType dtype, auto*& data) {
    const Tensor tensor = allocate(args.x, sizes, dtype);
    data = static_cast<std::remove_reference_t<decltype(data)>>(written_view(tensor).data);
    return tensor;
  };
  const auto kE4m3 = ScalarType::Float8_e4m3fn, kFloat = ScalarType::Float;
  const Tensor tensors[] = {take({total, params.z_columns}, ScalarType::BFloat16, params.z),
                            take({total, heads, head_dim}, kE4m3, params.q8),
                            take({total, heads, head_dim}, kE4m3, params.k8),
                            take({blocks, heads, head_dim, Fp8Params::kBlock}, kE4m3, params.v8),
                            take({heads, total}, kFloat, params.q_descale),
                            take({heads, blocks}, kFloat, params.k_descale),
                            take({heads, blocks}, kFloat, params.v_descale),
                            take({heads, total}, kFloat, params.q_norm),
                            take({heads, blocks}, kFloat, params.k_norm)};
  CudaOps::project(args.x, params);
  for (size_t n = 0; n < std::size(tensors); ++n) stack[n] = from(tensors[n]);
}

// forward_fp8(..., Tensor(a!) out) -> (): for quantized tensors; `out` is bfloat16 or float16.
void forward_fp8(StableIValue* stack, uint64_t, uint64_t) {
  StackReader in(stack);
  const Arguments args(in, false);
  const Fp8Arguments fp8(in);
  TensorView out;
  in.read_written(out);
  ForwardParams params;
  to_params(args, fp8, params);
  CudaOps::check(args, params);
  set_output(out, args, params);
  CudaOps::forward_fp8(args, out, params);
}
#endif

// hstu_varlen_bwd(Tensor dout, ..., bool has_drab, bool has_dtables) -> six gradients
template <typename DeviceOps>
void bwd(StableIValue* stack, uint64_t, uint64_t) {
  StackReader in(stack);
  TensorView dout;
  in.read(dout);
  const Arguments args(in, false);
  bool has_drab = false, has_dtables = false;
  in.read(has_drab);
  in.read(has_dtables);
  BackwardParams params;
  to_params(args, params);

  const TensorView& q = args.q;
  if (has_drab && !args.rab) fail("rab", "a tensor where has_drab is set", "None");
  const auto gradient = [&](bool wanted, const OptionalView& of, std::optional<ScalarType> dtype) {
    return wanted && of ? allocate(*of, of->sizes, dtype) : no_gradient(q);
  };
  const Tensor outputs[] = {allocate(q, q.sizes),
                            allocate(args.k, args.k.sizes),
                            allocate(args.v, args.v.sizes),
                            gradient(has_drab, args.rab, std::nullopt),
                            gradient(has_dtables, args.pos_weight, ScalarType::Float),
                            gradient(has_dtables, args.ts_weight, ScalarType::Float)};
  Gradients gradients = {
      written_view(outputs[0]), written_view(outputs[1]), written_view(outputs[2]), {}, {}, {}};
  if (has_drab) gradients.drab = written_view(outputs[3]);
  if (has_dtables && args.pos_weight) gradients.dpos_weight = written_view(outputs[4]);
  if (has_dtables && args.ts_weight) gradients.dts_weight = written_view(outputs[5]);
  DeviceOps::check(args, params);
  set_gradients(dout, gradients, args, params);
  DeviceOps::backward(args, dout, gradients, params);
  for (int n = 0; n < 6; ++n) stack[n] = from(outputs[n]);
}

// hstu_varlen_bwd_out(Tensor dout, ..., Tensor(a!) dq, ...) -> ()
template <typename DeviceOps>
void bwd_out(StableIValue* stack, uint64_t, uint64_t) {
  StackReader in(stack);
  TensorView dout;
  in.read(dout);
  const Arguments args(in, false);
  Gradients gradients;
  gradients.for_each([&in](auto& gradient) { in.read_written(gradient); });
  BackwardParams params;
  to_params(args, params);
  DeviceOps::check(args, params);
  set_gradients(dout, gradients, args, params);
  DeviceOps::backward(args, dout, gradients, params);
}

// append_paged_kv(..., Tensor(a!) kv_cache, ..., Tensor(b!)? kv_scales) -> ()
template <typename DeviceOps>
void append(StableIValue* stack, uint64_t, uint64_t) {
  StackReader in(stack);
  const AppendArguments args(in);
  AppendParams params;
  to_params(args, params);
  if (params.batch.batch > 0 && params.batch.total_q > 0) DeviceOps::append(args, params);
}

// quantize_qkv(...) -> ten tensors
template <typename DeviceOps>
void quantize(StableIValue* stack, uint64_t, uint64_t) {
  StackReader in(stack);
  const QuantizeArguments args(in);
  QuantizeParams params;
  to_params(args, params);
  const int64_t total_q = params.batch.total_q, total_k = params.batch.total_k;
  const int64_t heads = params.heads, blocks = max_blocks(total_k, params.batch.batch);
  const int64_t head_dim8 = round_up(params.q.head_dim, kQuantizedHeadDimUnit);
  const auto codes = [&](std::initializer_list<int64_t> sizes) {
    return allocate(args.q, sizes, ScalarType::Float8_e4m3fn);
  };
  const auto floats = [&](std::initializer_list<int64_t> sizes) {
    return allocate(args.q, sizes, ScalarType::Float);
  };
  const Tensor tensors[QuantizeOutputs::kCount] = {
      codes({total_q, heads, head_dim8}),
      codes({total_k, heads, head_dim8}),
      codes({blocks, heads, params.v.head_dim, Fp8Params::kBlock}),
      floats({heads, total_q}),
      floats({heads, blocks}),
      floats({heads, blocks}),
      floats({heads, total_q}),
      floats({heads, blocks}),
      params.smooth_k ? floats({heads, total_q}) : floats({0}),
      params.smooth_k ? floats({params.batch.batch, heads, params.k.head_dim}) : floats({0})};
  QuantizeOutputs outputs;
  for (int n = 0; n < QuantizeOutputs::kCount; ++n) outputs.tensors[n] = written_view(tensors[n]);
  set_outputs(outputs, params);
  DeviceOps::quantize(args, outputs, params);
  for (int n = 0; n < QuantizeOutputs::kCount; ++n) stack[n] = from(tensors[n]);
}

// These stand for composed_fwd and composed_bwd (hstu_attn/composed.py) in a program without
// Python: they take the arguments and return false, because they have computed nothing.
void no_composed_fwd(StableIValue* stack, uint64_t, uint64_t) {
  StackReader in(stack);
  const Arguments args(in, true);
  TensorView out;
  in.read(out);
  stack[0] = from(false);
}

void no_composed_bwd(StableIValue* stack, uint64_t, uint64_t) {
  StackReader in(stack);
  TensorView dout;
  in.read(dout);
  const Arguments args(in, false);
  Gradients gradients;
  gradients.for_each([&in](auto& gradient) { in.read(gradient); });
  stack[0] = from(false);
}

void no_composed_quantize(StableIValue* stack, uint64_t, uint64_t) {
  StackReader in(stack);
  const QuantizeArguments args(in);
  QuantizeOutputs outputs;
  for (TensorView& tensor : outputs.tensors) in.read(tensor);
  stack[0] = from(false);
}

}  // namespace
}  // namespace hstu

STABLE_TORCH_LIBRARY(hstu_attn, m) {
  m.def("hstu_varlen_fwd(" HSTU_CALL_SCHEMA HSTU_PAGED_SCHEMA ") -> Tensor");
  m.def("hstu_varlen_fwd_out(" HSTU_CALL_SCHEMA HSTU_PAGED_SCHEMA ", Tensor(a!) out) -> ()");
  m.def("hstu_varlen_bwd(Tensor dout, " HSTU_CALL_SCHEMA
        ", bool has_drab, bool has_dtables) -> (Tensor dq, Tensor dk, Tensor dv, Tensor drab, "
        "Tensor dpos_weight, Tensor dts_weight)");
  m.def("hstu_varlen_bwd_out(Tensor dout, " HSTU_CALL_SCHEMA
        ", Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? drab, "
        "Tensor(e!)? dpos_weight, Tensor(f!)? dts_weight) -> ()");
  m.def("backward_of_silu(Tensor dout, " HSTU_CALL_SCHEMA
        ", Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv) -> ()");
  m.def("forward_fp8(" HSTU_CALL_SCHEMA HSTU_FP8_SCHEMA ", Tensor(a!) out) -> ()");
  m.def("composed_fwd(" HSTU_CALL_SCHEMA HSTU_PAGED_SCHEMA ", Tensor(a!) out) -> bool");
  m.def("composed_bwd(Tensor dout, " HSTU_CALL_SCHEMA
        ", Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? drab, "
        "Tensor(e!)? dpos_weight, Tensor(f!)? dts_weight) -> bool");
  m.def("quantize_qkv(" HSTU_QUANTIZE_SCHEMA("=None", "=False") ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, "
        "Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("composed_quantize(" HSTU_QUANTIZE_SCHEMA(
      "",
      "") ", Tensor(a!) q8, Tensor(b!) k8, Tensor(c!) v8, Tensor(d!) out_q_descale, "
          "Tensor(e!) out_k_descale, Tensor(f!) out_v_descale, Tensor(g!) q_norm, "
          "Tensor(h!) k_norm, Tensor(i!) q_mean_product, Tensor(j!) k_mean) -> bool");
  m.def("linear_fp8(" HSTU_PROJECTION_SCHEMA "Tensor residual) -> Tensor");
  m.def("project_fp8(" HSTU_PROJECTION_SCHEMA
        "Tensor cu_seqlens, int heads, bool keeps_z) -> (Tensor, Tensor, Tensor, Tensor, Tensor, "
        "Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "append_paged_kv(Tensor k, Tensor v, Tensor(a!) kv_cache, Tensor page_offsets, "
      "Tensor page_ids, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? num_targets, "
      "Tensor(b!)? kv_scales) -> ()");
}

#define HSTU_REGISTER(DeviceOps)                                 \
  m.impl("hstu_varlen_fwd", hstu::fwd<hstu::DeviceOps>);         \
  m.impl("hstu_varlen_fwd_out", hstu::fwd_out<hstu::DeviceOps>); \
  m.impl("hstu_varlen_bwd", hstu::bwd<hstu::DeviceOps>);         \
  m.impl("hstu_varlen_bwd_out", hstu::bwd_out<hstu::DeviceOps>); \
  m.impl("append_paged_kv", hstu::append<hstu::DeviceOps>);      \
  m.impl("quantize_qkv", hstu::quantize<hstu::DeviceOps>)

STABLE_TORCH_LIBRARY_IMPL(hstu_attn, CPU, m) { HSTU_REGISTER(CpuOps); }
// The kernels that Python registers for a device take precedence over these.
STABLE_TORCH_LIBRARY_IMPL(hstu_attn, CompositeExplicitAutograd, m) {
  m.impl("composed_fwd", hstu::no_composed_fwd);
  m.impl("composed_bwd", hstu::no_composed_bwd);
  m.impl("composed_quantize", hstu::no_composed_quantize);
}
#if defined(USE_CUDA)
STABLE_TORCH_LIBRARY_IMPL(hstu_attn, CUDA, m) {
  HSTU_REGISTER(CudaOps);
  m.impl("forward_fp8", hstu::forward_fp8);
  m.impl("backward_of_silu", hstu::backward_of_silu);
#if defined(HSTU_ATTN_SM90) && defined(HSTU_ATTN_DTYPE_E4M3)
  m.impl("linear_fp8", hstu::linear_fp8);
  m.impl("project_fp8", hstu::project_fp8);
#endif
}
#endif
