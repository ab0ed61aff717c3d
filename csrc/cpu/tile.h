// The steps between the products of a tile of scores: bias, activation and mask.
#pragma once

#include "../common/activation.h"
#include "../common/mask.h"
#include "../common/pages.h"
#include "bias.h"
#include "pack.h"

namespace hstu::cpu::HSTU_CPU_ISA {

// Calls `function(rows, keys)` for blocks that cover the visible scores of a partial tile. A block
// has `size` rows and the keys that they see, and its keys begin at a multiple of `size`.
template <typename Function>
HSTU_INLINE void for_each_visible_block(const Mask& mask, Interval rows, Interval keys, int size,
                                        Function function) {
  for (int r0 = rows.begin; r0 < rows.end; r0 += size) {
    const int r1 = smaller(r0 + size, rows.end);
    const KeyIntervals visible = mask.kv_intervals(r0, r1);
    int begin = keys.end;
    int end = keys.begin;
    for (int n = 0; n < visible.count; ++n) {
      const Interval seen = visible.interval[n];
      if (seen.begin >= keys.end || seen.end <= keys.begin) continue;
      begin = smaller(begin, larger(seen.begin, keys.begin));
      end = larger(end, smaller(seen.end, keys.end));
    }
    if (begin >= end) continue;
    begin -= (begin - keys.begin) % size;
    function(Interval{r0, r1}, Interval{begin, end});
  }
}

// Transposes a 64 x 64 matrix of bits: bit m of word n becomes bit n of word m.
inline void transpose_bits(uint64_t (&words)[64]) {
  uint64_t mask = 0x00000000ffffffff;
  for (int size = 32; size > 0; size /= 2, mask ^= mask << size) {
    for (int n = 0; n < 64; n = (n + size + 1) & ~size) {
      const uint64_t swapped = (words[n] >> size ^ words[n + size]) & mask;
      words[n] ^= swapped << size;
      words[n + size] ^= swapped;
    }
  }
}

// Returns memory for the left operand that is made of a tile of sums. Without pairs, it overwrites
// the sums.
template <typename Arithmetic>
typename Arithmetic::Unit* operand_of(typename Arithmetic::Accum* sums, int count, Arena& arena) {
  if constexpr (Arithmetic::kPair == 1) {
    return sums;
  } else {
    return arena.take<typename Arithmetic::Unit>(count / Arithmetic::kPair);
  }
}

// Stores a vector of results in a row of a left operand, from `element` on.
template <typename Arithmetic>
HSTU_INLINE void store_operand(typename Arithmetic::Unit* row, int element,
                               Vector<typename Arithmetic::Accum> value) {
  if constexpr (Arithmetic::kPair == 1) {
    store(row + element, value);
  } else {
#if defined(__AVX512BF16__)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
    std::memcpy(row + element / 2, &rounded, sizeof(rounded));
#endif
  }
}

// Stores two neighboring rows of results as the units that pair them.
template <typename Arithmetic>
HSTU_INLINE void store_row_pair(typename Arithmetic::Unit* units,
                                Vector<typename Arithmetic::Accum> even,
                                Vector<typename Arithmetic::Accum> odd) {
#if defined(__AVX512BF16__)
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)even));
  const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)odd));
  store(units, (Vector<uint32_t>)_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
#endif
}

// The sequence, mask and tensors of one head, for the forward and the backward.
template <typename T>
struct HeadView {
  Sequence sequence;
  Mask mask;
  RowSource<T> q, k, v;

  HeadView(const ForwardParams& params, int b, int head)
      : sequence(load_sequence(params.batch, b)), mask(params.mask, sequence, head) {
    q = row_source<T>(params.q, sequence.q_begin, head);
    if (!params.paged.kv_cache) {
      k = row_source<T>(params.k, sequence.k_begin, head);
      v = row_source<T>(params.v, sequence.k_begin, head);
      return;
    }
    // With pages, k and v hold only the targets: the last rows of the sequence.
    const int64_t begin = sequence.q_begin - sequence.offset;
    k = paged_source(params, PagePart::kKeys, begin, b, head);
    v = paged_source(params, PagePart::kValues, begin, b, head);
  }

 private:
  RowSource<T> paged_source(const ForwardParams& params, PagePart part, int64_t begin, int b,
                            int head) const {
    const PagedParams& paged = params.paged;
    const bool is_values = part == PagePart::kValues;
    RowSource<T> source = row_source<T>(is_values ? params.v : params.k, begin, head);
    source.paged_rows = sequence.history_end;
    source.paged = &paged;
    const int64_t offset = (is_values ? paged.kv_stride : 0) + head * paged.head_stride;
    if (paged.scales) {
      source.quantized_pages = static_cast<const E4m3*>(paged.kv_cache) + offset;
      source.scales = paged.scales + (is_values ? paged.scale_kv_stride : 0) + head;
    } else {
      source.pages = static_cast<const T*>(paged.kv_cache) + offset;
    }
    source.first_page = paged.page_offsets[b];
    return source;
  }
};

// The factor of a row: attn_scale or 1 / scaling_seqlen.
template <typename Accum>
HSTU_INLINE Accum row_scale(const ForwardParams& params, int64_t packed_row) {
  if (!params.attn_scale) return static_cast<Accum>(params.scale);
  return params.attn_scale[params.attn_scale_per_row ? packed_row : 0];
}

}  // namespace hstu::cpu::HSTU_CPU_ISA
