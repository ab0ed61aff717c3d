// Kernels for x86-64-v3: AVX2, FMA, F16C.
#define HSTU_CPU_ISA avx2
#include "kernel_table.h"

namespace hstu::cpu {

const Kernel* avx2_kernel(DType dtype) { return avx2::float_kernel(dtype, "avx2"); }

}  // namespace hstu::cpu
