// Kernels for any processor of the build's architecture.
#define HSTU_CPU_ISA baseline
#include "kernel_table.h"

namespace hstu::cpu {

const Kernel* baseline_kernel(DType dtype) { return baseline::float_kernel(dtype, "baseline"); }

}  // namespace hstu::cpu
