// Tensors of torch's stable ABI: makes views, reads tensors from a boxed call, allocates tensors.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <span>
#include <vector>

#include "tensor_view.h"

namespace hstu {

using torch::stable::Tensor;
using Sizes = std::span<const int64_t>;

// ------------------------------------------------------------------------------------------ views

inline TensorView view_with(const Tensor& tensor, const void* data) {
  int64_t *sizes = nullptr, *strides = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
  const size_t dim = tensor.dim();
  return {.data = const_cast<void*>(data),
          .dtype = tensor.scalar_type(),
          .device_type = tensor.is_cpu()    ? DeviceType::kCpu
                         : tensor.is_cuda() ? DeviceType::kCuda
                                            : DeviceType::kOther,
          .device_index = tensor.get_device_index(),
          .sizes = {sizes, dim},
          .strides = {strides, dim},
          .handle = tensor.get()};
}

// NOTE: a tensor may share its memory with a lazy clone until its mutable data are asked for.
inline TensorView view(const Tensor& tensor) { return view_with(tensor, tensor.const_data_ptr()); }
inline TensorView written_view(const Tensor& tensor) {
  return view_with(tensor, tensor.mutable_data_ptr());
}

// ---------------------------------------------------------------------------------------- reading

// Reads the arguments of a boxed call one after another, and owns the tensors that it has read.
class StackReader {
 public:
  explicit StackReader(StableIValue* stack) : next_(stack) { tensors_.reserve(kUsualTensors); }

  template <typename T>
  void read(T& value) {
    value = next<T>();
  }
  void read(TensorView& value) { value = view(tensors_.emplace_back(next<Tensor>())); }
  void read(OptionalView& value) {
    if (auto tensor = next<std::optional<Tensor>>())
      value = view(tensors_.emplace_back(std::move(*tensor)));
  }
  void read_written(TensorView& value) {
    value = written_view(tensors_.emplace_back(next<Tensor>()));
  }
  void read_written(OptionalView& value) {
    if (auto tensor = next<std::optional<Tensor>>()) {
      value = written_view(tensors_.emplace_back(std::move(*tensor)));
    }
  }

 private:
  static constexpr size_t kUsualTensors = 16;

  template <typename T>
  T next() {
    return torch::stable::detail::to<T>(*next_++);
  }

  StableIValue* next_;
  std::vector<Tensor> tensors_;
};

// ----------------------------------------------------------------------------------------- memory

// Returns an uninitialized contiguous tensor on the device of `like`, of its dtype by default.
// torch::stable::new_empty would look the operator up by its name in every call.
inline Tensor allocate(const TensorView& like, Sizes sizes,
                       std::optional<ScalarType> dtype = std::nullopt) {
  using torch::stable::detail::from, torch::stable::detail::to;
  auto code = to<int32_t>(from(dtype.value_or(like.dtype)));
  AtenTensorHandle tensor = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_aten_new_empty(like.handle, sizes.data(),
                                                   static_cast<int64_t>(sizes.size()), &code,
                                                   nullptr, nullptr, 0, nullptr, &tensor));
  return Tensor(tensor);
}
inline Tensor allocate(const TensorView& like, std::initializer_list<int64_t> sizes,
                       std::optional<ScalarType> dtype = std::nullopt) {
  return allocate(like, Sizes(sizes.begin(), sizes.size()), dtype);
}

// Returns another reference to the tensor that `view` was made from.
inline Tensor as_tensor(const TensorView& view) {
  AtenTensorHandle tensor = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(view.handle, &tensor));
  return Tensor(tensor);
}

inline void fill_with_zeros(const TensorView& view) {
  if (view.numel() == 0) return;
  Tensor tensor = as_tensor(view);
  torch::stable::zero_(tensor);
}

}  // namespace hstu
