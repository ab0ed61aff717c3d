// Which CPU kernel serves a dtype on this processor.
#pragma once

#include "kernel.h"

namespace hstu::cpu {

// The fastest that the processor can run. The environment variable HSTU_ATTN_CPU_ISA (baseline,
// avx2, avx512, avx512bf16 or amx) makes a level the highest one considered; an unknown or
// unavailable level is a std::invalid_argument.
const Kernel& select_kernel(DType dtype);

}  // namespace hstu::cpu
