// The dispatcher ops: schemas, outputs, registration. See arguments.h for what is checked.
#include "ops.h"

#include <cstring>

#include "cpu/runner.h"

namespace hstu {
namespace {

using torch::stable::detail::from;

// Empty outputs stand for gradients that were not asked for.
Tensor no_gradient(const Tensor& q) { return allocate(q, {0}); }

void set_output(const Tensor& out, const Arguments& args, ForwardParams& params) {
  params.out = to_packed("out", out, args.q, args.q.size(0), args.q.size(1), args.v.size(2),
                         "(total_q, heads, head_dim_v)", true);
}

float* to_table_gradient(const char* name, Tensor& gradient, const OptionalTensor& weight,
                         const char* weight_name) {
  if (!weight) fail(name, join("None without ", weight_name), "a tensor");
  check_device(name, gradient, *weight);
  check_dtype(name, gradient, ScalarType::Float, "float32");
  check_shape(name, gradient, {weight->size(0), weight->size(1)}, weight_name);
  if (!gradient.is_contiguous()) fail(name, "a contiguous tensor", describe_strides(gradient));
  torch::stable::zero_(gradient);
  return static_cast<float*>(writable(gradient));
}

void set_gradients(const Tensor& dout, Gradients& gradients, const Arguments& args,
                   BackwardParams& params) {
  const Tensor& q = args.q;
  const int64_t total_q = q.size(0), total_k = args.k.size(0), heads = q.size(1);
  const int64_t d = q.size(2), dv = args.v.size(2);
  params.dout =
      to_packed("dout", dout, q, total_q, heads, dv, "(total_q, heads, head_dim_v)", false);
  params.dq =
      to_packed("dq", gradients.dq, q, total_q, heads, d, "(total_q, heads, head_dim)", true);
  params.dk =
      to_packed("dk", gradients.dk, q, total_k, heads, d, "(total_k, heads, head_dim)", true);
  params.dv =
      to_packed("dv", gradients.dv, q, total_k, heads, dv, "(total_k, heads, head_dim_v)", true);
  if (gradients.drab) {
    Tensor& drab = *gradients.drab;
    if (!args.rab) fail("drab", "None without rab", "a tensor");
    check_device("drab", drab, q);
    check_dtype("drab", drab, args.rab->scalar_type(), "the dtype of rab");
    check_shape("drab", drab,
                {args.rab->size(0), args.rab->size(1), args.rab->size(2), args.rab->size(3)},
                "of rab");
    check_last_stride("drab", drab);
    params.drab = to_dense_bias(drab, params.rab.dtype, true);
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
  static void forward(const Arguments&, Tensor&, ForwardParams& params) {
    cpu::run_forward(params, torch_threads());
  }
  static void backward(const Arguments&, const Tensor&, Gradients& gradients,
                       BackwardParams& params) {
    if (gradients.drab) torch::stable::zero_(*gradients.drab);
    cpu::run_backward(params, torch_threads());
  }
  static void append(const AppendArguments&, const AppendParams& params) {
    check_values(params);
    const auto at = [&](const void* data, int64_t elements) {
      return static_cast<char*>(const_cast<void*>(data)) + elements * params.element_bytes;
    };
    const PackedTensor &k = params.k, &v = params.v;
    const size_t bytes = size_t(k.head_dim) * params.element_bytes;
    for (int64_t row = 0; row < params.batch.total_q; ++row) {
      const int64_t slot = find_slot(params, row);
      for (int head = 0; slot >= 0 && head < params.heads; ++head) {
        char* to = at(params.paged.kv_cache, slot + head * params.paged.head_stride);
        std::memcpy(to, at(k.data, row * k.row_stride + head * k.head_stride), bytes);
        std::memcpy(to + params.paged.kv_stride * params.element_bytes,
                    at(v.data, row * v.row_stride + head * v.head_stride), bytes);
      }
    }
  }
};

// --------------------------------------------------------------------------------- boxed kernels

// hstu_varlen_fwd(..., ) -> Tensor
template <typename DeviceOps>
void fwd(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader in(stack);
  const Arguments args(in, true);
  ForwardParams params;
  to_params(args, params);
  Tensor out = allocate(args.q, {args.q.size(0), args.q.size(1), args.v.size(2)});
  DeviceOps::check(args, params);
  set_output(out, args, params);
  DeviceOps::forward(args, out, params);
  stack[0] = from(out);
}

// hstu_varlen_fwd_out(..., Tensor(a!) out) -> ()
template <typename DeviceOps>
void fwd_out(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader in(stack);
  const Arguments args(in, true);
  Tensor out = in.read<Tensor>();
  ForwardParams params;
  to_params(args, params);
  DeviceOps::check(args, params);
  set_output(out, args, params);
  DeviceOps::forward(args, out, params);
}

// hstu_varlen_bwd(Tensor dout, ..., bool has_drab, bool has_dtables) -> six gradients
template <typename DeviceOps>
void bwd(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader in(stack);
  const Tensor dout = in.read<Tensor>();
  const Arguments args(in, false);
  const bool has_drab = in.read<bool>();
  const bool has_dtables = in.read<bool>();
  BackwardParams params;
  to_params(args, params);

  const Tensor &q = args.q, &k = args.k, &v = args.v;
  Gradients gradients = {
      allocate(q, q.sizes()), allocate(k, k.sizes()), allocate(v, v.sizes()), {}, {}, {}};
  if (has_drab) {
    if (!args.rab) fail("rab", "a tensor where has_drab is set", "None");
    gradients.drab = allocate(*args.rab, args.rab->sizes());
  }
  const auto table_gradient = [&](const OptionalTensor& weight) -> OptionalTensor {
    if (!has_dtables || !weight) return std::nullopt;
    return allocate(*weight, weight->sizes(), ScalarType::Float);
  };
  gradients.dpos_weight = table_gradient(args.pos_weight);
  gradients.dts_weight = table_gradient(args.ts_weight);
  DeviceOps::check(args, params);
  set_gradients(dout, gradients, args, params);
  DeviceOps::backward(args, dout, gradients, params);

  stack[0] = from(gradients.dq);
  stack[1] = from(gradients.dk);
  stack[2] = from(gradients.dv);
  stack[3] = from(gradients.drab ? *gradients.drab : no_gradient(q));
  stack[4] = from(gradients.dpos_weight ? *gradients.dpos_weight : no_gradient(q));
  stack[5] = from(gradients.dts_weight ? *gradients.dts_weight : no_gradient(q));
}

// hstu_varlen_bwd_out(Tensor dout, ..., Tensor(a!) dq, ...) -> ()
template <typename DeviceOps>
void bwd_out(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader in(stack);
  const Tensor dout = in.read<Tensor>();
  const Arguments args(in, false);
  Gradients gradients = {in.read<Tensor>(), in.read<Tensor>(), in.read<Tensor>(), {}, {}, {}};
  in.read(gradients.drab);
  in.read(gradients.dpos_weight);
  in.read(gradients.dts_weight);
  BackwardParams params;
  to_params(args, params);
  DeviceOps::check(args, params);
  set_gradients(dout, gradients, args, params);
  DeviceOps::backward(args, dout, gradients, params);
}

// append_paged_kv(..., Tensor(a!) kv_cache, ...) -> ()
template <typename DeviceOps>
void append(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentReader in(stack);
  const AppendArguments args(in);
  AppendParams params;
  to_params(args, params);
  if (params.batch.batch > 0 && params.batch.total_q > 0) DeviceOps::append(args, params);
}

}  // namespace
}  // namespace hstu

STABLE_TORCH_LIBRARY(hstu_attn, m) {
  m.def("hstu_varlen_fwd(" HSTU_SHARED_SCHEMA HSTU_PAGED_SCHEMA HSTU_OPTIONS_SCHEMA ") -> Tensor");
  m.def("hstu_varlen_fwd_out(" HSTU_SHARED_SCHEMA HSTU_PAGED_SCHEMA HSTU_OPTIONS_SCHEMA
        ", Tensor(a!) out) -> ()");
  m.def("hstu_varlen_bwd(Tensor dout, " HSTU_SHARED_SCHEMA HSTU_OPTIONS_SCHEMA
        ", bool has_drab, bool has_dtables) -> (Tensor dq, Tensor dk, Tensor dv, Tensor drab, "
        "Tensor dpos_weight, Tensor dts_weight)");
  m.def("hstu_varlen_bwd_out(Tensor dout, " HSTU_SHARED_SCHEMA HSTU_OPTIONS_SCHEMA
        ", Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? drab, "
        "Tensor(e!)? dpos_weight, Tensor(f!)? dts_weight) -> ()");
  m.def(
      "append_paged_kv(Tensor k, Tensor v, Tensor(a!) kv_cache, Tensor page_offsets, "
      "Tensor page_ids, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? num_targets) -> ()");
}

#define HSTU_REGISTER(DeviceOps)                                 \
  m.impl("hstu_varlen_fwd", hstu::fwd<hstu::DeviceOps>);         \
  m.impl("hstu_varlen_fwd_out", hstu::fwd_out<hstu::DeviceOps>); \
  m.impl("hstu_varlen_bwd", hstu::bwd<hstu::DeviceOps>);         \
  m.impl("hstu_varlen_bwd_out", hstu::bwd_out<hstu::DeviceOps>); \
  m.impl("append_paged_kv", hstu::append<hstu::DeviceOps>)

STABLE_TORCH_LIBRARY_IMPL(hstu_attn, CPU, m) { HSTU_REGISTER(CpuOps); }
#if defined(USE_CUDA)
STABLE_TORCH_LIBRARY_IMPL(hstu_attn, CUDA, m) { HSTU_REGISTER(CudaOps); }
#endif
