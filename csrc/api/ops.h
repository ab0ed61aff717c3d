// The interface between the operators (ops.cpp) and the devices that run them.
#pragma once

#include "arguments.h"

namespace hstu {

// The tensors that the backward writes. An empty optional is a gradient that is not wanted.
struct Gradients {
  TensorView dq, dk, dv;
  OptionalView drab, dpos_weight, dts_weight;

  // Calls `function(gradient)` in the order of the schema.
  template <typename Function>
  void for_each(Function function) {
    visit(*this, function);
  }
  template <typename Function>
  void for_each(Function function) const {
    visit(*this, function);
  }

 private:
  template <typename Self, typename Function>
  static void visit(Self& self, Function function) {
    function(self.dq), function(self.dk), function(self.dv);
    function(self.drab), function(self.dpos_weight), function(self.dts_weight);
  }
};

// The tensors that quantize_qkv writes: see QuantizeParams.
struct QuantizeOutputs {
  static constexpr int kCount = 10;
  TensorView tensors[kCount];

  template <typename Function>
  void for_each(Function function) const {
    for (const TensorView& tensor : tensors) function(tensor);
  }
};

// The operators on a GPU (cuda/ops.cpp). CpuOps in ops.cpp has the same functions for the CPU.
struct CudaOps {
  // Checks the values of index arrays, if HSTU_ATTN_CHECK=1 is set: they have to be copied to the
  // host.
  static void check(const Arguments& args, const ForwardParams& params);
  // In these functions, `params` points into the tensors of the other arguments.
  static void forward(const Arguments& args, const TensorView& out, ForwardParams& params);
  // The forward with the tensors that quantize_qkv returns.
  static void forward_fp8(const Arguments& args, const TensorView& out, ForwardParams& params);
  static void backward(const Arguments& args, const TensorView& dout, const Gradients& gradients,
                       BackwardParams& params);
  static void append(const AppendArguments& args, const AppendParams& params);
  static void quantize(const QuantizeArguments& args, const QuantizeOutputs& outputs,
                       QuantizeParams& params);
  // linear_fp8 and project_fp8, for e4m3 rows `x`.
  static void project(const TensorView& x, const ProjectionParams& params);
};

}  // namespace hstu
