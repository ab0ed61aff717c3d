// The bf16 kernel for processors with AMX tiles.
#define HSTU_CPU_ISA amx
#include "kernel_table.h"

namespace hstu::cpu {

const Kernel* amx_kernel(DType dtype) {
  if (dtype != DType::kBFloat16) return nullptr;
  return amx::make_kernel<amx::TileArithmetic, amx::BFloat16>("amx");
}

}  // namespace hstu::cpu
