// Kernel launches with programmatic dependent launch: a kernel's blocks start while the previous
// kernel still runs.
#pragma once

#include <type_traits>

#include "../dispatch.h"
#include "cuda_check.h"
#include "ptx.h"

namespace hstu {

// Bytes of shared memory that the system reserves for each block.
constexpr int kReservedMemory = 1024;

struct LaunchConfig {
  dim3 blocks = 0;
  int threads = 0;
  int smem_bytes = 0;  // dynamic shared memory
  // The kernel's blocks may start before the previous kernel has ended (programmatic dependent
  // launch), so the kernel must call wait_for_previous_kernel() before it accesses what the
  // previous kernel writes. Earlier kernels have ended by then, unless the previous kernel itself
  // started early.
  bool starts_early = false;
  dim3 cluster = 1;
};

template <typename... Parameters>
void launch_kernel(void (*kernel)(Parameters...), const LaunchConfig& config,
                   const CudaLaunch& launch, const char* name,
                   const std::type_identity_t<Parameters>&... arguments) {
  if (config.blocks.x == 0) return;
  cudaLaunchAttribute attributes[2] = {};
  int count = 0;
  // NOTE: only the code for 9.0 has the griddepcontrol instructions, not the PTX for later GPUs.
  if (config.starts_early && launch.device.capability == 90) {
    cudaLaunchAttribute& early = attributes[count++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  if (config.cluster.x * config.cluster.z > 1) {
    cudaLaunchAttribute& cluster = attributes[count++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {config.cluster.x, 1, config.cluster.z};
  }
  cudaLaunchConfig_t to = {};
  to.gridDim = config.blocks;
  to.blockDim = config.threads;
  to.dynamicSmemBytes = config.smem_bytes;
  to.stream = launch.stream;
  to.attrs = attributes;
  to.numAttrs = count;
  check_cuda(cudaLaunchKernelEx(&to, kernel, arguments...), name);
}

HSTU_DEVICE void wait_for_previous_kernel() { ptx::griddepcontrol_wait(); }

// Blocks of the next kernel may start once all blocks of this one have called this.
HSTU_DEVICE void let_next_kernel_start() { ptx::griddepcontrol_launch_dependents(); }

}  // namespace hstu
