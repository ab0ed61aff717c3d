// The kernels of this folder: two forwards and a backward for each head dim and dtype. setup.py
// writes a source for each that instantiates them.
#pragma once

#include "../dispatch.h"

namespace hstu::sm80 {

template <int kHeadDim, DType kDType>
ForwardKernel forward();

// The forward with a paged KV cache.
template <int kHeadDim, DType kDType>
ForwardKernel paged_forward();

template <int kHeadDim, DType kDType>
BackwardKernel backward();

}  // namespace hstu::sm80
