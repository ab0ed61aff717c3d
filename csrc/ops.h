// Between the ops and the devices that run them.
#pragma once

#include "arguments.h"

namespace hstu {

// What the backward writes. An empty optional is a gradient that is not asked for.
struct Gradients {
  Tensor dq, dk, dv;
  OptionalTensor drab, dpos_weight, dts_weight;
};

// The ops on a GPU; ops.cpp has the CPU's. `params` comes filled, and checked but for what only the
// values of tensors on the device could tell. The tensors are those that `params` points into.
struct CudaOps {
  static void forward(const Arguments& args, Tensor& out, ForwardParams& params);
  static void backward(const Arguments& args, const Tensor& dout, Gradients& gradients,
                       BackwardParams& params);
};

}  // namespace hstu
