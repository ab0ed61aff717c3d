// The bf16 kernel for processors with AVX-512 BF16 dot products.
#define HSTU_CPU_ISA avx512bf16
#include "kernel_table.h"

namespace hstu::cpu {

const Kernel* avx512bf16_kernel(DType dtype) {
  if (dtype != DType::kBFloat16) return nullptr;
  return avx512bf16::make_kernel<avx512bf16::DotArithmetic, avx512bf16::BFloat16>("avx512bf16");
}

}  // namespace hstu::cpu
