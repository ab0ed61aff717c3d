// DLPack's tensors as views, and the arguments of fast calls.
#pragma once

#include "fast_call.h"
#include "tensor_view.h"

namespace hstu {

// Thrown where an argument is nothing that any kernel takes.
struct LeftToOperator {};

inline ScalarType to_scalar_type(const DLDataType& dtype) {
  if (dtype.lanes == 1) {
    switch (dtype.code << 8 | dtype.bits) {
      case DLDataType::kBfloat << 8 | 16:
        return ScalarType::BFloat16;
      case DLDataType::kFloat8E4m3fn << 8 | 8:
        return ScalarType::Float8_e4m3fn;
      case DLDataType::kFloat << 8 | 16:
        return ScalarType::Half;
      case DLDataType::kFloat << 8 | 32:
        return ScalarType::Float;
      case DLDataType::kFloat << 8 | 64:
        return ScalarType::Double;
      case DLDataType::kInt << 8 | 32:
        return ScalarType::Int;
      case DLDataType::kInt << 8 | 64:
        return ScalarType::Long;
    }
  }
  throw LeftToOperator{};
}

inline DeviceType to_device_type(const DLDevice& device) {
  if (device.type == DLDevice::kCpu) return DeviceType::kCpu;
  if (device.type == DLDevice::kCuda) return DeviceType::kCuda;
  throw LeftToOperator{};
}

inline TensorView view(const DLTensor& tensor) {
  const size_t dim = tensor.ndim;
  return {.data = static_cast<char*>(tensor.data) + tensor.byte_offset,
          .dtype = to_scalar_type(tensor.dtype),
          .device_type = to_device_type(tensor.device),
          .device_index = tensor.device.index,
          .sizes = {tensor.shape, dim},
          .strides = {tensor.strides, dim}};
}

// Reads the arguments of a fast call one after another.
class FastReader {
 public:
  explicit FastReader(const FastCall& call) : next_(call.arguments) {}

  void read(TensorView& value) { value = view(*(next_++)->tensor); }
  void read(OptionalView& value) {
    if (const DLTensor* tensor = (next_++)->tensor) value = view(*tensor);
  }
  void read(int64_t& value) { value = (next_++)->integer; }
  void read(bool& value) { value = (next_++)->integer != 0; }
  void read(double& value) { value = (next_++)->number; }
  void read_written(TensorView& value) { read(value); }
  void read_written(OptionalView& value) { read(value); }

 private:
  const FastArgument* next_;
};

}  // namespace hstu
