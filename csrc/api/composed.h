// Passes calls to hstu_attn/composed.py, which computes them by torch's functions: fp32 and fp64 on
// a GPU, e4m3 on a CPU.
#pragma once

#include "ops.h"

namespace hstu {

// These functions throw NotImplemented in a program without Python.
void composed_forward(const Arguments& args, const TensorView& out);
void composed_backward(const Arguments& args, const TensorView& dout, const Gradients& gradients);
void composed_quantize(const QuantizeArguments& args, const QuantizeOutputs& outputs);

}  // namespace hstu
