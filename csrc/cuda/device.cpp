// Finds the properties of a GPU, and the kernels that it gets.
#include <algorithm>
#include <map>
#include <mutex>
#include <string>

#include "../common/cuda_check.h"
#include "../dispatch.h"
#include "../environment.h"

namespace hstu {
namespace {

#if defined(HSTU_ATTN_SM80)
constexpr bool kHasSm80 = true;
#else
constexpr bool kHasSm80 = false;
#endif
#if defined(HSTU_ATTN_SM90)
constexpr bool kHasSm90 = true;
#else
constexpr bool kHasSm90 = false;
#endif

int attribute(cudaDeviceAttr name, int index) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, name, index), "cudaDeviceGetAttribute");
  return value;
}

CudaDevice query_device(int index) {
  CudaDevice device;
  device.capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, index) +
                      attribute(cudaDevAttrComputeCapabilityMinor, index);
  device.multiprocessors = attribute(cudaDevAttrMultiProcessorCount, index);
  device.l2_bytes = attribute(cudaDevAttrL2CacheSize, index);
  device.shared_memory_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
  device.arch = kHasSm90 && device.capability == 90 ? 90 : 80;
  return device;
}

void check_built(const CudaDevice& device) {
  const bool built = device.arch == 90 ? kHasSm90 : kHasSm80;
  const bool runs = device.arch == 90 ? device.capability == 90 : device.capability >= 80;
  if (built && runs) return;
  std::string names;
  if (kHasSm80) names += "sm80 (compute capability 8.0 and later)";
  if (kHasSm90) names += std::string(names.empty() ? "" : " and ") + "sm90 (9.0 alone)";
  throw NotImplemented("no sm" + std::to_string(device.arch) + " kernels for a GPU of compute " +
                       "capability " + std::to_string(device.capability / 10) + "." +
                       std::to_string(device.capability % 10) + "; built are " + names);
}

}  // namespace

CudaDevice cuda_device(int index) {
  static std::mutex mutex;
  static std::map<int, CudaDevice> devices;
  CudaDevice device;
  {
    const std::lock_guard lock(mutex);
    const auto found = devices.find(index);
    device = found != devices.end() ? found->second
                                    : devices.emplace(index, query_device(index)).first->second;
  }
  if (const int arch = environment::force_arch()) {
    device.arch = arch;
    device.is_forced = true;
  }
  device.shared_memory_bytes =
      std::min(device.shared_memory_bytes, environment::shared_memory_limit());
  check_built(device);
  return device;
}

}  // namespace hstu
