// The choice of the CPU kernel for a dtype on this processor.
#pragma once

#include "kernel.h"

namespace hstu::cpu {

// Returns the fastest kernel that the processor can run, up to the level that HSTU_ATTN_CPU_ISA
// names (environment.h). Throws std::invalid_argument for an unknown or unavailable level.
const Kernel& select_kernel(DType dtype);

}  // namespace hstu::cpu
