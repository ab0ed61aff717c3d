// Exact sums of fp32 numbers in device memory, for the gradients of the relative bias's tables:
// they do not depend on the order of additions, so they are the same bit by bit in every run.
//
// A number is an integer of 24 bits times a power of two. The sum of an entry has a 64-bit integer
// for each 12 exponents, and a number is added to one of them. There is room for 2^28 numbers.
#pragma once

#include <cstdint>

#include "macros.h"

namespace hstu {

struct TableSum {
  static constexpr int kExponents = 12;  // that share a word
  // The last word counts the numbers that are not finite.
  static constexpr int kWords = (254 + kExponents) / kExponents + 1;

  int64_t* words = nullptr;  // [kWords, entries], zeroed
  int64_t entries = 0;

  // The number that add() adds, and the word of the entry that it adds to.
  struct Term {
    int word;
    int64_t addend;
  };
  static HSTU_HOST_DEVICE Term term_of(uint32_t bits) {
    const int exponent = static_cast<int>(bits >> 23 & 0xff);
    if (exponent == 0xff) return {kWords - 1, 1};
    const int64_t fraction = bits & 0x7fffff;
    // NOTE: numbers of exponent 0 have no hidden bit, and the same unit as numbers of exponent 1.
    const int64_t integer = exponent == 0 ? fraction << 1 : fraction | 0x800000;
    const int64_t shifted = integer << exponent % kExponents;
    return {exponent / kExponents, bits >> 31 ? -shifted : shifted};
  }

#if defined(__CUDACC__)
  HSTU_DEVICE void add(int64_t entry, float value) const {
    if (value == 0) return;
    const Term term = term_of(__float_as_uint(value));
    atomicAdd(reinterpret_cast<unsigned long long*>(words + term.word * entries + entry),
              static_cast<unsigned long long>(term.addend));
  }
#endif

  // The sum of an entry, rounded.
  HSTU_HOST_DEVICE double value(int64_t entry) const {
    if (words[(kWords - 1) * entries + entry]) return 0.0 / 0.0;
    double sum = 0;
    double unit = 0x1p-150;
    for (int word = 0; word < kWords - 1; ++word, unit *= 1 << kExponents) {
      sum += static_cast<double>(words[word * entries + entry]) * unit;
    }
    return sum;
  }
};

}  // namespace hstu
