// The operators on a GPU: makes copies of tensors that kernels cannot read, allocates workspaces
// and launches kernels.
#include "../ops.h"

#include <torch/csrc/stable/accelerator.h>

#include <climits>
#include <utility>
#include <vector>

#include "../../common/cuda_check.h"
#include "../../dispatch.h"
#include "../../environment.h"
#include "../stable_tensor.h"
#include "composed.h"

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

// Whether torch's functions compute the call, and no kernel of this library.
bool is_composed(const ForwardParams& params) {
  return params.dtype == DType::kFloat32 || params.dtype == DType::kFloat64;
}

// ------------------------------------------------------------------------------------ alignment

// Whether kernels can access the tensor: by 16 bytes at a time, with row strides that fit an int.
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

template <typename Params>
void replace_index_arrays(HostCopies& copies, Params& params) {
  BatchParams& batch = params.batch;
  const size_t count = batch.batch;
  copies.replace(batch.cu_seqlens_q, count + 1);
  copies.replace(batch.cu_seqlens_k, count + 1);
  copies.replace(batch.seqused_q, count);
  copies.replace(batch.seqused_k, count);
  copies.replace(batch.num_contexts, count);
  copies.replace(batch.num_targets, count);
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

  void run(const ForwardKernel& kernel, const ForwardParams& params) {
    const ForwardPlan plan = kernel.plan(params, launch_);
    const std::optional<Tensor> workspace = take_workspace(plan.workspace_bytes);
    plan.run(plan, params, launch_);
  }
  void run(const BackwardKernel& kernel, const BackwardParams& params) {
    const std::optional<Tensor> workspace = take_workspace(kernel.workspace_bytes(params, launch_));
    kernel.run(params, launch_);
  }

 private:
  // May be freed when the kernels have been launched, like AlignedCopies.
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
  call.run(forward_kernel(call.device(), params), params);
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
  copies.input(dout, params.dout);
  copies.output(gradients.dq, params.dq);
  copies.output(gradients.dk, params.dk);
  copies.output(gradients.dv, params.dv);
  const BackwardKernel kernel = backward_kernel(call.device(), params);
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

}  // namespace hstu
