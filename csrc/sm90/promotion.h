// Promotion of accumulators: the accumulators of 8-bit products keep about 14 bits and truncate the
// rest, so after some tiles an accumulator is added to a total in fp32.
#pragma once

#include "split_reduction.h"

namespace hstu::sm90 {

// The accumulators of 16-bit products are fp32.
struct NoPromotion {
  HSTU_DEVICE NoPromotion(float*, float*) {}
  template <typename Out>
  HSTU_DEVICE bool add_if_due(Out&) {
    return false;
  }
  template <typename Out>
  HSTU_DEVICE void finish(Out&) {}
};

// A promotion is due after every kTiles tiles. The first columns have their totals in shared
// memory, the last ones in registers, and those between in device memory. Totals in memory are in
// the order of store_partial(), and each thread reads what it has written itself.
// NOTE: the next P V waits until the registers have been read. An addition in device memory takes
// several times as long as one in shared memory.
template <typename Out, int kTiles, TotalColumns kColumns>
class Promotion {
  // Registers of a thread.
  static constexpr int kSize = decltype(size(Out{}))::value;
  static constexpr int kShared = kColumns.shared / 2;
  static constexpr int kRegisters = kColumns.registers / 2;
  static constexpr int kGlobal = kSize - kShared - kRegisters;
  static constexpr int kGlobalEnd = kShared + kGlobal;
  // Registers that finish() loads from device memory at once.
  static constexpr int kAtOnce = kGlobal > 56 && kGlobal % 8 == 0 ? kGlobal / 2 : kGlobal;
  static_assert(kShared % 4 == 0 && kGlobal % 4 == 0 && kAtOnce % 4 == 0);

 public:
  // `shared` and `global` are the totals of the warpgroup.
  HSTU_DEVICE Promotion(float* shared, float* global) : shared_(shared), global_(global) {
    clear_registers();
  }

  // Called after each tile but the last one of a work tile. If true, the sum has been added, and
  // the next products begin with 0.
  HSTU_DEVICE bool add_if_due(Out& out) {
    if (++tiles_ % kTiles != 0) return false;
    const int thread = reload_thread_idx() % kWarpgroup * 4;
    float* const shared = shared_ + thread;
    float* const global = global_ + thread;
    if (tiles_ == kTiles) {
#pragma unroll
      for (int n = kShared; n < kGlobalEnd; n += 4) {
        store(global + (n - kShared) * kWarpgroup, out, n);
      }
#pragma unroll
      for (int n = 0; n < kShared; n += 4) store(shared + n * kWarpgroup, out, n);
    } else {
#pragma unroll
      for (int n = kShared; n < kGlobalEnd; n += 4) {
        ptx::red_add_v4(global + (n - kShared) * kWarpgroup, out(n), out(n + 1), out(n + 2),
                        out(n + 3));
      }
#pragma unroll
      for (int n = 0; n < kShared; n += 4) {
        add(*reinterpret_cast<const float4*>(shared + n * kWarpgroup), out, n);
        store(shared + n * kWarpgroup, out, n);
      }
    }
#pragma unroll
    for (int n = 0; n < kRegisters; ++n) registers_[n] += out(kGlobalEnd + n);
    return true;
  }
  // Adds the total to the sum, before the epilogue.
  HSTU_DEVICE void finish(Out& out) {
    const bool has_total = tiles_ >= kTiles;
    tiles_ = 0;
    if (!has_total) return;
    const int thread = reload_thread_idx() % kWarpgroup * 4;
    if constexpr (kGlobal > 0) {
#pragma unroll
      for (int first = kShared; first < kGlobalEnd; first += kAtOnce) {
        float4 loaded[kAtOnce / 4];
#pragma unroll
        for (int n = 0; n < kAtOnce; n += 4) {
          // NOTE: red_add_v4() has written to the L2 cache, so it must not come from the L1 cache.
          loaded[n / 4] = __ldcg(reinterpret_cast<const float4*>(
              global_ + thread + (first - kShared + n) * kWarpgroup));
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; n += 4) add(loaded[n / 4], out, first + n);
      }
    }
#pragma unroll
    for (int n = 0; n < kShared; n += 4) {
      add(*reinterpret_cast<const float4*>(shared_ + thread + n * kWarpgroup), out, n);
    }
#pragma unroll
    for (int n = 0; n < kRegisters; ++n) out(kGlobalEnd + n) += registers_[n];
    clear_registers();
  }

 private:
  float* const shared_;
  float* const global_;
  int tiles_ = 0;  // of the work tile
  float registers_[kRegisters];

  HSTU_DEVICE void clear_registers() {
#pragma unroll
    for (int n = 0; n < kRegisters; ++n) registers_[n] = 0;
  }
  // out[n, n + 4) += part
  static HSTU_DEVICE void add(const float4& part, Out& out, int n) {
    out(n) += part.x;
    out(n + 1) += part.y;
    out(n + 2) += part.z;
    out(n + 3) += part.w;
  }
  static HSTU_DEVICE void store(float* to, const Out& out, int n) {
    *reinterpret_cast<float4*>(to) = {out(n), out(n + 1), out(n + 2), out(n + 3)};
  }
};

}  // namespace hstu::sm90
