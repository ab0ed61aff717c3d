// Makes the Kernel of one dtype from the templates of this instruction set.
#pragma once

#include "backward.h"
#include "forward.h"

namespace hstu::cpu::HSTU_CPU_ISA {

template <typename Arithmetic, typename T>
const Kernel* make_kernel(const char* name) {
  using F = Forward<Arithmetic, T>;
  using B = Backward<Arithmetic, T>;
  static const Kernel kernel = {
      name,      Arithmetic::begin_thread, Arithmetic::end_thread,
      F::kChunk, F::scratch_bytes,         F::run,
      B::kChunk, B::scratch_bytes,         B::dq_tile_bytes,
      B::run,
  };
  return &kernel;
}

// The kernels that compute in fp32 and fp64.
inline const Kernel* float_kernel(DType dtype, const char* name) {
  switch (dtype) {
    case DType::kFloat32:
      return make_kernel<FloatArithmetic<float>, float>(name);
    case DType::kBFloat16:
      return make_kernel<FloatArithmetic<float>, BFloat16>(name);
    case DType::kFloat16:
      return make_kernel<FloatArithmetic<float>, Float16>(name);
    case DType::kFloat64:
      return make_kernel<FloatArithmetic<double>, double>(name);
    case DType::kFloat8E4M3:
      break;
  }
  return nullptr;
}

}  // namespace hstu::cpu::HSTU_CPU_ISA
