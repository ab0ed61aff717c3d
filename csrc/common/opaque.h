// Values that the compiler cannot reason about, so that it recomputes what depends on them where it
// is needed. Otherwise it would keep addresses and descriptors, the same in every iteration, in
// registers for the whole main loop, and spill.
#pragma once

#include "macros.h"

namespace hstu {

// Reads threadIdx.x again in each call.
HSTU_DEVICE int reload_thread_idx() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Reads gridDim.x again in each call.
HSTU_DEVICE int reload_grid_dim() {
  int blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}

// Returns threadIdx.x; if kHidden, as a new value in each call that the compiler knows nothing
// about.
template <bool kHidden = true>
HSTU_DEVICE int opaque_thread_idx() {
  int index = threadIdx.x;
  if constexpr (kHidden) asm volatile("" : "+r"(index));
  return index;
}

// opaque_thread_idx(), but the compiler knows that the index is not negative, so that it divides by
// a power of two with a shift.
template <bool kHidden = true>
HSTU_DEVICE int bounded_thread_idx() {
  const int index = opaque_thread_idx<kHidden>();
  __builtin_assume(index >= 0 && index < 1024);
  return index;
}

// Returns `address` as a new value in each call.
template <typename Element>
HSTU_DEVICE Element* opaque_pointer(Element* address) {
  int zero;
  asm volatile("mov.u32 %0, 0;" : "=r"(zero));
  return address + zero;
}

// Makes two numbers new values, which the compiler must compute at this point.
HSTU_DEVICE void make_opaque(float& x, float& y) { asm volatile("" : "+f"(x), "+f"(y)); }

// Values that were loaded before the call are loaded again after it, instead of being kept in
// registers.
HSTU_DEVICE void compiler_barrier() { asm volatile("" ::: "memory"); }

}  // namespace hstu
