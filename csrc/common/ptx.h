// PTX instructions for which CUDA C++ and CUTLASS have no function that fits. opaque.h has the
// functions that hide a value from the compiler.
#pragma once

#include <cstdint>

#include "macros.h"

namespace hstu::ptx {

HSTU_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- device memory through which blocks synchronize

HSTU_DEVICE int ld_relaxed(const int* address) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}

HSTU_DEVICE int ld_acquire(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

HSTU_DEVICE void red_add_release(int* address, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Returns the previous value.
HSTU_DEVICE int atom_add_acq_rel(int* address, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}

HSTU_DEVICE void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Orders accesses to device memory by this thread with those by TMA.
HSTU_DEVICE void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Adds four values at an address aligned to 16 bytes. Needs compute capability 9.0.
HSTU_DEVICE void red_add_v4(float* address, float x, float y, float z, float w) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x), "f"(y),
               "f"(z), "f"(w)
               : "memory");
}

HSTU_DEVICE void prefetch_l1(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
}

// Loads 8 or 16 bytes of shared memory.
template <typename T>
HSTU_DEVICE void ld_shared(const T* address, uint32_t (&words)[2]) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(shared_address(address)));
}
template <typename T>
HSTU_DEVICE void ld_shared(const T* address, uint32_t (&words)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(address)));
}

// Loads four matrices of 8 x 8 numbers of 16 bits: lane n passes the address of row n % 8 of matrix
// n / 8.
HSTU_DEVICE void ldmatrix_x4(uint32_t address, uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address));
}

// ldmatrix_x4() with each matrix transposed.
HSTU_DEVICE void ldmatrix_x4_transposed(uint32_t address, uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// Stores four matrices, whose rows have the addresses that ldmatrix_x4() loads from.
HSTU_DEVICE void stmatrix_x4(uint32_t address, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Returns `word`, or the word at an address of shared memory if all bits of `word` are ones.
HSTU_DEVICE uint32_t ld_shared_if_ones(uint32_t word, const uint32_t* address) {
  asm volatile("{.reg .pred p; setp.eq.u32 p, %0, 0xffffffff; @p ld.shared.b32 %0, [%1];}"
               : "+r"(word)
               : "r"(shared_address(address)));
  return word;
}

// Loads 16 bytes of shared memory.
template <typename T>
HSTU_DEVICE T ld_shared_volatile(const T* address) {
  uint4 words;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(shared_address(address)));
  static_assert(sizeof(T) == sizeof(words));
  T result;
  memcpy(&result, &words, sizeof(T));
  return result;
}

// Loads a word of shared memory if `bits` has a bit of `mask`, or else returns 0, without a branch.
HSTU_DEVICE uint32_t ld_shared_if(uint32_t bits, uint32_t mask, const uint32_t* address) {
  uint32_t word = 0;
  asm volatile(
      "{.reg .pred p; .reg .b32 t; and.b32 t, %1, %2; setp.ne.u32 p, t, 0;"
      " @p ld.shared.b32 %0, [%3];}"
      : "+r"(word)
      : "r"(bits), "r"(mask), "r"(shared_address(address)));
  return word;
}

// Returns a word whose low half is all ones if x is negative, and whose high half is all ones if y
// is negative.
HSTU_DEVICE uint32_t signs_of(int x, int y) {
  uint32_t word;
  asm("prmt.b32 %0, %1, %2, 0xffbb;" : "=r"(word) : "r"(x), "r"(y));
  return word;
}

// Loads 16 bytes of device memory that the kernel does not write.
template <typename T>
HSTU_DEVICE T ld_global_nc_volatile(const T* address) {
  uint4 words;
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(address));
  static_assert(sizeof(T) == sizeof(words));
  T result;
  memcpy(&result, &words, sizeof(T));
  return result;
}

// Loads 8 or 16 bytes of device memory that no thread writes, or returns zeros. The loads of
// several calls are in flight at once, because there is no branch.
HSTU_DEVICE uint2 ld_global_nc_if(bool exists, const uint2* address) {
  uint2 words;
  asm("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; mov.b32 %1, 0;"
      " @p ld.global.nc.v2.b32 {%0, %1}, [%3];}"
      : "=&r"(words.x), "=&r"(words.y)
      : "r"(static_cast<int>(exists)), "l"(address));
  return words;
}
HSTU_DEVICE uint4 ld_global_nc_if(bool exists, const uint4* address) {
  uint4 words;
  asm("{.reg .pred p; setp.ne.b32 p, %4, 0;"
      " mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
      " @p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%5];}"
      : "=&r"(words.x), "=&r"(words.y), "=&r"(words.z), "=&r"(words.w)
      : "r"(static_cast<int>(exists)), "l"(address));
  return words;
}

HSTU_DEVICE void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// --- conversions, which round to nearest even

// Pack two numbers into the low and the high half of a word, as fp16 or bf16.
HSTU_DEVICE uint32_t cvt_f16x2(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
HSTU_DEVICE uint32_t cvt_bf16x2(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// cvt_f16x2() with numbers out of range replaced by the largest fp16 numbers.
HSTU_DEVICE uint32_t cvt_satfinite_f16x2(float low, float high) {
  uint32_t word;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// Converts four numbers to e4m3, the first into the lowest byte. Numbers out of range become the
// largest ones, and NaN stays NaN.
HSTU_DEVICE uint32_t cvt_e4m3x4(float a, float b, float c, float d) {
  uint32_t word;
  asm("{.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};}"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

// cvt_e4m3x4() for two pairs of fp16 numbers.
HSTU_DEVICE uint32_t cvt_e4m3x4(uint32_t a, uint32_t b) {
  uint32_t word;
  asm("{.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n"
      "mov.b32 %0, {low, high};}"
      : "=r"(word)
      : "r"(a), "r"(b));
  return word;
}

// --- arithmetic on registers

HSTU_DEVICE float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / (1 + exp(-x)), within some units of the last place.
HSTU_DEVICE float sigmoid_approx(float x) {
  float y;
  asm("{.reg .f32 t; mul.f32 t, %1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;"
      " rcp.approx.ftz.f32 %0, t;}"
      : "=f"(y)
      : "f"(x));
  return y;
}

// Returns the larger number, or NaN if one is NaN.
HSTU_DEVICE float max_nan(float x, float y) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}

// Return for each half the number with the larger absolute value, or NaN if one is NaN. The signs
// of the result are undefined.
HSTU_DEVICE uint32_t max_nan_abs_f16x2(uint32_t a, uint32_t b) {
  uint32_t word;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  return word;
}
HSTU_DEVICE uint32_t max_nan_abs_bf16x2(uint32_t a, uint32_t b) {
  uint32_t word;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  return word;
}

// Arithmetic on pairs of fp16 numbers. Subnormal numbers are not flushed to zero.
HSTU_DEVICE uint32_t add_f16x2(uint32_t x, uint32_t y) {
  uint32_t sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(y));
  return sum;
}
HSTU_DEVICE uint32_t mul_f16x2(uint32_t x, uint32_t y) {
  uint32_t result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  return result;
}
HSTU_DEVICE uint32_t fma_f16x2(uint32_t x, uint32_t y, uint32_t z) {
  uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
  return result;
}
// The result is limited to [0, 1]; NaN becomes 0.
HSTU_DEVICE uint32_t fma_sat_f16x2(uint32_t x, uint32_t y, uint32_t z) {
  uint32_t result;
  asm("fma.rn.sat.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
  return result;
}
// Returns the low half (`half` = 0) or the high half (1) of a word in both halves. add, mul and fma
// of f16x2 can read one half of a register as both, so this compiles to no instruction.
HSTU_DEVICE uint32_t broadcast_half(uint32_t x, int half) {
  uint32_t result;
  if (half == 0) {
    asm("{.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};}"
        : "=r"(result)
        : "r"(x));
  } else {
    asm("{.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};}"
        : "=r"(result)
        : "r"(x));
  }
  return result;
}
HSTU_DEVICE uint32_t tanh_approx_f16x2(uint32_t x) {
  uint32_t result;
  asm("tanh.approx.f16x2 %0, %1;" : "=r"(result) : "r"(x));
  return result;
}

// --- barriers in shared memory

HSTU_DEVICE void mbarrier_arrive_if(const void* barrier, bool condition) {
  asm volatile(
      "{.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(
          shared_address(barrier)),
      "r"(static_cast<uint32_t>(condition))
      : "memory");
}

// --- asynchronous copies from device to shared memory

// Copies 16 bytes, bypassing the L1 cache.
HSTU_DEVICE void cp_async_16(const void* from, void* to) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from));
}

// Copies 16 bytes, or writes zeros, and reads the 128 bytes around them into the L2 cache.
HSTU_DEVICE void cp_async_16_or_zeros(const void* from, void* to, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
               "l"(from), "r"(exists ? 16 : 0));
}

// Copies 16 bytes through the L1 cache.
HSTU_DEVICE void cp_async_cached_16(const void* from, void* to) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from));
}

// Copies 4 bytes, or writes zeros.
HSTU_DEVICE void cp_async_4_or_zeros(const void* from, void* to, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(exists ? 4 : 0)
               : "memory");
}

// Copy 4 and 8 bytes.
HSTU_DEVICE void cp_async_4(const void* from, void* to) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}
HSTU_DEVICE void cp_async_8(const void* from, void* to) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}

HSTU_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;"); }

// Waits for all groups of this thread but the last kGroups.
template <int kGroups>
HSTU_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}
HSTU_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// --- bulk copies, which need compute capability 9.0

// Starts adding kBytes of fp32 in shared memory to device memory, as part of the bulk group.
template <int kBytes>
HSTU_DEVICE void bulk_reduce_add(const float* from, float* to) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(shared_address(from)), "n"(kBytes)
      : "memory");
}

// bulk_reduce_add() for numbers in bf16.
template <int kBytes>
HSTU_DEVICE void bulk_reduce_add_bf16(const void* from, void* to) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%0], [%1], %2;" ::"l"(to),
      "r"(shared_address(from)), "n"(kBytes)
      : "memory");
}

// Waits until the bulk groups of this thread are complete, where cute::tma_store_wait<0>() only
// waits until their shared memory has been read.
HSTU_DEVICE void bulk_wait_complete() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Starts copying kBytes to the shared memory of another block of the cluster; the copy completes on
// a barrier of that block. All addresses are of shared memory; `to` and `barrier` are mapped to the
// other block.
template <int kBytes>
HSTU_DEVICE void bulk_copy_to_cluster(uint32_t from, uint32_t to, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "n"(kBytes), "r"(barrier)
      : "memory");
}

// Reads the shared memory of a block of the cluster, at an address that is mapped to it.
HSTU_DEVICE float4 ld_shared_cluster_v4(uint32_t address) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address));
  return value;
}

// --- blocks of a cluster, which need compute capability 9.0

// Stores `value` at the address of `word` in block `rank` of the cluster, and then arrives at that
// block's `barrier`. The block sees there what this block has written before, also in device
// memory.
HSTU_DEVICE void st_and_arrive(int rank, int* word, int value, uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .b32 word, barrier;\n"
      "mapa.shared::cluster.u32 word, %0, %3;\n"
      "mapa.shared::cluster.u32 barrier, %2, %3;\n"
      "st.shared::cluster.b32 [word], %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [barrier];}" ::"r"(
          shared_address(word)),
      "r"(value), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
#endif
}

// Waits for the first phase of an mbarrier at which blocks of the cluster arrive.
HSTU_DEVICE void mbarrier_wait_cluster(uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  int is_complete = 0;
  while (!is_complete) {
    asm volatile(
        "{.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
        "selp.s32 %0, 1, 0, p;}"
        : "=r"(is_complete)
        : "r"(shared_address(barrier))
        : "memory");
  }
#endif
}

// --- barriers and the order of kernels

// Waits at a named barrier, and returns whether `value` is true in any of its threads.
template <int kThreads>
HSTU_DEVICE bool barrier_red_or(int barrier, bool value) {
  int result = value;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.s32 p, %0, 0;\n"
      "barrier.cta.red.or.pred q, %1, %2, p;\n"
      "selp.s32 %0, 1, 0, q;\n"
      "}\n"
      : "+r"(result)
      : "r"(barrier), "n"(kThreads)
      : "memory");
  return result != 0;
}

HSTU_DEVICE void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

HSTU_DEVICE void griddepcontrol_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// --- predicated loads

// Loads consecutive words if the condition is true; otherwise leaves them as they are. The loads
// are predicated, so that several of them are in flight: there is no branch between them.
HSTU_DEVICE void ld_if(bool condition, const uint32_t* address, uint32_t& a) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %1, 0;\n"
      "@p ld.global.b32 %0, [%2];}"
      : "+r"(a)
      : "r"(int{condition}), "l"(address));
}
HSTU_DEVICE void ld_if(bool condition, const uint32_t* address, uint32_t& a, uint32_t& b) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %2, 0;\n"
      "@p ld.global.v2.b32 {%0, %1}, [%3];}"
      : "+r"(a), "+r"(b)
      : "r"(int{condition}), "l"(address));
}
HSTU_DEVICE void ld_if(bool condition, const uint32_t* address, uint32_t& a, uint32_t& b,
                       uint32_t& c, uint32_t& d) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %4, 0;\n"
      "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%5];}"
      : "+r"(a), "+r"(b), "+r"(c), "+r"(d)
      : "r"(int{condition}), "l"(address));
}

}  // namespace hstu::ptx
