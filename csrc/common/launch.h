// Launching kernels one after another, each set up while the one before still runs.
#pragma once

#include <type_traits>

#include "../dispatch.h"
#include "cuda_check.h"

namespace hstu {

constexpr int kReservedMemory = 1024;  // of shared memory, that the system keeps for each block

struct LaunchConfig {
  int64_t blocks = 0;
  int threads = 0;
  int smem_bytes = 0;  // dynamic
  // The kernel calls wait_for_previous_kernel() before it touches what the kernel in front of it
  // writes: its blocks may start before that one has ended (programmatic dependent launch). What
  // came before that one has ended when it starts, unless it starts early itself.
  bool starts_early = false;
  int cluster_size = 1;
};

template <typename... Parameters>
void launch_kernel(void (*kernel)(Parameters...), const LaunchConfig& config,
                   const CudaLaunch& launch, const char* name,
                   const std::type_identity_t<Parameters>&... arguments) {
  if (config.blocks == 0) return;
  cudaLaunchAttribute attributes[2] = {};
  int count = 0;
  // NOTE: the instructions for it are in the code for 9.0, not in that which later GPUs compile.
  if (config.starts_early && launch.device.capability == 90) {
    cudaLaunchAttribute& early = attributes[count++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  if (config.cluster_size > 1) {
    cudaLaunchAttribute& cluster = attributes[count++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(config.cluster_size), 1, 1};
  }
  cudaLaunchConfig_t to = {};
  to.gridDim = static_cast<unsigned>(config.blocks);
  to.blockDim = config.threads;
  to.dynamicSmemBytes = config.smem_bytes;
  to.stream = launch.stream;
  to.attrs = attributes;
  to.numAttrs = count;
  check_cuda(cudaLaunchKernelEx(&to, kernel, arguments...), name);
}

#if defined(__CUDACC__)

__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Blocks of the next kernel may start once all of this one's have called this.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

#endif

}  // namespace hstu
