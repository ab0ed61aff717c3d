// The one switch from run-time values to compiled CUDA kernels. This file does not use torch.
//
// A call asks for its kernel, plans how it runs, allocates the workspace of the plan, and runs it:
//
//   const ForwardPlan plan = forward_kernel(launch, params).plan(params, launch);
//   launch.workspace = <device memory of plan.workspace_bytes>
//   plan.prepare(plan, params, launch);
//   plan.run(plan, params, launch);
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <string>

#include "common/not_implemented.h"
#include "params.h"
#include "scheduler/split_kv.h"

namespace hstu {

// A GPU as kernels see it. The environment variables are read by every call (environment.h).
struct CudaDevice {
  int arch = 0;            // kernels to use: 80 or 90; HSTU_ATTN_FORCE_ARCH overrides it
  bool is_forced = false;  // HSTU_ATTN_FORCE_ARCH is set
  int capability = 0;      // 10 * major + minor
  int multiprocessors = 0;
  int l2_bytes = 0;
  int shared_memory_bytes = 0;  // most that a block may ask for; HSTU_ATTN_SHARED_MEMORY lowers it
};

// The device with CUDA's ordinal `index`.
CudaDevice cuda_device(int index);

// Describes the build in lines "name value": archs, 16-bit dtypes, the arch of FP8 attention or
// "none", head dims, the version of its CUDA runtime and the newest version that the driver
// supports (0 without a driver). Versions are encoded as CUDA does: 1000 * major + 10 * minor.
std::string describe_build();

// The device and stream that a call runs on, and the kernels that it gets.
struct CudaLaunch {
  CudaDevice device;
  cudaStream_t stream = nullptr;
  int sm_margin = 0;           // multiprocessors to leave free
  bool deterministic = false;  // backward: bitwise repeatable
  void* workspace = nullptr;   // uninitialized device memory, aligned to 256 bytes
};

// The plan of a forward, which is made once and then passed on.
struct ForwardPlan {
  int64_t workspace_bytes = 0;
  SplitKVPlan split_kv;
  // Launches the kernels that run before attention and read neither q, k nor v. Returns true if the
  // next kernel may start early (common/launch.h).
  bool (*prepare)(const ForwardPlan& plan, const ForwardParams& params,
                  const CudaLaunch& launch) = nullptr;
  // Launches the form of the kernel that was chosen. It writes every row of params.out: rows that
  // belong to no sequence become zeros.
  void (*run)(const ForwardPlan& plan, const ForwardParams& params,
              const CudaLaunch& launch) = nullptr;
};

struct ForwardKernel {
  // Does not depend on launch.workspace.
  ForwardPlan (*plan)(const ForwardParams& params, const CudaLaunch& launch) = nullptr;
};

struct BackwardKernel {
  int64_t (*workspace_bytes)(const BackwardParams& params, const CudaLaunch& launch);
  // Writes every row of dq, dk and dv.
  void (*run)(const BackwardParams& params, const CudaLaunch& launch);
  bool writes_drab_whole;  // false: writes only the visible elements of drab
};

// Returns the layout, with null data, of a copy of params.rab with which the call can run faster
// kernels, if they save more time than the copy takes. Otherwise returns nullopt.
std::optional<DenseBias> faster_rab(const CudaDevice& device, const ForwardParams& params,
                                    bool is_backward);

// Throws NotImplemented, and names what is built, where there is no kernel for the arguments.
// Pointers must be aligned to 16 bytes, and row and head strides must be multiples of 8 elements.
// Strides of an e4m3 cache must be multiples of 16, or of 8 if the head dim is no multiple of 16.
// rab and drab may have any strides.
ForwardKernel forward_kernel(const CudaLaunch& launch, const ForwardParams& params);
BackwardKernel backward_kernel(const CudaLaunch& launch, const BackwardParams& params);

// Launches an e4m3 linear map. Throws NotImplemented if the build or the GPU has none.
void launch_projection(const ProjectionParams& params, const CudaLaunch& launch);

}  // namespace hstu
