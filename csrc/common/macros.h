// Function qualifiers shared by host and device code.
#pragma once

#if defined(__CUDACC__)
#define HSTU_HOST_DEVICE __host__ __device__ __forceinline__
#define HSTU_DEVICE __device__ __forceinline__
#else
// NOTE: always_inline, because the CPU kernels are compiled once per instruction set: an
// out-of-line copy made for AVX-512 could otherwise be the one that the linker keeps for every
// caller.
#define HSTU_HOST_DEVICE __attribute__((always_inline)) inline
#endif
