// Promotion of accumulators: the accumulators of 8-bit products keep about 14 bits and truncate the
// rest, so after some tiles an accumulator is added to a total in fp32.
#pragma once

#include "split_reduction.h"

namespace hstu::sm90 {

// The accumulators of 16-bit products are fp32.
struct NoPromotion {
  HSTU_DEVICE NoPromotion(float*, int) {}
  template <typename Out>
  HSTU_DEVICE bool add_if_due(Out&) {
    return false;
  }
  template <typename Out>
  HSTU_DEVICE void finish(Out&) {}
};

// The total is in registers. A promotion is due after every kTiles tiles.
template <typename Out, int kTiles>
struct RegisterPromotion {
  Out total;
  int tiles = 0;  // since the last promotion

  HSTU_DEVICE RegisterPromotion(float*, int) { clear(total); }

  // Called after each tile but the last one of a work tile. If true, the sum has been added, and
  // the next products begin with 0.
  HSTU_DEVICE bool add_if_due(Out& out) {
    if (++tiles < kTiles) return false;
    add(out);
    tiles = 0;
    return true;
  }
  // Adds the total to the sum, before the epilogue.
  HSTU_DEVICE void finish(Out& out) {
    add(out);
#pragma unroll
    for (int n = 0; n < size(out); ++n) out(n) = total(n);
    clear(total);
    tiles = 0;
  }

 private:
  HSTU_DEVICE void add(const Out& out) {
#pragma unroll
    for (int n = 0; n < size(total); ++n) total(n) += out(n);
  }
};

// The total is in device memory, where each consumer warpgroup of a block has its own. It stays in
// the L2 cache. `index` is the number of the total.
template <typename Out, int kTiles>
struct WorkspacePromotion {
  float* const total;
  int tiles = 0;  // of the work tile

  HSTU_DEVICE WorkspacePromotion(float* totals, int index)
      : total(totals + index * (size(Out{}) * kWarpgroup)) {}

  HSTU_DEVICE bool add_if_due(Out& out) {
    if (++tiles % kTiles != 0) return false;
    if (tiles == kTiles) {
      store_partial(out, total);
    } else {
      add_to_partial(out, total);
    }
    return true;
  }
  HSTU_DEVICE void finish(Out& out) {
    if (tiles >= kTiles) add_partial<16>(total, out);
    tiles = 0;
  }
};

}  // namespace hstu::sm90
