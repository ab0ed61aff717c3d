// Turns a failed CUDA call into an exception. Host code that does not use torch.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace hstu {

// `what` is what was tried, such as "forward kernel launch".
inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error) + " (" +
                           cudaGetErrorName(error) + ")");
}

// Call it after each <<<...>>>, which reports errors only by cudaGetLastError.
inline void check_launch(const char* what) { check_cuda(cudaGetLastError(), what); }

}  // namespace hstu
