// The environment variables that the C++ reads at run time; setup.py has those of the build.
//
// They are read in every call, so that tests and benchmarks may change them between calls. A
// look-up takes about 30 ns; a call on a GPU makes four of them and takes the host at least 10 us.
#pragma once

#include <climits>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

namespace hstu::environment {

// The text of a variable; empty if it is not set.
inline std::string_view text(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// The positive number that a variable holds; 0 if it is not set.
inline int number(const char* name, const char* expected) {
  const std::string value(text(name));
  if (value.empty()) return 0;
  char* end = nullptr;
  const long parsed = std::strtol(value.c_str(), &end, 10);
  if (*end != 0 || parsed < 1 || parsed > INT_MAX) {
    throw std::invalid_argument(std::string(name) + ": expected " + expected + ", got " + value);
  }
  return static_cast<int>(parsed);
}

// HSTU_ATTN_CPU_ISA caps the instruction set of the CPU kernels: baseline, avx2, avx512, avx512bf16
// or amx. Empty if there is no cap.
constexpr const char* kCpuIsa = "HSTU_ATTN_CPU_ISA";
inline std::string_view cpu_isa() { return text(kCpuIsa); }

// HSTU_ATTN_FORCE_ARCH names the GPU kernels to use, 80 or 90, in place of the newest that the GPU
// can run. 0 if it is not set.
constexpr const char* kForceArch = "HSTU_ATTN_FORCE_ARCH";
inline int force_arch() {
  const int arch = number(kForceArch, "80 or 90");
  if (arch != 0 && arch != 80 && arch != 90) {
    throw std::invalid_argument(std::string(kForceArch) + ": expected 80 or 90, got " +
                                std::to_string(arch));
  }
  return arch;
}

// HSTU_ATTN_SHARED_MEMORY lowers the shared memory that a block may use [bytes].
inline int shared_memory_limit() {
  const int bytes = number("HSTU_ATTN_SHARED_MEMORY", "a number of bytes");
  return bytes ? bytes : INT_MAX;
}

// HSTU_ATTN_CHECK=1 checks offsets, lengths and counts on a GPU, too: they are copied to the host,
// which waits for the GPU. Without it, kernels clamp them, which hides that they are wrong.
inline bool checks_values() { return text("HSTU_ATTN_CHECK") == "1"; }

// HSTU_ATTN_DEBUG=1 prints which kernels each call on a GPU gets, and why not newer ones.
inline bool prints_choice() { return text("HSTU_ATTN_DEBUG") == "1"; }

}  // namespace hstu::environment
