// The kernels of this folder, one forward and one backward for each head dim and dtype; those that
// are built are instantiated in instantiations/.
#pragma once

#include "../dispatch.h"

namespace hstu::sm80 {

template <int kHeadDim, DType kDType>
ForwardKernel forward();

template <int kHeadDim, DType kDType>
BackwardKernel backward();

}  // namespace hstu::sm80
