// A tensor as the checks in arguments.h see it, without torch's stable ABI.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>

struct AtenTensorOpaque;  // declared by torch's stable ABI

namespace hstu {

using torch::headeronly::ScalarType;

enum class DeviceType { kCpu, kCuda, kOther };

// A view owns nothing. Strides count elements.
struct TensorView {
  void* data = nullptr;
  ScalarType dtype = ScalarType::Undefined;
  DeviceType device_type = DeviceType::kCpu;
  int device_index = 0;  // the ordinal of a GPU
  std::span<const int64_t> sizes;
  std::span<const int64_t> strides;
  AtenTensorOpaque* handle = nullptr;  // the tensor in torch's stable ABI

  int64_t dim() const { return static_cast<int64_t>(sizes.size()); }
  int64_t size(int64_t n) const { return sizes[n]; }
  int64_t stride(int64_t n) const { return strides[n]; }
  int64_t numel() const {
    int64_t count = 1;
    for (const int64_t size : sizes) count *= size;
    return count;
  }
  bool is_on_device_of(const TensorView& other) const {
    return device_type == other.device_type &&
           (device_type != DeviceType::kCuda || device_index == other.device_index);
  }
  bool is_contiguous() const {
    int64_t stride = 1;
    for (int64_t n = dim() - 1; n >= 0; --n) {
      if (size(n) != 1 && strides[n] != stride) return numel() == 0;
      stride *= size(n);
    }
    return true;
  }
};

using OptionalView = std::optional<TensorView>;

}  // namespace hstu
