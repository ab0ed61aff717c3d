// Vectors of the instruction set that this translation unit is compiled for.
//
// Everything in csrc/cpu that depends on the instruction set lives in an inline namespace of its
// own (HSTU_CPU_ISA), so that several copies can be linked into one library.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef HSTU_CPU_ISA
#error "define HSTU_CPU_ISA (the name of the instruction set) before including a CPU kernel header"
#endif

#define HSTU_INLINE __attribute__((always_inline)) inline

namespace hstu::cpu::HSTU_CPU_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kGemmVectors = 4;  // vectors in a row of a block of a product
constexpr int kGemmSums = 24;    // vectors of sums in a block, out of 32 registers
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kGemmVectors = 2;
constexpr int kGemmSums = 8;
#else
constexpr int kVectorBytes = 16;
constexpr int kGemmVectors = 2;
constexpr int kGemmSums = 8;
#endif

template <typename T>
struct VectorOf {
  static constexpr int kLanes = kVectorBytes / sizeof(T);
  typedef T Type __attribute__((vector_size(kVectorBytes)));
};

template <typename T>
using Vector = typename VectorOf<T>::Type;

template <typename T>
constexpr int kLanes = VectorOf<T>::kLanes;

template <typename T>
HSTU_INLINE Vector<T> load(const T* p) {
  Vector<T> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

template <typename T>
HSTU_INLINE void store(T* p, Vector<T> v) {
  std::memcpy(p, &v, sizeof(v));
}

// A non-temporal store; p is aligned to kVectorBytes. Other threads see it after finish_streams().
template <typename T>
HSTU_INLINE void stream(T* p, Vector<T> v) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)v);
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)v);
#elif defined(__x86_64__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)v);
#else
  store(p, v);
#endif
}

inline void finish_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

template <typename T>
HSTU_INLINE Vector<T> broadcast(T x) {
  return x - Vector<T>{};
}

// Returns v with 0 in the lanes whose bit is not set.
HSTU_INLINE Vector<float> keep(uint64_t bits, Vector<float> v) {
#if defined(__AVX512F__)
  return (Vector<float>)_mm512_maskz_mov_ps(static_cast<__mmask16>(bits), (__m512)v);
#else
  Vector<int32_t> lane_bit;
  for (int n = 0; n < kLanes<int32_t>; ++n) lane_bit[n] = 1 << n;
  const Vector<int32_t> set = (broadcast(static_cast<int32_t>(bits)) & lane_bit) != 0;
  return (Vector<float>)((Vector<int32_t>)v & set);
#endif
}

HSTU_INLINE Vector<double> keep(uint64_t bits, Vector<double> v) {
  for (int n = 0; n < kLanes<double>; ++n) v[n] = bits >> n & 1 ? v[n] : 0.0;
  return v;
}

// The accuracy of the sigmoid: an fp32 rounding, or well below a bf16 rounding.
enum class Accuracy { kFull, kBFloat16 };

// Returns 2^f for f in [-1/2, 1/2] by a minimax polynomial with relative error 2e-9 (kFull) or
// 3e-6.
template <Accuracy accuracy>
HSTU_INLINE Vector<float> exp2_fraction(Vector<float> f) {
  if constexpr (accuracy == Accuracy::kFull) {
    Vector<float> p = 0.00015345812f * f + 0.00133999312f;
    p = p * f + 0.00961848896f;
    p = p * f + 0.0555032878f;
    p = p * f + 0.240226469f;
    p = p * f + 0.693147206f;
    return p * f + 1.0f;
  } else {
    Vector<float> p = 0.00957010191f * f + 0.0559178603f;
    p = p * f + 0.240247448f;
    p = p * f + 0.693121815f;
    return p * f + 0.999999261f;
  }
}

// 1 / (1 + exp(-x))
template <Accuracy accuracy>
HSTU_INLINE Vector<float> sigmoid(Vector<float> x) {
  constexpr float kLog2E = 1.44269504f;
#if defined(__AVX512F__)
  // NOTE: the bound comes first, so that a NaN in x passes through the minimum.
  const __m512 z = _mm512_min_ps(_mm512_set1_ps(126.0f), (__m512)(x * -kLog2E));
  const __m512 n = _mm512_roundscale_ps(z, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 p = (__m512)exp2_fraction<accuracy>((Vector<float>)_mm512_sub_ps(z, n));
  const Vector<float> denominator = (Vector<float>)_mm512_scalef_ps(p, n) + 1.0f;
  const Vector<float> r = (Vector<float>)_mm512_rcp14_ps((__m512)denominator);
  if constexpr (accuracy == Accuracy::kBFloat16) return r;
  return r + r * (1.0f - denominator * r);
#else
  Vector<float> z = x * -kLog2E;
  z = z > 126.0f ? broadcast(126.0f) : z;
  z = z < -126.0f ? broadcast(-126.0f) : z;
  // Adding 1.5 * 2^23 rounds to the nearest integer, which is then in the low bits.
  const Vector<float> shifted = z + 12582912.0f;
  const Vector<int32_t> exponent = (Vector<int32_t>)shifted << 23;
  const Vector<float> p = exp2_fraction<accuracy>(z - (shifted - 12582912.0f));
  return 1.0f / (1.0f + (Vector<float>)((Vector<int32_t>)p + exponent));
#endif
}

template <Accuracy accuracy>
HSTU_INLINE Vector<double> sigmoid(Vector<double> x) {
  for (int n = 0; n < kLanes<double>; ++n) x[n] = 1.0 / (1.0 + std::exp(-x[n]));
  return x;
}

// Interleaves a and b, beginning with an element of a: their first halves make `low`, their second
// halves `high`.
template <typename T>
HSTU_INLINE void interleave(Vector<T> a, Vector<T> b, Vector<T>& low, Vector<T>& high) {
  typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> Index;
  Vector<Index> low_index, high_index;
  for (int n = 0; n < kLanes<T>; ++n) {
    low_index[n] = n / 2 + (n % 2) * kLanes<T>;
    high_index[n] = low_index[n] + kLanes<T> / 2;
  }
  low = __builtin_shuffle(a, b, low_index);
  high = __builtin_shuffle(a, b, high_index);
}

// Transposes a square of kLanes vectors in place, in log2(kLanes) rounds of interleaving.
template <typename T>
HSTU_INLINE void transpose_square(Vector<T> (&v)[kLanes<T>]) {
  constexpr int kHalf = kLanes<T> / 2;
#pragma GCC unroll 4
  for (int round = kLanes<T>; round > 1; round /= 2) {
    Vector<T> next[kLanes<T>];
#pragma GCC unroll 8
    for (int n = 0; n < kHalf; ++n) interleave<T>(v[n], v[n + kHalf], next[2 * n], next[2 * n + 1]);
#pragma GCC unroll 16
    for (int n = 0; n < kLanes<T>; ++n) v[n] = next[n];
  }
}

}  // namespace hstu::cpu::HSTU_CPU_ISA
