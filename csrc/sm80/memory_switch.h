// The forms of a kernel: for the shared memory of a GPU, and for the bias of a call.
#pragma once

#include "../dispatch.h"
#include "tile_config.h"

namespace hstu::sm80 {

// Returns use(std::integral_constant<Memory, ...>()): kSmall on a GPU whose shared memory is too
// small for LargeKernel, else kLarge. A kernel that fits into kSmallMemory has no small form.
template <typename LargeKernel, typename Use>
auto memory_switch(const CudaLaunch& launch, Use use) {
  constexpr int kLargeBytes = sizeof(typename LargeKernel::SharedMemory);
  if constexpr (kLargeBytes > kSmallMemory) {
    if (launch.device.shared_memory_bytes < kLargeBytes) {
      return use(std::integral_constant<Memory, Memory::kSmall>());
    }
  }
  return use(std::integral_constant<Memory, Memory::kLarge>());
}

// Returns use(std::integral_constant<ScoreBias, ...>()) for the bias of a call.
template <typename Use>
auto bias_switch(const ForwardParams& params, Use use) {
  if (params.relative_bias) {
    return use(std::integral_constant<ScoreBias, ScoreBias::kRelative>());
  }
  if (params.rab.data) return use(std::integral_constant<ScoreBias, ScoreBias::kDense>());
  return use(std::integral_constant<ScoreBias, ScoreBias::kNone>());
}

}  // namespace hstu::sm80
