// Pages of e4m3: the stored bytes of a tile are copied to the stage of its 16-bit tile, and
// converted in place.
#pragma once

#include <cutlass/arch/barrier.h>

#include "../common/e4m3.h"
#include "../common/ptx.h"
#include "paged_keys.h"
#include "pipeline.h"
#include "tensors.h"

namespace hstu::sm90 {

// The scales of the rows of stored tiles, and the barriers of the copies of bytes and scales. They
// form a ring of their own, because tiles of targets are not quantized and take no stage of it. The
// bytes are copied to the second half of a stage of K or V.
template <int kStages, int kKeys>
struct QuantizedTiles {
  using State = PipelineState<kStages>;

  float scales[kStages][kKeys];
  cutlass::arch::ClusterTransactionBarrier full[kStages];
  // Completes when all lanes have read the scales.
  // NOTE: the stage of K or V becomes empty even later, but racecheck does not see that this orders
  // the scales, too, because other threads wait for it.
  cutlass::arch::ClusterBarrier empty[kStages];

  // `full` counts the arrival that expects the bytes, and one of each lane for its scales.
  HSTU_DEVICE void init() {
    for (auto& barrier : full) barrier.init(1 + 32);
    for (auto& barrier : empty) barrier.init(32);
  }
};

// Starts copying the bytes and scales of the tile of history that begins with key `first`. Called
// by a warp.
template <PagePart kPart, int kKeys, int kHeadDim, typename Element, typename Quantized>
HSTU_DEVICE void start_copy_quantized(const PagedParams& paged, const PageMap& pages,
                                      PageWindow& window, const Sequence& sequence, int head,
                                      int first, Element* tile, Quantized& quantized,
                                      typename Quantized::State state) {
  static_assert(sizeof(Element) == 2);
  constexpr int kSize = kKeys * kHeadDim;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  auto& full = quantized.full[state.index()];
  quantized.empty[state.index()].wait(state.phase() ^ 1);
  if (lane == 0) full.arrive_and_expect_tx(kSize);
  start_copy_pages<kPart, kKeys, kHeadDim>(paged, pages, window, sequence, head, first,
                                           reinterpret_cast<uint8_t*>(tile) + kSize, full);
#pragma unroll
  for (int row = lane; row < kKeys; row += 32) {
    const int key = first + row;
    const int id = window.page(paged.page_of(key));
    // NOTE: scales past the end of the history may be NaN.
    const bool exists = id >= 0 && key < sequence.history_end;
    const int64_t at = max(id, 0) * paged.scale_page_stride +
                       (kPart == PagePart::kValues ? paged.scale_kv_stride : 0) +
                       paged.slot_of(key) * paged.scale_slot_stride + head;
    ptx::cp_async_4_or_zeros(paged.scales + (exists ? at : 0),
                             quantized.scales[state.index()] + row, exists);
  }
  cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<uint64_t*>(&full));
}

// Waits for the bytes and scales of a tile, and converts them to 16 bits. Called by a warp.
// NOTE: this works in place because it goes in ascending order: values of 16 bits are never written
// over bytes that have not been read.
template <int kKeys, int kHeadDim, typename Element, typename Quantized>
HSTU_DEVICE void dequantize_tile(const Quantized& quantized, typename Quantized::State state,
                                 Element* tile) {
  constexpr int kPieces = kKeys * kHeadDim / 16;  // of 16 values
  constexpr int kRowPieces = kPanel<kHeadDim> / 16;
  constexpr int kAtOnce = 4;  // loads of a lane
  static_assert(kPieces % (32 * kAtOnce) == 0);
  constexpr int kSwizzleBits = kHeadDim < 64 ? 0x30 : 0x70;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  quantized.full[state.index()].wait(state.phase());
  char* const memory = reinterpret_cast<char*>(tile);
  const uint4* const bytes = reinterpret_cast<const uint4*>(memory + kKeys * kHeadDim);
  const float* const scales = quantized.scales[state.index()];
#pragma unroll 1
  for (int first = lane; first < kPieces; first += 32 * kAtOnce) {
    uint4 pieces[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) pieces[n] = bytes[first + n * 32];
    __syncwarp();  // all lanes have loaded what the stores may overwrite
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int piece = first + n * 32;
      const float scale = scales[piece / kRowPieces % kKeys];
      const auto four = [&](uint32_t word) { return dequantized<Element>(word, scale); };
      const uint2 parts[] = {four(pieces[n].x), four(pieces[n].y), four(pieces[n].z),
                             four(pieces[n].w)};
      const int offset = piece * 32;
      const int swizzle = offset >> 3 & kSwizzleBits;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint2 low = parts[half * 2], high = parts[half * 2 + 1];
        *reinterpret_cast<uint4*>(memory + (offset + half * 16 ^ swizzle)) = {low.x, low.y, high.x,
                                                                              high.y};
      }
    }
  }
  quantized.empty[state.index()].arrive();
  cutlass::arch::fence_view_async_shared();  // before wgmma reads it
  __syncwarp();
}

}  // namespace hstu::sm90
