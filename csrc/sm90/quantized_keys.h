// Pages of e4m3: the stored bytes of a tile of K or V are copied to a ring of byte stages, and the
// converter warpgroup converts them to the stage of the 16-bit tile.
#pragma once

#include <cutlass/arch/barrier.h>

#include "../common/e4m3.h"
#include "../common/ptx.h"
#include "paged_keys.h"
#include "pipeline.h"
#include "tensors.h"

namespace hstu::sm90 {

// Starts copying the scales of the rows of the tile of history that begins with key `first`. Called
// by a warp, whose window has the pages of the tile.
template <PagePart kPart, int kKeys>
HSTU_DEVICE void start_copy_scales(const PagedParams& paged, const PageWindow& window,
                                   const Sequence& sequence, int head, int first,
                                   float (&scales)[kKeys]) {
#pragma unroll
  for (int row = static_cast<int>(threadIdx.x) % 32; row < kKeys; row += 32) {
    const int key = first + row;
    const int id = window.page(paged.page_of(key));
    // NOTE: scales past the end of the history may be NaN.
    const bool exists = id >= 0 && key < sequence.history_end;
    const int64_t at = max(id, 0) * paged.scale_page_stride +
                       (kPart == PagePart::kValues ? paged.scale_kv_stride : 0) +
                       paged.slot_of(key) * paged.scale_slot_stride + head;
    ptx::cp_async_4_or_zeros(paged.scales + (exists ? at : 0), scales + row, exists);
  }
}

// Converts the bytes of a tile to 16 bits, and multiplies them by the scales of their rows. Called
// by a warpgroup.
template <int kKeys, int kHeadDim, typename Element>
HSTU_DEVICE void dequantize_tile(const uint8_t* bytes, const float* scales, Element* tile) {
  constexpr int kPieces = kKeys * kHeadDim / 16 / kWarpgroup;  // of 16 values, for each thread
  constexpr int kRowPieces = kPanel<kHeadDim> / 16;
  constexpr int kSwizzleBits = kHeadDim < 64 ? 0x30 : 0x70;
  constexpr int kAhead = 2;  // pieces that are loaded before they are needed
  static_assert(kPieces % kAhead == 0);
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  // NOTE: addresses that depend on the thread are computed once: the pieces of a thread are whole
  // rows apart, a multiple of the rows after which the swizzle repeats.
  const auto* const from = reinterpret_cast<const uint4*>(bytes) + thread;
  const float* const scales_of_thread = scales + thread / kRowPieces;
  const int to = thread * 32 ^ (thread * 32 >> 3 & kSwizzleBits);
  char* const low_half = reinterpret_cast<char*>(tile) + to;
  char* const high_half = reinterpret_cast<char*>(tile) + (to ^ 16);
  uint4 pieces[kAhead];
#pragma unroll
  for (int n = 0; n < kAhead; ++n) pieces[n] = from[n * kWarpgroup];
#pragma unroll
  for (int n = 0; n < kPieces; ++n) {
    const uint4 words = pieces[n % kAhead];
    if (n + kAhead < kPieces) pieces[n % kAhead] = from[(n + kAhead) * kWarpgroup];
    const float scale = scales_of_thread[n * kWarpgroup / kRowPieces % kKeys];
    const auto four = [&](uint32_t word) { return dequantized<Element>(word, scale); };
    const uint2 parts[] = {four(words.x), four(words.y), four(words.z), four(words.w)};
    constexpr int kBytes = kWarpgroup * 32;  // between the pieces of a thread
    *reinterpret_cast<uint4*>(low_half + n * kBytes) = {parts[0].x, parts[0].y, parts[1].x,
                                                        parts[1].y};
    *reinterpret_cast<uint4*>(high_half + n * kBytes) = {parts[2].x, parts[2].y, parts[3].x,
                                                         parts[3].y};
  }
  cutlass::arch::fence_view_async_shared();  // before wgmma reads it
}

}  // namespace hstu::sm90
