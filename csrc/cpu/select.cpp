#include "select.h"

#include <stdexcept>
#include <string>

#include "../environment.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hstu::cpu {
namespace {

struct Level {
  const char* name;
  bool (*available)();
  const Kernel* (*kernel)(DType dtype);
};

bool always() { return true; }

#if defined(__x86_64__)

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512cd");
}

bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// A process has to ask Linux once for permission to use the tile registers of AMX.
bool has_amx() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return has_avx512bf16() && __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

constexpr Level kLevels[] = {
    {"amx", has_amx, amx_kernel},          {"avx512bf16", has_avx512bf16, avx512bf16_kernel},
    {"avx512", has_avx512, avx512_kernel}, {"avx2", has_avx2, avx2_kernel},
    {"baseline", always, baseline_kernel},
};

#else

constexpr Level kLevels[] = {{"baseline", always, baseline_kernel}};

#endif

}  // namespace

const Kernel& select_kernel(DType dtype) {
  const std::string highest(environment::cpu_isa());
  bool allowed = highest.empty();
  for (const Level& level : kLevels) {
    const bool named = !allowed && highest == level.name;
    allowed |= named;
    if (!allowed) continue;
    const bool available = level.available();
    if (named && !available) {
      throw std::invalid_argument(std::string(environment::kCpuIsa) +
                                  ": expected a level that this processor supports, got " +
                                  highest);
    }
    const Kernel* kernel = available ? level.kernel(dtype) : nullptr;
    if (kernel) return *kernel;
  }
  throw std::invalid_argument(std::string(environment::kCpuIsa) +
                              ": expected baseline, avx2, avx512, avx512bf16 or amx, got " +
                              highest);
}

}  // namespace hstu::cpu
