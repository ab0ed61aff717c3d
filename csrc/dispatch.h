// The one switch from run-time values to compiled CUDA kernels. No torch here.
//
// A call asks for its kernel, allocates the workspace that the kernel wants, and runs it:
//
//   const ForwardKernel kernel = forward_kernel(launch.device, params);
//   launch.workspace = <device memory of kernel.workspace_bytes(params, launch)>
//   kernel.run(params, launch);
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "params.h"

namespace hstu {

// A GPU as kernels see it; the environment variables are read at every call, for tests.
struct CudaDevice {
  int arch = 0;        // kernels to use: 80 or 90. HSTU_ATTN_FORCE_ARCH overrides it.
  int capability = 0;  // 10 * major + minor
  int multiprocessors = 0;
  int l2_bytes = 0;
  int shared_memory_bytes = 0;  // most that a block may ask for. HSTU_ATTN_SHARED_MEMORY lowers it.
};

// The device with CUDA's ordinal `index`.
CudaDevice cuda_device(int index);

// What this build holds, the version of its CUDA runtime and the newest one that the driver serves
// (0 without a driver), both as CUDA encodes them (1000 * major + 10 * minor): "name value" lines.
std::string describe_build();

// How a call is to run.
struct CudaLaunch {
  CudaDevice device;
  cudaStream_t stream = nullptr;
  int sm_margin = 0;           // multiprocessors to leave free
  bool deterministic = false;  // backward: bitwise repeatable
  void* workspace = nullptr;   // device memory, aligned to 256 bytes, uninitialized
};

// NOTE: torch's stable ABI turns this into RuntimeError; hstu_attn/ops.py makes it what it says.
struct NotImplemented : std::runtime_error {
  explicit NotImplemented(const std::string& text)
      : std::runtime_error("NotImplementedError: " + text) {}
};

struct ForwardKernel {
  int64_t (*workspace_bytes)(const ForwardParams& params, const CudaLaunch& launch);
  // Writes params.out whole: rows that belong to no sequence become zeros.
  void (*run)(const ForwardParams& params, const CudaLaunch& launch);
};

struct BackwardKernel {
  int64_t (*workspace_bytes)(const BackwardParams& params, const CudaLaunch& launch);
  // Writes dq, dk and dv whole.
  void (*run)(const BackwardParams& params, const CudaLaunch& launch);
  bool writes_drab_whole;  // else what is visible of it alone
};

// Throws NotImplemented, naming what is built, where there is no kernel for the arguments.
// Expected of the tensors: pointers aligned to 16 bytes, row and head strides multiples of 8
// elements, those of an e4m3 cache multiples of 16, or of 8 for a head dim that is none of 16; rab
// and drab alone may have any strides.
ForwardKernel forward_kernel(const CudaDevice& device, const ForwardParams& params);
BackwardKernel backward_kernel(const CudaDevice& device, const BackwardParams& params);

}  // namespace hstu
