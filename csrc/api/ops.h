// Between the ops and the devices that run them.
#pragma once

#include "arguments.h"

namespace hstu {

// What the backward writes. An empty optional is a gradient that is not asked for.
struct Gradients {
  TensorView dq, dk, dv;
  OptionalView drab, dpos_weight, dts_weight;
};

// The ops on a GPU; ops.cpp has the CPU's, of the same form.
struct CudaOps {
  // What to_params() cannot tell: whether it is built, and the values of index arrays.
  static void check(const Arguments& args, const ForwardParams& params);
  // Here `params` points into the other arguments.
  static void forward(const Arguments& args, const TensorView& out, ForwardParams& params);
  static void backward(const Arguments& args, const TensorView& dout, const Gradients& gradients,
                       BackwardParams& params);
  static void append(const AppendArguments& args, const AppendParams& params);
};

}  // namespace hstu
