// The layout of scratch memory.
#pragma once

#include <cstdint>

#include "math.h"

namespace hstu {

// Hands out pieces of a buffer, each aligned as the buffer is; without a buffer it only counts
// bytes, so that the code that lays the buffer out also says how large it is.
template <int kAlignment>
class Arena {
 public:
  HSTU_HOST_DEVICE explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <typename T>
  HSTU_HOST_DEVICE T* take(int64_t count) {
    T* piece = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    used_ += bytes<T>(count);
    return piece;
  }

  // The number of bytes that take() uses.
  template <typename T>
  static HSTU_HOST_DEVICE int64_t bytes(int64_t count) {
    return round_up(count * static_cast<int64_t>(sizeof(T)), kAlignment);
  }

  HSTU_HOST_DEVICE int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

}  // namespace hstu
