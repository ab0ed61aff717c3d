// Kernels for x86-64-v4: AVX-512.
#define HSTU_CPU_ISA avx512
#include "kernel_table.h"

namespace hstu::cpu {

const Kernel* avx512_kernel(DType dtype) { return avx512::float_kernel(dtype, "avx512"); }

}  // namespace hstu::cpu
