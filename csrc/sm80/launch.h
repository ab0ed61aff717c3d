// What launching forward and backward have in common.
#pragma once

#include <algorithm>
#include <atomic>

#include "../common/launch.h"
#include "../common/prepare.h"
#include "../common/workspace.h"
#include "kernels.h"
#include "tensors.h"
#include "tile_config.h"

namespace hstu::sm80 {

template <DType kDType>
using ElementOf =
    std::conditional_t<kDType == DType::kFloat16, cutlass::half_t, cutlass::bfloat16_t>;

// Blocks of Kernel that run at the same time.
template <typename Kernel>
int64_t resident_blocks(const CudaLaunch& launch) {
  constexpr int kSharedBytes = sizeof(typename Kernel::SharedMemory);
  const int by_memory =
      (launch.device.shared_memory_bytes + kReservedMemory) / (kSharedBytes + kReservedMemory);
  const int64_t multiprocessors = std::max(1, launch.device.multiprocessors - launch.sm_margin);
  return multiprocessors * std::clamp(by_memory, 1, Kernel::kBlocksPerSm);
}

// A grid that takes `items` from a list. Larger or smaller than what is resident, it would only be
// slower.
template <typename Kernel>
int64_t persistent_blocks(const CudaLaunch& launch, int64_t items) {
  return std::min(items, resident_blocks<Kernel>(launch));
}

template <typename Kernel, typename... Arguments>
void launch_attention(void (*kernel)(Arguments...), const CudaLaunch& launch, int64_t blocks,
                      const char* name, const Arguments&... arguments) {
  constexpr int kSharedBytes = sizeof(typename Kernel::SharedMemory);
  // NOTE: once for each kernel and device; bit n stands for device n.
  static std::atomic<uint64_t> prepared{0};
  int device = 0;
  check_cuda(cudaGetDevice(&device), name);
  const uint64_t bit = uint64_t{1} << device % 64;
  if (!(prepared.load() & bit)) {
    check_cuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
        name);
    prepared |= bit;
  }
  const LaunchConfig config = {blocks, Kernel::kThreads, kSharedBytes, true};
  launch_kernel(kernel, config, launch, name, arguments...);
}

}  // namespace hstu::sm80
