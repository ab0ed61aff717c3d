// The policy of ForwardTraits::Source for a paged cache in e4m3 and products in e4m3: the codes in
// pages are not converted. Q and the targets' K and V are quantized row by row before the call.
//
// For row i and key j, with descales q_i, k_j and v_j, and with k_max and v_max, the largest
// descales of the sequence:
//
//   s_ij   = k_j / k_max * (Q K^T)_ij           in fp16, like the accumulator of Q K^T
//   x / 2  = score_i * s_ij                     score_i = alpha / 2 * q_i * k_max
//   P_ij   = silu(x) / score_i * v_j / v_max * 2^-n = (v_j / v_max * 2^-n) * s * (1 + tanh(x / 2))
//   O_i    = score_i * v_max * 2^n * (P V)_i    P rounded to e4m3, V without its descale
//
// The codes of a row of Q have a norm of at most 1.08 (quantize/paged.h), the codes of a row of K a
// norm of at most 448 * sqrt(D). So P cannot overflow, whatever the scales of the rows are.
//
// The producer warps divide their work in another way: the K warp also copies the bytes of V, a
// part of a key tile at a time. The Q warp and the V warp transpose every second part, since wgmma
// reads 8-bit operands K-major only, and write the factors k_j / k_max and v_j / v_max * 2^-n.
#pragma once

#include "../common/opaque.h"
#include "../common/ptx.h"
#include "e4m3_keys.h"

namespace hstu::sm90 {

// The factors of the keys of a tile in fp16, for pairs of neighboring keys. A consumer thread reads
// the factors of its columns of S: word n % 4 of pairs[n / 4][thread % 4] is for columns
// 8 n + 2 (thread % 4) and the next one.
template <int kKeys>
struct KeyFactors {
  struct Words {
    alignas(16) uint32_t pairs[kKeys / 32][4][4];

    HSTU_DEVICE void set(int key, float factor) {
      const int n = key / 8, word = n / 4 * 16 + key % 8 / 2 * 4 + n % 4;
      reinterpret_cast<__half*>(pairs)[2 * word + key % 2] = __float2half_rn(factor);
    }
    HSTU_DEVICE uint4 of_thread(int n) const {
      return *reinterpret_cast<const uint4*>(pairs[n][threadIdx.x % 4]);
    }
  };

  Words score;   // k_j / k_max
  Words weight;  // v_j / v_max * 2^-n
};

// The lower limit of k_max and v_max, which keeps factors from over- and underflow.
constexpr float kLeastDescale = 0x1p-80f;

// 2^-n, with which |P| <= 448.
template <int kHeadDim>
constexpr float kPagedWeightScale = kHeadDim == 256 ? 0x1p-6f : 0x1p-5f;

// The offset in bytes of row `row` of a tile of panels of kPanelBytes, with the swizzle of TMA.
// Chunk n of 16 bytes of the row is at this offset ^ 16 * n.
template <int kPanelBytes>
HSTU_DEVICE constexpr uint32_t swizzled_row(int row) {
  const uint32_t at = row * kPanelBytes;
  return at | (at >> 3 & (kPanelBytes < 128 ? 0x30 : 0x70));
}

// Transposes the codes of part `part` of a tile of V, [kRows, kHeadDim], to columns of [kHeadDim,
// kKeys], where each 32 keys have the order of key_at() in quantize/quantize.h. Called by a warp.
template <int kRows, int kKeys, int kHeadDim>
HSTU_DEVICE void transpose_part(const uint8_t* rows, int part, void* columns) {
  static_assert(kKeys == 128, "a row of the result is a panel");
  static_assert(kRows % 32 == 0, "keys are in order by 32");
  constexpr int kPanelBytes = kPanel<kHeadDim, 1>;
  constexpr int kAtOnce = kHeadDim == 256 ? 8 : 4;  // groups of 32 keys and 16 columns
  // NOTE: the lane is read again, so that no register holds a value derived from it between calls.
  const int lane = static_cast<int>(reload_thread_idx()) % 32;
  // Lane n passes the address of row n % 8 of matrix m = n / 8. The rows of a loaded matrix are 8
  // keys. A stored matrix has the low (m even) or high 16 of 32 keys, and its rows are columns 0,
  // 2, 4, 6, 9, 11, 13, 15 (m < 2) or the other eight of 16 columns of V: 8 even columns would have
  // bank conflicts.
  const uint32_t from = ptx::shared_address(rows) + swizzled_row<kPanelBytes>(lane);
  const uint32_t to = (ptx::shared_address(columns) +
                       swizzled_row<kKeys>(2 * (lane % 8) + (lane / 16 ^ lane / 4 % 2))) ^
                      (part * kRows + lane / 8 % 2 * 16);
  const uint32_t even = lane < 16 ? 0x6420 : 0x7531, odd = even ^ (0x6420 ^ 0x7531);
  // NOTE: unrolled code would take longer to be fetched for the first time than to be executed.
#pragma unroll 1
  for (int first = 0; first < kRows * kHeadDim / 512; first += kAtOnce) {
    const int key = first / (kHeadDim / 16) * 32, column = first % (kHeadDim / 16) * 16;
    const int panel = column / kPanelBytes;
    const uint32_t load_from = (from ^ column % kPanelBytes) + (panel * kRows + key) * kPanelBytes;
    const uint32_t store_to = (to ^ key) + column * kKeys;
    uint32_t pairs[kAtOnce][4];  // for each 8 keys, two columns of two neighboring keys
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) ptx::ldmatrix_x4_transposed(load_from ^ 16 * n, pairs[n]);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const uint32_t words[] = {
          __byte_perm(pairs[n][0], pairs[n][1], even), __byte_perm(pairs[n][2], pairs[n][3], even),
          __byte_perm(pairs[n][0], pairs[n][1], odd), __byte_perm(pairs[n][2], pairs[n][3], odd)};
      ptx::stmatrix_x4(store_to + 16 * n * kKeys, words);
    }
  }
}

struct E4m3PagedKeys : PagedKeys {
  static constexpr bool kIsFp8 = true;
  static constexpr bool kTransposesValues = true;
  using ScoreSum = cutlass::half_t;
  static constexpr int kQueryCopyLanes = 32;

  // Copies K and the descales of K and V to the stage of K, and V to stages of bytes. Consumers
  // wait for the factors of keys long before they wait for V.
  template <typename Traits, PagePart kPart>
  struct Loader {
    static constexpr int kKeys = Traits::kKeys;
    static constexpr int kRows = Traits::kByteRows;  // of V in a part
    static constexpr int kHeadDim = Traits::kHeadDim;
    static constexpr int kColumns = kPanel<kHeadDim, 1>;
    using Barrier = cutlass::arch::ClusterTransactionBarrier;

    PageWindow window;
    typename Traits::ByteState byte_state;

    // Called by a warp.
    HSTU_DEVICE void load(const ForwardParams& params, const typename Traits::Maps& maps,
                          typename Traits::SharedMemory& smem,
                          const typename Traits::WorkTile& work_tile, int first, int stage) {
      const PaddedKeys<kKeys> padded(work_tile.tile.sequence);
      Barrier& full = smem.pipeline_k.full[stage];
      if (is_leader()) full.arrive_and_expect_tx(kKeys * kHeadDim);
      if (!padded.is_target(first)) {
        window.set_sequence(work_tile.pages);
        load_history(params, maps, smem, work_tile, first, stage);
      } else {
        load_targets(params, maps, smem, work_tile, first - padded.first_target(), stage);
      }
    }

   private:
    // Acquires a stage of bytes for each part of the tile, and calls visit(part, rows, barrier) to
    // fill it.
    template <typename Visit>
    HSTU_DEVICE void for_each_part(typename Traits::SharedMemory& smem, Visit visit) {
#pragma unroll 1
      for (int part = 0; part < kKeys / kRows; ++part) {
        const int stage = byte_state.index();
        Barrier& full = smem.pipeline_bytes.full[stage];
        smem.pipeline_bytes.producer_acquire(byte_state);
        if (is_leader()) full.arrive_and_expect_tx(kRows * kHeadDim);
        visit(part, smem.bytes[stage], full);
        byte_state.advance();
      }
    }

    // Each lane copies at most one box of K, and the same rows of V. NOTE: this copies as
    // start_copy_pages() does, but computes once what K and V have in common, since the time of a
    // tile may be that of this warp's instructions.
    HSTU_DEVICE void load_history(const ForwardParams& params, const typename Traits::Maps& maps,
                                  typename Traits::SharedMemory& smem,
                                  const typename Traits::WorkTile& work_tile, int first,
                                  int stage) {
      constexpr int kPanels = kHeadDim / kColumns;
      constexpr int kFar = kRaggedRows;
      static_assert(kKeys / kSmallestPage * kPanels <= 32, "a lane has at most one box");
      const PagedParams& paged = params.paged;
      const int lane = static_cast<int>(reload_thread_idx()) % 32;
      window.load_ids(paged, paged.page_of(first), paged.page_of(first + kKeys - 1) + 1);
      const int row = lane / kPanels * min(paged.page_size, kRows);  // in the tile
      const int panel = lane % kPanels;
      const int page = paged.page_of(first + row);
      const int id = window.page(page);
      // NOTE: with a count of 0, all rows of the box are past the end.
      const int history = work_tile.tile.sequence.history_end - (page << paged.page_size_log2);
      const int count = id < 0 ? 0 : clamp(history, 0, paged.page_size);
      const int begin = max(id, 0) * maps.pages.page_rows + count;
      const auto copy = [&](int begin, void* to, Barrier& full) {
        cute::SM90_TMA_LOAD_5D::copy(
            &maps.pages.map, reinterpret_cast<uint64_t*>(&full),
            static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL), to, panel * kColumns,
            kFar - count + paged.slot_of(first + row), work_tile.head, begin, kFar);
      };
      Barrier& keys_full = smem.pipeline_k.full[stage];
      if (row < kKeys) copy(begin, smem.k[stage] + (panel * kKeys + row) * kColumns, keys_full);
      copy_descales(params, work_tile, first, smem.scales[stage]);
      cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<uint64_t*>(&keys_full));
      // If the stages of bytes hold no more than a tile, V waits for one, and is brought to the L2
      // cache meanwhile. With small boxes, this would take longer than it gains.
      constexpr bool kWaits = Traits::kTiles.byte_stages * kRows <= kKeys;
      if (kWaits && paged.page_size >= kRows && row < kKeys) {
        cute::SM90_TMA_LOAD_5D::PREFETCH::copy(&maps.pages.map, panel * kColumns,
                                               kFar - count + paged.slot_of(first + row),
                                               work_tile.head, begin + maps.pages.value_rows, kFar);
      }
      for_each_part(smem, [&](int part, uint8_t* values, Barrier& full) {
        if (row / kRows == part) {
          copy(begin + maps.pages.value_rows, values + (panel * kRows + row % kRows) * kColumns,
               full);
        }
      });
    }

    // Starts copying the descales of a tile of history: each lane copies four of K and four of V.
    static HSTU_DEVICE void copy_descales(const ForwardParams& params,
                                          const typename Traits::WorkTile& work_tile, int first,
                                          typename Traits::Scales& to) {
      static_assert(kKeys == 4 * 32);
      const PagedParams& paged = params.paged;
      const int n = static_cast<int>(reload_thread_idx()) % 32 * 4;
      const int page = paged.page_of(first + n);
      const bool exists = page < work_tile.pages.count;
      const int64_t entry = work_tile.pages.first + (exists ? page : 0);
      const float* const keys = params.fp8.page_scales +
                                (2 * entry * params.heads + work_tile.head) * paged.page_size +
                                paged.slot_of(first + n);
      ptx::cp_async_16_or_zeros(keys, &to[0][n], exists);
      ptx::cp_async_16_or_zeros(keys + int64_t{params.heads} * paged.page_size, &to[1][n], exists);
    }

    HSTU_DEVICE void load_targets(const ForwardParams& params, const typename Traits::Maps& maps,
                                  typename Traits::SharedMemory& smem,
                                  const typename Traits::WorkTile& work_tile, int first,
                                  int stage) {
      const TargetRows targets(work_tile.tile.sequence);
      const RaggedRows rows = {targets.begin, targets.count, work_tile.head};
      Barrier& keys_full = smem.pipeline_k.full[stage];
      if (is_leader())
        start_copy_rows<kKeys, kHeadDim>(maps.k, rows, first, smem.k[stage], keys_full);
      const int64_t begin = work_tile.head * params.batch.total_q + targets.begin;
#pragma unroll 1
      for (int n = static_cast<int>(threadIdx.x) % 32; n < kKeys; n += 32) {
        const bool exists = first + n < targets.count;
        const int64_t at = begin + (exists ? first + n : 0);
        ptx::cp_async_4_or_zeros(params.fp8.k_descale + at, &smem.scales[stage][0][n], exists);
        ptx::cp_async_4_or_zeros(params.fp8.v_descale + at, &smem.scales[stage][1][n], exists);
      }
      cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<uint64_t*>(&keys_full));
      for_each_part(smem, [&](int part, uint8_t* values, Barrier& full) {
        if (is_leader())
          start_copy_rows<kRows, kHeadDim>(maps.v, rows, first + part * kRows, values, full);
      });
    }
  };

  // Finds the largest descales of K and V over all keys of the sequence, whether or not the work
  // tile sees them, so that all splits of a row tile have the same factors. NOTE: in most calls,
  // each loop has one round, whose loads do not wait for each other.
  template <typename WorkTile>
  static HSTU_DEVICE BlockDescales find_largest(const ForwardParams& params,
                                                const WorkTile& work_tile) {
    const Fp8Params& fp8 = params.fp8;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    BlockDescales largest = {kLeastDescale, kLeastDescale};
    const auto add = [&largest](const float* k, const float* v, bool exists) {
      largest.k = fmaxf(largest.k, exists ? *k : 0);
      largest.v = fmaxf(largest.v, exists ? *v : 0);
    };
    const PageList& pages = work_tile.pages;
    const int heads = params.heads;
    const float* const page = fp8.page_descales + pages.first * 2 * heads + work_tile.head;
#pragma unroll 1
    for (int first = lane; first < pages.count; first += 64) {
#pragma unroll
      for (int n = first; n < first + 64; n += 32) {
        add(page + 2 * n * heads, page + (2 * n + 1) * heads, n < pages.count);
      }
    }
    const TargetRows targets(work_tile.tile.sequence);
    const int64_t begin = work_tile.head * params.batch.total_q + targets.begin;
#pragma unroll 1
    for (int first = lane; first < targets.count; first += 256) {
#pragma unroll
      for (int n = first; n < first + 256; n += 32) {
        add(fp8.k_descale + begin + n, fp8.v_descale + begin + n, n < targets.count);
      }
    }
    return {largest_of_warp(largest.k), largest_of_warp(largest.v)};
  }

  // Runs in the Q warp and the V warp for each work tile. The Q warp finds the factors of the rows;
  // each warp transposes every second part of each tile of V and writes the factors of its keys.
  // NOTE: the two warps share this code, because fetching it for the first time takes long.
  template <typename Traits>
  struct QueryWarpLoader {
    const int rank = static_cast<int>(threadIdx.x) / 64;  // 0 in warp 1, and 1 in warp 3
    typename Traits::ByteState byte_state = {static_cast<uint32_t>(rank)};
    typename Traits::QState q_state;
    typename Traits::KVState state;

    HSTU_DEVICE void load(const ForwardParams& params, const typename Traits::Maps&,
                          typename Traits::SharedMemory& smem,
                          const typename Traits::WorkTile& work_tile) {
      __syncwarp();
      if (rank == 0) {
        auto& to = smem.work_tiles[&work_tile - smem.work_tiles];
        find_factors(params, work_tile, to.largest_descales, to.row_factors);
        smem.pipeline_q[0].producer_commit_by_warp(q_state);
      }
      smem.pipeline_q[0].consumer_wait(q_state);  // for largest_descales; consumers release Q
      compiler_barrier();                         // keeps the plain loads behind the wait
      q_state.advance();
      const float score = __fdividef(1, work_tile.largest_descales.k);
      const float weight =
          __fdividef(kPagedWeightScale<Traits::kHeadDim>, work_tile.largest_descales.v);
      // NOTE: the factors of a tile are needed before its V, while consumers read V before it.
      for (int first = work_tile.tile_from(0); first != Traits::kNoKey;
           first = work_tile.tile_from(first + Traits::kKeys)) {
        write_factors(smem, score, weight);
        smem.pipeline_v.producer_acquire(state);
        transpose(smem);
        state.advance();
      }
    }

   private:
    static constexpr int kRows = Traits::kByteRows;
    static constexpr int kParts = Traits::kKeys / kRows;

    // Writes the factors of the keys of this warp's parts of the next tile. NOTE: consumers release
    // K, and with it the descales, after they have waited for the factors, or in drain_tiles() for
    // V, which this warp commits later.
    HSTU_DEVICE void write_factors(typename Traits::SharedMemory& smem, float score, float weight) {
      const typename Traits::FactorState to = {state.count};
      KeyFactors<Traits::kKeys>& factors = smem.key_factors[to.index()];
      smem.pipeline_k.consumer_wait(state);
      compiler_barrier();
      const auto& scales = smem.scales[state.index()];
#pragma unroll 1
      for (int part = rank; part < kParts; part += 2) {
#pragma unroll
        for (int n = 0; n < kRows; n += 32) {
          const int key = part * kRows + n + static_cast<int>(reload_thread_idx()) % 32;
          factors.score.set(key, scales[0][key] * score);
          factors.weight.set(key, scales[1][key] * weight);
        }
      }
      smem.pipeline_factors.producer_commit_by_warp(to);
    }

    // Transposes this warp's parts of a tile of V.
    HSTU_DEVICE void transpose(typename Traits::SharedMemory& smem) {
#pragma unroll 1
      for (int part = rank; part < kParts; part += 2) {
        smem.pipeline_bytes.consumer_wait(byte_state);
        transpose_part<kRows, Traits::kKeys, Traits::kHeadDim>(smem.bytes[byte_state.index()], part,
                                                               smem.v[state.index()]);
        cutlass::arch::fence_view_async_shared();  // before wgmma reads V
        smem.pipeline_bytes.consumer_release_by_warp(byte_state);
        byte_state.count += 2;
      }
      smem.pipeline_v.producer_commit_by_warp(state);
    }

    static HSTU_DEVICE void find_factors(const ForwardParams& params,
                                         const typename Traits::WorkTile& work_tile,
                                         BlockDescales& largest_descales,
                                         RowFactors (&factors)[Traits::kRows]) {
      const Sequence& sequence = work_tile.tile.sequence;
      const int64_t begin = work_tile.head * params.batch.total_q + sequence.q_begin;
      const int first = work_tile.tile.index * Traits::kRows + static_cast<int>(threadIdx.x) % 32;
      float descales[Traits::kRows / 32];  // NOTE: these loads do not wait for find_largest()
#pragma unroll
      for (int n = 0; n < Traits::kRows / 32; ++n) {
        const int row = first + 32 * n;
        descales[n] = row < sequence.q_len ? params.fp8.q_descale[begin + row] : 0;
      }
      const BlockDescales largest = find_largest(params, work_tile);
      if (is_leader()) largest_descales = largest;
      const float alpha = 0.5f * static_cast<float>(params.alpha) * largest.k;
#pragma unroll
      for (int n = 0; n < Traits::kRows / 32; ++n) {
        RowFactors& to = factors[32 * n + static_cast<int>(threadIdx.x) % 32];
        to.score = alpha * descales[n];
        to.out = to.score * largest.v / kPagedWeightScale<Traits::kHeadDim>;
      }
    }
  };
};

}  // namespace hstu::sm90
