// Host code that launches the attention kernels of every architecture.
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/float8.h>
#include <cutlass/half.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "launch.h"

namespace hstu {

template <DType kDType>
using ElementOf = std::conditional_t<
    kDType == DType::kFloat8E4M3, cutlass::float_e4m3_t,
    std::conditional_t<kDType == DType::kFloat16, cutlass::half_t, cutlass::bfloat16_t>>;

// Number of blocks that work on a work tile together.
template <typename Kernel>
constexpr int cluster_size() {
  if constexpr (requires { Kernel::kClusterSize; }) return Kernel::kClusterSize;
  return 1;
}

// Number of blocks of Kernel that run at the same time.
template <typename Kernel>
int64_t resident_blocks(const CudaLaunch& launch) {
  constexpr int kSmemBytes = sizeof(typename Kernel::SharedMemory);
  const int by_memory =
      (launch.device.shared_memory_bytes + kReservedMemory) / (kSmemBytes + kReservedMemory);
  const int64_t multiprocessors = std::max(1, launch.device.multiprocessors - launch.sm_margin);
  return multiprocessors * std::clamp(by_memory, 1, Kernel::kBlocksPerSm);
}

// Number of blocks of a persistent grid for `work_tiles` work tiles: as many as are resident. A
// larger or a smaller grid would only be slower.
template <typename Kernel>
int64_t persistent_blocks(const CudaLaunch& launch, int64_t work_tiles) {
  constexpr int kBlocks = cluster_size<Kernel>();
  return kBlocks * std::clamp<int64_t>(resident_blocks<Kernel>(launch) / kBlocks, 1, work_tiles);
}

// Allows `kernel` the shared memory of Kernel, on the current device.
template <typename Kernel, typename... Arguments>
void allow_shared_memory(void (*kernel)(Arguments...), const CudaLaunch& launch, const char* name) {
  constexpr int kSmemBytes = sizeof(typename Kernel::SharedMemory);
  if (kSmemBytes > launch.device.shared_memory_bytes) {
    throw NotImplemented(std::string(name) + ": this kernel needs " + std::to_string(kSmemBytes) +
                         " bytes of shared memory for a block, and this GPU, or " +
                         "HSTU_ATTN_SHARED_MEMORY, allows " +
                         std::to_string(launch.device.shared_memory_bytes));
  }
  // NOTE: this runs once for each kernel and device; bit n of `prepared` is for device n.
  static std::atomic<uint64_t> prepared{0};
  int device = 0;
  check_cuda(cudaGetDevice(&device), name);
  const uint64_t bit = uint64_t{1} << device % 64;
  if (!(prepared.load() & bit)) {
    check_cuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes),
        name);
    prepared |= bit;
  }
}

// Number of clusters of `kernel` that run at the same time. It may be less than the blocks would
// allow, since a cluster is in one GPC, whose multiprocessors may leave a rest.
template <typename Kernel, typename... Arguments>
int64_t resident_clusters(void (*kernel)(Arguments...), const CudaLaunch& launch,
                          const char* name) {
  constexpr unsigned kBlocks = cluster_size<Kernel>();
  allow_shared_memory<Kernel>(kernel, launch, name);
  static std::atomic<int> known[64];  // of each device, plus 1; 0: not known yet
  int device = 0;
  check_cuda(cudaGetDevice(&device), name);
  std::atomic<int>& count = known[device % 64];
  if (count.load() == 0) {
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kBlocks, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = kBlocks;
    config.blockDim = Kernel::kThreads;
    config.dynamicSmemBytes = sizeof(typename Kernel::SharedMemory);
    config.attrs = &cluster;
    config.numAttrs = 1;
    int clusters = 0;
    check_cuda(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), name);
    count = clusters + 1;
  }
  return std::min<int64_t>(count.load() - 1, resident_blocks<Kernel>(launch) / kBlocks);
}

template <typename Kernel, typename... Arguments>
void launch_attention(void (*kernel)(Arguments...), const CudaLaunch& launch, dim3 blocks,
                      const char* name, const Arguments&... arguments) {
  constexpr int kSmemBytes = sizeof(typename Kernel::SharedMemory);
  allow_shared_memory<Kernel>(kernel, launch, name);
  dim3 cluster = cluster_size<Kernel>();
  if constexpr (requires { Kernel::kIsClusterOfSequence; }) {
    if (Kernel::kIsClusterOfSequence) cluster.z = blocks.z;
  }
  const LaunchConfig config = {blocks, Kernel::kThreads, kSmemBytes, true, cluster};
  launch_kernel(kernel, config, launch, name, arguments...);
}

}  // namespace hstu
