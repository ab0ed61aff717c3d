// fp32 and fp64 on a GPU: the composition of torch's functions in hstu_attn/composed.py.
#pragma once

#include "../ops.h"

namespace hstu {

// They throw NotImplemented in a program without Python.
void composed_forward(const Arguments& args, const TensorView& out);
void composed_backward(const Arguments& args, const TensorView& dout, const Gradients& gradients);

}  // namespace hstu
