// The C functions that `python -m hstu_attn.info` calls. They return lines "name value".
#include <exception>
#include <string>

#include "../cpu/select.h"
#include "../environment.h"
#if defined(USE_CUDA)
#include "../dispatch.h"
#endif

#define HSTU_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Returns the text of `describe`, or "error" and the text of what it threw, since no exception may
// pass through C. The pointer is valid until this thread's next call.
template <typename Describe>
const char* returning_text(Describe describe) {
  thread_local std::string text;
  try {
    text = describe();
  } catch (const std::exception& error) {
    text = std::string("error ") + error.what();
  }
  return text.c_str();
}

}  // namespace

// Describes which instruction set the CPU kernel of each dtype uses.
HSTU_EXPORT const char* hstu_attn_describe_cpu() {
  using namespace hstu;
  return returning_text([] {
    const auto isa = [](DType dtype) { return std::string(cpu::select_kernel(dtype).name); };
    return "float32 " + isa(DType::kFloat32) + "\nbfloat16 " + isa(DType::kBFloat16) +
           "\nfloat16 " + isa(DType::kFloat16);
  });
}

// Describes the environment variables that choose kernels, each with its value, if they are set.
HSTU_EXPORT const char* hstu_attn_describe_environment() {
  using namespace hstu::environment;
  return returning_text([] {
    std::string lines;
    for (const char* name : {kCpuIsa, kForceArch}) {
      const std::string value(text(name));
      if (!value.empty()) lines += std::string(name) + " " + value + "\n";
    }
    return lines;
  });
}

// Describes the CUDA kernels of this build, its CUDA runtime and the driver: see describe_build().
// Empty for a build without CUDA.
HSTU_EXPORT const char* hstu_attn_describe_build() {
#if defined(USE_CUDA)
  return returning_text([] { return hstu::describe_build(); });
#else
  return "";
#endif
}

// Describes the GPU with CUDA's ordinal `index`, and which kernels run on it.
HSTU_EXPORT const char* hstu_attn_describe_gpu([[maybe_unused]] int index) {
#if defined(USE_CUDA)
  return returning_text([index] {
    const hstu::CudaDevice device = hstu::cuda_device(index);
    return "arch " + std::to_string(device.arch) + "\nshared_memory " +
           std::to_string(device.shared_memory_bytes);
  });
#else
  return "error no CUDA kernels in this build";
#endif
}
