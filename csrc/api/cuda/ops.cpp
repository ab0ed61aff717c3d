// The operators on a GPU. They copy tensors that kernels cannot read, allocate workspaces and
// launch kernels.
#include "../ops.h"

#include <torch/csrc/stable/accelerator.h>

#include <array>
#include <climits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "../../common/arena.h"
#include "../../common/cuda_check.h"
#include "../../dispatch.h"
#include "../../environment.h"
#include "../../quantize/paged.h"
#include "../composed.h"
#include "../stable_tensor.h"

// NOTE: this is a weak symbol, because only libtorch_cuda defines it, and this library must also
// load with a torch for CPUs.
#pragma weak aoti_torch_get_current_cuda_stream

namespace hstu {
namespace {

using torch::stable::accelerator::DeviceGuard;

cudaStream_t current_stream(int device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return static_cast<cudaStream_t>(stream);
}

// True if torch's functions compute the call, because this library has no kernel for it.
bool is_composed(const ForwardParams& params) {
  return params.dtype == DType::kFloat32 || params.dtype == DType::kFloat64;
}

// ------------------------------------------------------------------------------------ alignment

// True if kernels can access the tensor: 16 bytes at a time, with row strides that fit an int.
bool is_aligned(const PackedTensor& packed) {
  return reinterpret_cast<uintptr_t>(packed.data) % 16 == 0 && packed.row_stride % 8 == 0 &&
         packed.head_stride % 8 == 0 && packed.row_stride <= INT_MAX;
}

// Contiguous copies of tensors that are not aligned. They are allocated on the stream of the
// kernels, so they may be freed as soon as the kernels have been launched.
class AlignedCopies {
 public:
  void input(const TensorView& tensor, PackedTensor& packed) {
    if (is_aligned(packed)) return;
    Tensor copy = replace(tensor, packed);
    torch::stable::copy_(copy, as_tensor(tensor));
  }
  void inputs(const Arguments& args, ForwardParams& params) {
    input(args.q, params.q);
    input(args.k, params.k);
    input(args.v, params.v);
    if (args.kv_cache) pages(*args.kv_cache, params.paged);
  }
  void pages(const TensorView& cache, PagedParams& paged) {
    // NOTE: if the head dim is an odd multiple of 8, e4m3 rows cannot all begin at multiples of 16
    // bytes, and the kernels do not need them to.
    const int unit = paged.scales && cache.size(4) % 16 == 0 ? 16 : 8;
    const bool aligned = reinterpret_cast<uintptr_t>(paged.kv_cache) % 16 == 0 &&
                         paged.page_stride % unit == 0 && paged.kv_stride % unit == 0 &&
                         paged.slot_stride % unit == 0 && paged.head_stride % unit == 0;
    if (aligned) return;
    Tensor copy = allocate(cache, cache.sizes);
    torch::stable::copy_(copy, as_tensor(cache));
    inputs_.push_back(copy);
    paged.kv_cache = copy.mutable_data_ptr();
    paged.page_stride = copy.stride(0);
    paged.kv_stride = copy.stride(1);
    paged.slot_stride = copy.stride(2);
    paged.head_stride = copy.stride(3);
  }
  // Copies a bias that sm90's kernels cannot read, where that makes the call faster.
  void bias(const Arguments& args, ForwardParams& params, const CudaDevice& device,
            bool is_backward) {
    if (!args.rab) return;
    const std::optional<DenseBias> found = faster_rab(device, params, is_backward);
    if (!found) return;
    const int64_t length = found->length, columns = found->row_stride;
    const int64_t heads = found->head_stride ? found->heads : 1;
    const int64_t batch = found->batch_stride ? params.batch.batch : 1;
    const auto part = [&](const Tensor& tensor, std::array<int64_t, 4> strides) {
      const std::array sizes = {batch, heads, length, length};
      AtenTensorHandle handle = nullptr;
      TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(tensor.get(), 4, sizes.data(),
                                                            strides.data(), 0, &handle));
      return Tensor(handle);
    };
    const Tensor whole = allocate(*args.rab, {batch, heads, length, columns});
    Tensor copy = part(whole, {whole.stride(0), whole.stride(1), columns, 1});
    const std::span<const int64_t> given = args.rab->strides;
    torch::stable::copy_(copy, part(as_tensor(*args.rab), {given[0], given[1], given[2], 1}));
    params.rab = *found;
    params.rab.data = whole.mutable_data_ptr();
    inputs_.push_back(whole);
  }
  // Copies a dense bias whose rows are not aligned, or that has more than 16 bits, for the kernels
  // of e4m3: such a call has no other kernels to fall back to.
  void fp8_bias(const OptionalView& rab, DenseBias& bias) {
    if (!rab) return;
    const bool is_wide = bias.dtype != DType::kBFloat16 && bias.dtype != DType::kFloat16;
    const auto is_step = [](int64_t stride, int64_t count) {
      return count == 1 || (stride > 0 && stride % 8 == 0);
    };
    if (!is_wide && reinterpret_cast<uintptr_t>(bias.data) % 16 == 0 &&
        is_step(bias.row_stride, 2) && is_step(bias.head_stride, rab->size(1)) &&
        is_step(bias.batch_stride, rab->size(0))) {
      return;
    }
    const int64_t sizes[] = {rab->size(0), rab->size(1), rab->size(2), round_up(bias.length, 8)};
    const Tensor padded =
        allocate(*rab, Sizes(sizes, 4), is_wide ? ScalarType::BFloat16 : rab->dtype);
    inputs_.push_back(padded);
    Tensor whole = padded;
    Tensor copy = torch::stable::narrow(whole, 3, 0, bias.length);
    torch::stable::copy_(copy, as_tensor(*rab));
    bias.data = whole.mutable_data_ptr();
    if (is_wide) bias.dtype = DType::kBFloat16;
    bias.batch_stride = whole.stride(0);
    bias.head_stride = whole.stride(1);
    bias.row_stride = whole.stride(2);
  }
  void output(const TensorView& tensor, PackedTensor& packed) {
    if (!is_aligned(packed)) outputs_.emplace_back(tensor, replace(tensor, packed));
  }
  void copy_back() {
    for (const auto& [tensor, copy] : outputs_) {
      Tensor to = as_tensor(tensor);
      torch::stable::copy_(to, copy);
    }
  }

 private:
  Tensor replace(const TensorView& tensor, PackedTensor& packed) {
    const Tensor copy = allocate(tensor, tensor.sizes);
    packed.data = copy.mutable_data_ptr();
    packed.row_stride = copy.stride(0);
    packed.head_stride = copy.stride(1);
    return inputs_.emplace_back(copy);
  }

  std::vector<Tensor> inputs_;
  std::vector<std::pair<TensorView, Tensor>> outputs_;
};

// --------------------------------------------------------------------------- HSTU_ATTN_CHECK=1

// Copies index arrays to host memory, and waits for the stream.
class HostCopies {
 public:
  explicit HostCopies(cudaStream_t stream) : stream_(stream) {}

  void replace(IndexArray& array, size_t count) {
    if (!array) return;
    std::vector<char>& copy = copies_.emplace_back(count * (array.is_int64 ? 8 : 4));
    check_cuda(
        cudaMemcpyAsync(copy.data(), array.data, copy.size(), cudaMemcpyDeviceToHost, stream_),
        "HSTU_ATTN_CHECK");
    check_cuda(cudaStreamSynchronize(stream_), "HSTU_ATTN_CHECK");
    array.data = copy.data();
  }

 private:
  cudaStream_t stream_;
  std::vector<std::vector<char>> copies_;
};

void replace_index_arrays(HostCopies& copies, BatchParams& batch) {
  const size_t count = batch.batch;
  copies.replace(batch.cu_seqlens_q, count + 1);
  copies.replace(batch.cu_seqlens_k, count + 1);
  copies.replace(batch.seqused_q, count);
  copies.replace(batch.seqused_k, count);
  copies.replace(batch.num_contexts, count);
  copies.replace(batch.num_targets, count);
}

template <typename Params>
void replace_index_arrays(HostCopies& copies, Params& params) {
  replace_index_arrays(copies, params.batch);
  const size_t count = params.batch.batch;
  PagedParams& paged = params.paged;
  copies.replace(paged.page_offsets, count + 1);
  copies.replace(paged.page_ids, paged.num_page_ids);
  copies.replace(paged.last_page_lens, count);
}

void check_values_on_host(const Arguments& args, ForwardParams params) {
  const int device_index = args.q.device_index;
  const DeviceGuard guard(device_index);
  HostCopies copies(current_stream(device_index));
  replace_index_arrays(copies, params);
  RelativeBias& bias = params.relative_bias;
  IndexArray thresholds = {bias.thresholds, /*is_int64=*/true};
  copies.replace(thresholds, bias.num_thresholds);
  bias.thresholds = static_cast<const int64_t*>(thresholds.data);
  check_values(params, args);
}

// ------------------------------------------------------------------------------------------ FP8

// True if the e4m3 kernels can read the rows of the e4m3 tensor; see sm90/kernels.h.
bool has_e4m3_rows(const PackedTensor& packed) {
  const auto is_step = [](int64_t stride) { return stride > 0 && stride % 16 == 0; };
  return reinterpret_cast<uintptr_t>(packed.data) % 16 == 0 && is_step(packed.row_stride) &&
         is_step(packed.head_stride);
}

// Lays out the outputs of `quantize` in `memory`, to which `params` refers afterwards. Returns the
// number of bytes that they take, also if `memory` is null. q and k that kernels can read in place
// are not copied.
int64_t lay_out(QuantizeParams& quantize, void* memory, ForwardParams& params) {
  Arena<256> arena(memory);
  const BatchParams& batch = quantize.batch;
  const int64_t heads = quantize.heads, blocks = max_blocks(batch.total_k, batch.batch);
  const auto take_rows = [&](const PackedTensor& from, int64_t rows, PackedTensor& to) -> uint8_t* {
    to = from;
    if (quantize.dtype == DType::kFloat8E4M3 && has_e4m3_rows(from)) return nullptr;
    to.head_stride = round_up(from.head_dim, kQuantizedHeadDimUnit);
    to.row_stride = heads * to.head_stride;
    auto* codes = arena.take<uint8_t>(rows * to.row_stride);
    to.data = codes;
    return codes;
  };
  const int64_t value_rows = quantize.v.head_dim * int64_t{Fp8Params::kBlock};
  quantize.q8 = take_rows(quantize.q, batch.total_q, params.q);
  quantize.k8 = take_rows(quantize.k, batch.total_k, params.k);
  quantize.v8 = arena.take<uint8_t>(blocks * heads * value_rows);
  quantize.q_descale = arena.take<float>(heads * batch.total_q);
  quantize.k_descale = arena.take<float>(heads * blocks);
  quantize.v_descale = arena.take<float>(heads * blocks);
  quantize.q_norm = arena.take<float>(heads * batch.total_q);
  quantize.k_norm = arena.take<float>(heads * blocks);
  if (quantize.smooth_k) quantize.q_mean_product = arena.take<float>(heads * batch.total_q);
  quantize.workspace = nullptr;
  quantize.workspace = arena.take<char>(quantize_workspace_bytes(quantize));
  params.dtype = DType::kFloat8E4M3;
  params.v = {quantize.v8, heads * value_rows, value_rows, quantize.v.head_dim};
  params.fp8 = {quantize.q_descale,
                quantize.k_descale,
                quantize.v_descale,
                quantize.q_norm,
                quantize.k_norm,
                quantize.q_mean_product,
                blocks,
                limits_norms(quantize)};
  return arena.used();
}

// lay_out() for a call with pages.
int64_t lay_out(PagedQuantizeParams& quantize, void* memory, ForwardParams& params) {
  Arena<256> arena(memory);
  const int64_t rows = quantize.batch.total_q, heads = quantize.heads;
  const auto take_rows = [&](PackedTensor& to) {
    to.head_stride = round_up(to.head_dim, kQuantizedHeadDimUnit);
    to.row_stride = heads * to.head_stride;
    auto* codes = arena.take<uint8_t>(rows * to.row_stride);
    to.data = codes;
    return codes;
  };
  quantize.q8 = take_rows(params.q);
  quantize.k8 = take_rows(params.k);
  quantize.v8 = take_rows(params.v);
  for (float** to : {&quantize.q_descale, &quantize.k_descale, &quantize.v_descale}) {
    *to = arena.take<float>(heads * rows);
  }
  const int64_t page_heads = quantize.paged.num_page_ids * 2 * heads;
  quantize.page_scales = arena.take<float>(page_heads * quantize.paged.page_size);
  quantize.page_descales = arena.take<float>(page_heads);
  params.dtype = DType::kFloat8E4M3;
  params.fp8 = {.q_descale = quantize.q_descale,
                .k_descale = quantize.k_descale,
                .v_descale = quantize.v_descale,
                .page_scales = quantize.page_scales,
                .page_descales = quantize.page_descales};
  return arena.used();
}

// -------------------------------------------------------------------------------------- launches

// One call of an operator. While it exists, the device of q is the current one.
class Call {
 public:
  explicit Call(const Arguments& args) : q_(args.q), guard_(q_.device_index) {
    launch_.device = cuda_device(q_.device_index);
    launch_.stream = current_stream(q_.device_index);
    launch_.sm_margin = static_cast<int>(args.sm_margin);
    launch_.deterministic = args.deterministic;
  }

  const CudaDevice& device() const { return launch_.device; }
  const CudaLaunch& launch() const { return launch_; }

  void run(const ForwardKernel& kernel, const ForwardParams& params) {
    const ForwardPlan plan = kernel.plan(params, launch_);
    const std::optional<Tensor> workspace = take_workspace(plan.workspace_bytes);
    plan.prepare(plan, params, launch_);
    plan.run(plan, params, launch_);
  }
  // Quantizes q, k and v, and runs the e4m3 forward with them. `params` describes the call before
  // quantization.
  template <typename Quantize>
  void run_quantized(Quantize& quantize, ForwardParams params) {
    const int64_t bytes = lay_out(quantize, nullptr, params);
    const ForwardPlan plan = forward_kernel(launch_, params).plan(params, launch_);
    const std::optional<Tensor> workspace = take_workspace(bytes + plan.workspace_bytes);
    lay_out(quantize, launch_.workspace, params);
    launch_.workspace = static_cast<char*>(launch_.workspace) + bytes;
    if constexpr (std::is_same_v<Quantize, PagedQuantizeParams>) {
      // The kernel that makes the work list, if there is one, runs at the same time.
      const bool starts_early = plan.prepare(plan, params, launch_);
      quantize_paged_call(quantize, launch_, starts_early);
    } else {
      quantize_qkv(quantize, launch_.stream);
      plan.prepare(plan, params, launch_);
    }
    plan.run(plan, params, launch_);
  }
  void run(const BackwardKernel& kernel, const BackwardParams& params) {
    const std::optional<Tensor> workspace = take_workspace(kernel.workspace_bytes(params, launch_));
    kernel.run(params, launch_);
  }

 private:
  // Allocates the workspace, which may be freed as soon as the kernels have been launched.
  std::optional<Tensor> take_workspace(int64_t bytes) {
    if (bytes == 0) return std::nullopt;
    Tensor workspace = allocate(q_, {bytes}, ScalarType::Byte);
    launch_.workspace = workspace.mutable_data_ptr();
    return workspace;
  }

  const TensorView& q_;
  DeviceGuard guard_;
  CudaLaunch launch_;
};

bool has_work(const BatchParams& batch) {
  return batch.batch > 0 && batch.total_q > 0 && batch.total_k > 0;
}

}  // namespace

void CudaOps::check(const Arguments& args, const ForwardParams& params) {
  if (environment::checks_values()) check_values_on_host(args, params);
}

void CudaOps::forward(const Arguments& args, const TensorView& out, ForwardParams& params) {
  Call call(args);
  if (!has_work(params.batch)) {
    fill_with_zeros(out);
    return;
  }
  if (is_composed(params)) return composed_forward(args, out);
  AlignedCopies copies;
  copies.inputs(args, params);
  copies.output(out, params.out);
  if (args.quant_mode >= 0 && args.kv_cache) {
    PagedQuantizeParams quantize = {.q = params.q,
                                    .k = params.k,
                                    .v = params.v,
                                    .heads = params.heads,
                                    .dtype = params.dtype,
                                    .batch = params.batch,
                                    .paged = params.paged};
    call.run_quantized(quantize, params);
  } else if (args.quant_mode >= 0 || params.dtype == DType::kFloat8E4M3) {
    copies.fp8_bias(args.rab, params.rab);
    QuantizeParams quantize;
    to_params(args, params, quantize);
    call.run_quantized(quantize, params);
  } else {
    copies.bias(args, params, call.device(), /*is_backward=*/false);
    call.run(forward_kernel(call.launch(), params), params);
  }
  copies.copy_back();
}

void CudaOps::forward_fp8(const Arguments& args, const TensorView& out, ForwardParams& params) {
  Call call(args);
  if (!has_work(params.batch)) {
    fill_with_zeros(out);
    return;
  }
  AlignedCopies copies;
  copies.fp8_bias(args.rab, params.rab);
  copies.output(out, params.out);
  call.run(forward_kernel(call.launch(), params), params);
  copies.copy_back();
}

void CudaOps::backward(const Arguments& args, const TensorView& dout, const Gradients& gradients,
                       BackwardParams& params) {
  Call call(args);
  if (!has_work(params.batch)) {
    for (const TensorView* tensor : {&gradients.dq, &gradients.dk, &gradients.dv}) {
      fill_with_zeros(*tensor);
    }
    for (const auto* bias : {&gradients.drab, &gradients.dpos_weight, &gradients.dts_weight}) {
      if (*bias) fill_with_zeros(**bias);
    }
    return;
  }
  if (is_composed(params)) return composed_backward(args, dout, gradients);
  AlignedCopies copies;
  copies.inputs(args, params);
  copies.bias(args, params, call.device(), /*is_backward=*/true);
  copies.input(dout, params.dout);
  copies.output(gradients.dq, params.dq);
  copies.output(gradients.dk, params.dk);
  copies.output(gradients.dv, params.dv);
  const BackwardKernel kernel = backward_kernel(call.launch(), params);
  if (gradients.drab && !kernel.writes_drab_whole) fill_with_zeros(*gradients.drab);
  call.run(kernel, params);
  copies.copy_back();
}

void CudaOps::append(const AppendArguments& args, const AppendParams& params) {
  if (params.paged.scales && params.element_bytes != 2) {
    throw NotImplemented("k: on a GPU bfloat16 and float16 are built beside kv_scales, got " +
                         describe_dtype(args.k));
  }
  const int device_index = args.k.device_index;
  const DeviceGuard guard(device_index);
  if (environment::checks_values()) {
    HostCopies copies(current_stream(device_index));
    AppendParams copied = params;
    replace_index_arrays(copies, copied);
    check_values(copied);
  }
  append_on_gpu(params, cuda_device(device_index).multiprocessors, current_stream(device_index));
}

void CudaOps::quantize(const QuantizeArguments& args, const QuantizeOutputs&,
                       QuantizeParams& params) {
  const int device_index = args.q.device_index;
  const DeviceGuard guard(device_index);
  const int capability = cuda_device(device_index).capability;
  if (capability < 90) {
    throw NotImplemented("q: quantize_qkv needs a GPU of compute capability 9.0 or later, got " +
                         std::to_string(capability / 10) + "." + std::to_string(capability % 10));
  }
  if (environment::checks_values()) {
    HostCopies copies(current_stream(device_index));
    QuantizeParams copied = params;
    replace_index_arrays(copies, copied.batch);
    check_values(copied);
  }
  AlignedCopies copies;
  copies.input(args.q, params.q);
  copies.input(args.k, params.k);
  copies.input(args.v, params.v);
  const int64_t bytes = quantize_workspace_bytes(params);
  const Tensor workspace = allocate(args.q, {bytes}, ScalarType::Byte);
  params.workspace = workspace.mutable_data_ptr();
  quantize_qkv(params, current_stream(device_index));
}

void CudaOps::project(const TensorView& x, const ProjectionParams& params) {
  if (params.batch.total_k == 0) return;
  const DeviceGuard guard(x.device_index);
  CudaLaunch launch;
  launch.device = cuda_device(x.device_index);
  launch.stream = current_stream(x.device_index);
  launch_projection(params, launch);
}

}  // namespace hstu
