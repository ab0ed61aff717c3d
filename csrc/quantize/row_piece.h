// A piece of a row of 16-bit numbers, which a thread quantizes. Neighboring threads have a row.
#pragma once

#include "../common/ptx.h"
#include "codes.h"

namespace hstu {

template <typename Element>
struct RowPiece {
  static constexpr int kElements = 16;
  static constexpr uint32_t kInfinity = std::is_same_v<Element, cutlass::half_t> ? 0x7c00 : 0x7f80;

  alignas(16) uint32_t words[kElements / 2];

  // Loads elements from column `column` of a row on. They are zeros from head_dim on, a multiple of
  // 8, or if the row does not exist.
  HSTU_DEVICE void load(const Element* row, int column, int head_dim, bool exists) {
    const auto* const from = reinterpret_cast<const uint4*>(row + column);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is_inside = exists && column + 8 * half < head_dim;
      reinterpret_cast<uint4*>(words)[half] = is_inside ? __ldg(from + half) : uint4{};
    }
  }

  HSTU_DEVICE float operator[](int n) const {
    return n % 2 ? high_half<Element>(words[n / 2]) : low_half<Element>(words[n / 2]);
  }

  // Keeps the compiler from holding unpacked elements in registers until it needs them again.
  HSTU_DEVICE void forget_values() {
#pragma unroll
    for (uint32_t& word : words) asm volatile("" : "+r"(word));
  }

  // Returns the largest magnitude, as an integer in the same order.
  HSTU_DEVICE uint32_t largest_magnitude() const {
    uint32_t largest = 0;
#pragma unroll
    for (const uint32_t word : words) largest = __vmaxu2(largest, word & twice_half(0x7fff));
    return max(largest & 0xffff, largest >> 16);
  }

  HSTU_DEVICE bool is_zero() const {
    uint32_t bits = 0;
#pragma unroll
    for (const uint32_t word : words) bits |= word;
    return (bits & twice_half(0x7fff)) == 0;
  }

  // Replaces NaN and infinity by zero. Bit n of the result says that element n was one of these.
  HSTU_DEVICE uint32_t replace_nonfinite() {
    uint32_t found = 0;
#pragma unroll
    for (int n = 0; n < kElements; ++n) {
      const int shift = n % 2 * 16;
      if ((words[n / 2] >> shift & 0x7fff) < kInfinity) continue;
      words[n / 2] &= ~(0xffffu << shift);
      found |= 1u << n;
    }
    return found;
  }

  // Returns the codes of the elements times `scale`.
  HSTU_DEVICE uint4 codes(float scale) const {
    const auto four = [&](int n) {
      return ptx::cvt_e4m3x4((*this)[n] * scale, (*this)[n + 1] * scale, (*this)[n + 2] * scale,
                             (*this)[n + 3] * scale);
    };
    return {four(0), four(4), four(8), four(12)};
  }
};

// Replaces those of 16 codes by NaN whose bits are set.
HSTU_DEVICE void set_nan(uint4& codes, uint32_t is_nan) {
  const auto bytes = [is_nan](int n) {
    const uint32_t bits = is_nan >> n;
    return (bits & 1 | (bits & 2) << 7 | (bits & 4) << 14 | (bits & 8) << 21) * 0x7f;
  };
  codes.x |= bytes(0);
  codes.y |= bytes(4);
  codes.z |= bytes(8);
  codes.w |= bytes(12);
}

// Returns in all lanes of a row the sum, or the maximum, of their values of x.
template <typename Value, typename Combine>
HSTU_DEVICE Value combine_lanes(Value x, int lanes, Combine combine) {
#pragma unroll 1
  for (int step = lanes / 2; step > 0; step /= 2) {
    x = combine(x, __shfl_xor_sync(0xffffffff, x, step));
  }
  return x;
}

// Returns 1 / x for x from 2^-60 on. The quotient of large numbers is subnormal.
HSTU_DEVICE float reciprocal(float x) { return __fdividef(1.0f, x * 0x1p-8f) * 0x1p-8f; }

}  // namespace hstu
