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

// Launches a persistent grid of `kernel`. Blocks take their work from a list, so that a grid larger
// or smaller than what fits is only slower, never wrong.
template <typename Kernel, typename... Arguments>
void launch_persistent(void (*kernel)(Arguments...), const CudaLaunch& launch, int64_t items,
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
  constexpr int kReserved = 1024;  // bytes that the system keeps for each block
  const int by_memory =
      (launch.device.shared_memory_bytes + kReserved) / (kSharedBytes + kReserved);
  const int blocks_per_sm = std::clamp(by_memory, 1, Kernel::kBlocksPerSm);
  const int64_t multiprocessors = std::max(1, launch.device.multiprocessors - launch.sm_margin);
  const int64_t blocks = std::min(items, multiprocessors * blocks_per_sm);
  const LaunchConfig config = {blocks, Kernel::kThreads, kSharedBytes, true};
  launch_kernel(kernel, config, launch, name, arguments...);
}

}  // namespace hstu::sm80
