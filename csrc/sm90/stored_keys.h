// Keys and values stored as e4m3: copied to where their tiles of 16 bits are to be, and converted
// there.
#pragma once

#include <cuda_fp8.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_conversion.h>

#include "paged_keys.h"
#include "pipeline.h"

namespace hstu::sm90 {

// Stored bytes of a tile and the scales of its rows, on their way. They have a ring of their own,
// since tiles of targets pass it by; the bytes lie in the second half of the tile's place.
template <int kStages, int kKeys>
struct StoredTiles {
  using Place = RingPlace<kStages>;

  float scales[kStages][kKeys];
  cutlass::arch::ClusterTransactionBarrier full[kStages];

  // One arrival tells how many bytes will come, and one of each lane that its scales are there.
  HSTU_DEVICE void init() {
    for (auto& barrier : full) barrier.init(1 + 32);
  }
};

// Copies four bytes, or writes zeros.
HSTU_DEVICE void start_copy_word(const float* from, float* to, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(cast_smem_ptr_to_uint(to)),
               "l"(from), "r"(exists ? 4 : 0)
               : "memory");
}

// Starts copying the stored bytes and scales of the tile of history from key `first` on. By a warp.
template <PagePart kPart, int kKeys, int kHeadDim, typename Element, typename Stored>
HSTU_DEVICE void start_copy_stored(const PagedParams& paged, const PageMap& pages,
                                   PageWindow& window, const Sequence& sequence, int head,
                                   int first, Element* tile, Stored& stored,
                                   typename Stored::Place place) {
  static_assert(sizeof(Element) == 2);
  constexpr int kSize = kKeys * kHeadDim;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  auto& full = stored.full[place.stage()];
  if (lane == 0) full.arrive_and_expect_tx(kSize);
  start_copy_pages<kPart, kKeys, kHeadDim>(paged, pages, window, sequence, head, first,
                                           reinterpret_cast<uint8_t*>(tile) + kSize, full);
#pragma unroll
  for (int row = lane; row < kKeys; row += 32) {
    const int key = first + row;
    const int id = window.page(key / paged.page_size);
    // NOTE: what a page holds behind the end of the history may be anything.
    const bool exists = id >= 0 && key < sequence.history_end;
    const int64_t at = max(id, 0) * paged.scale_page_stride +
                       (kPart == PagePart::kValues ? paged.scale_kv_stride : 0) +
                       key % paged.page_size * paged.scale_slot_stride + head;
    start_copy_word(paged.scales + (exists ? at : 0), stored.scales[place.stage()] + row, exists);
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                   cast_smem_ptr_to_uint(reinterpret_cast<uint64_t*>(&full)))
               : "memory");
}

// 16 stored values times a scale, rounded.
template <typename Element>
HSTU_DEVICE void convert(uint4 bytes, float scale, uint4 (&to)[2]) {
  const uint32_t words[] = {bytes.x, bytes.y, bytes.z, bytes.w};
  uint32_t* const pairs = reinterpret_cast<uint32_t*>(to);
  const cutlass::NumericArrayConverter<Element, float, 2> round;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const auto two = static_cast<__nv_fp8x2_storage_t>(words[n / 2] >> n % 2 * 16);
    const float2 values = __half22float2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3));
    const auto rounded = round({values.x * scale, values.y * scale});
    pairs[n] = reinterpret_cast<const uint32_t&>(rounded);
  }
}

// Turns the stored bytes of a tile, which have come, into the tile. By a warp.
// NOTE: in place, in ascending order: what is written never reaches what has not been read.
template <int kKeys, int kHeadDim, typename Element, typename Stored>
HSTU_DEVICE void convert_stored(const Stored& stored, typename Stored::Place place, Element* tile) {
  constexpr int kPieces = kKeys * kHeadDim / 16;  // of 16 values
  constexpr int kRowPieces = kPanel<kHeadDim> / 16;
  constexpr int kAtOnce = 4;  // loads of a lane
  static_assert(kPieces % (32 * kAtOnce) == 0);
  constexpr int kSwizzleBits = kHeadDim < 64 ? 0x30 : 0x70;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  stored.full[place.stage()].wait(place.parity());
  char* const memory = reinterpret_cast<char*>(tile);
  const uint4* const bytes = reinterpret_cast<const uint4*>(memory + kKeys * kHeadDim);
  const float* const scales = stored.scales[place.stage()];
#pragma unroll 1
  for (int first = lane; first < kPieces; first += 32 * kAtOnce) {
    uint4 pieces[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) pieces[n] = bytes[first + n * 32];
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int piece = first + n * 32;
      uint4 converted[2];
      convert<Element>(pieces[n], scales[piece / kRowPieces % kKeys], converted);
      const int offset = piece * 32;
      const int swizzle = offset >> 3 & kSwizzleBits;
      *reinterpret_cast<uint4*>(memory + (offset ^ swizzle)) = converted[0];
      *reinterpret_cast<uint4*>(memory + (offset + 16 ^ swizzle)) = converted[1];
    }
  }
  cutlass::arch::fence_view_async_shared();  // before wgmma reads it
  __syncwarp();
}

}  // namespace hstu::sm90
