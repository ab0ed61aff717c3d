// Values that the compiler cannot see through, so that it recomputes what depends on them where it
// is used and does not keep it in registers for the whole of a main loop, where it would spill.
#pragma once

#include "macros.h"

namespace hstu {

// threadIdx.x, read again by each call.
HSTU_DEVICE int reload_thread_idx() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// gridDim.x, read again by each call.
HSTU_DEVICE int reload_grid_dim() {
  int blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}

// threadIdx.x, which the compiler knows nothing about where kHidden: each call gives a new value.
template <bool kHidden = true>
HSTU_DEVICE int opaque_thread_idx() {
  int index = threadIdx.x;
  if constexpr (kHidden) asm volatile("" : "+r"(index));
  return index;
}

// The same, and the compiler knows that it is not negative, so that a division by a power of two is
// a shift.
template <bool kHidden = true>
HSTU_DEVICE int bounded_thread_idx() {
  const int index = opaque_thread_idx<kHidden>();
  __builtin_assume(index >= 0 && index < 1024);
  return index;
}

// `address`, from which the compiler can derive nothing: each call gives a new value.
template <typename Element>
HSTU_DEVICE Element* opaque_pointer(Element* address) {
  int zero;
  asm volatile("mov.u32 %0, 0;" : "=r"(zero));
  return address + zero;
}

// Values loaded before it are loaded again after it, and not kept in registers.
HSTU_DEVICE void compiler_barrier() { asm volatile("" ::: "memory"); }

}  // namespace hstu
