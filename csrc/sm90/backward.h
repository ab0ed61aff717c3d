// The fused backward: scores recomputed, dQ, dK and dV in one pass.
//
// A work item is a tile of keys of one head, 64 keys for each of two consumer warpgroups, whose dK
// and dV stay in registers. S and dP are found transposed, keys by rows, so that P^T and dS^T are
// where the products for dV and dK need them; dS goes through shared memory for dQ = dS K, whose
// fp32 sums a TMA reduction adds up in device memory. A second kernel scales and rounds them.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/copy_sm90.hpp>

#include "../common/activation.h"
#include "../common/launch.h"
#include "../common/work_list.h"
#include "pipeline.h"
#include "stores.h"
#include "tensors.h"

namespace hstu::sm90 {

struct BackwardMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap dout;
};

// What a backward call keeps in its workspace.
struct BackwardBuffers {
  WorkList list;
  float* dq;         // [row tiles, H, rows x head dim], in the order of DqTile; zeroed
  TileSpans* turns;  // [row tiles]: the key tiles that take turns to add; null: in any order
  int* turn;         // [row tiles, H]: those that have added; zeroed; null: in any order
};

// A tile of dQ: each of two warpgroups has 64 rows of it, or 64 rows and half of the columns.
template <int kRows, int kHeadDim>
struct DqTile {
  static constexpr bool kSplitsRows = kRows == 2 * kWarpgroupRows;
  static_assert(kSplitsRows || kRows == kWarpgroupRows);
  static constexpr int kColumns = kSplitsRows ? kHeadDim : kHeadDim / 2;  // of a warpgroup
  static constexpr int kValues = kWarpgroupRows * kColumns / kWarpgroup;  // of a thread
  static constexpr int kSize = kRows * kHeadDim;

  // In memory: four values of each thread of a warpgroup, then the next four.
  static HSTU_DEVICE int first(int warpgroup) {
    return warpgroup * (kValues * kWarpgroup) + thread_anew() % kWarpgroup * 4;
  }
  static constexpr HSTU_DEVICE int offset(int n) { return n * kWarpgroup; }
  static HSTU_DEVICE int first_row(int warpgroup) { return kSplitsRows ? warpgroup * 64 : 0; }
  static HSTU_DEVICE int first_column(int warpgroup) {
    return kSplitsRows ? 0 : warpgroup * kColumns;
  }
};

template <int kHeadDim_, typename Element_, bool kIsDeterministic>
struct Backward {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr BackwardTiles kTiles = backward_tiles<kHeadDim>();
  static constexpr int kConsumers = 2;
  static constexpr int kRows = kTiles.rows;
  static constexpr int kKeys = kConsumers * kWarpgroupRows;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr int kBlocksPerSm = 1;
  static constexpr Registers kRegisters = backward_registers();

  using Dq = DqTile<kRows, kHeadDim>;
  using ScoreMma = SharedMma<Element, kRows, kHeadDim>;          // keys by rows
  using KeyMma = RegisterMma<Element, kHeadDim, kRows>;          // keys by columns
  using DqMma = RowsByColumnsMma<Element, Dq::kColumns, kKeys>;  // rows by columns

  struct Item {
    WorkTile work;
    int64_t first_row_tile;  // of the sequence
    int head;                // -1: there are no more
    TileMap map;             // of tiles of rows
  };
  // A tile of rows of an item; in one register.
  struct RowTile {
    static constexpr int kPartial = 1;
    static constexpr int kLast = 2;
    static constexpr int kFlags = 3;

    int bits;

    HSTU_DEVICE int first_row() const { return bits & ~kFlags; }
    HSTU_DEVICE bool is_partial() const { return bits & kPartial; }
    HSTU_DEVICE bool is_last() const { return bits & kLast; }
  };
  using ItemPlace = RingPlace<2>;
  using KeyPlace = RingPlace<1>;
  using RowPlace = RingPlace<2>;
  using DsPlace = RingPlace<2>;
  using DqPlace = RingPlace<1>;

  struct SharedMemory {
    alignas(1024) Element k[kKeys * kHeadDim];
    alignas(1024) Element v[kKeys * kHeadDim];
    alignas(1024) Element q[RowPlace::kStages][kRows * kHeadDim];
    alignas(1024) Element dout[RowPlace::kStages][kRows * kHeadDim];
    alignas(1024) Element ds[DsPlace::kStages][kRows * kKeys];
    alignas(1024) float dq[Dq::kSize];
    alignas(16) uint64_t visible[kConsumers][kRows];  // of a warpgroup's keys, to each row
    alignas(16) float row_scales[kConsumers][kRows];  // where each row has its own
    Item items[ItemPlace::kStages];
    RowTile row_tiles[RowPlace::kStages];
    int number;  // of the item to be found
    Handover<ItemPlace::kStages> item_handover;
    Handover<KeyPlace::kStages> key_handover;  // of K and V
    Handover<RowPlace::kStages> q_handover;
    Handover<RowPlace::kStages> dout_handover;
    Handover<DqPlace::kStages> dq_handover;  // from the consumers
  };
  static_assert(sizeof(SharedMemory) <= kSharedMemory, "a block has 227 KB of shared memory");

  static HSTU_DEVICE void run(const BackwardParams& params, const BackwardMaps& maps,
                              const BackwardBuffers& buffers, SharedMemory& shared) {
    constexpr int kConsumerWarps = kConsumers * 4;
    if (threadIdx.x == 0) {
      shared.item_handover.init(kConsumers * kWarpgroup + 3);  // and the threads that copy
      shared.key_handover.init(kConsumerWarps);
      shared.q_handover.init(kConsumerWarps);
      shared.dout_handover.init(kConsumerWarps);
      shared.dq_handover.init(1, kConsumers * kWarpgroup);
      cutlass::arch::fence_barrier_init();
      prefetch_map(maps.q);
      prefetch_map(maps.k);
      prefetch_map(maps.v);
      prefetch_map(maps.dout);
    }
    __syncthreads();
    wait_for_previous_kernel();

    // NOTE: by a shuffle, so that the compiler knows it to be the same in all lanes.
    const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<kRegisters.producer>();
      if (threadIdx.x < 32) find_items(params, buffers, shared);
      if (threadIdx.x == 32) copy_rows_of_items(maps, shared);
      if (threadIdx.x == 64) copy_keys_of_items(maps, shared);
      if (threadIdx.x == 96) add_dq(params, buffers, shared);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kRegisters.consumer>();
      consume(params, shared, warpgroup - 1);
    }
  }

 private:
  // --------------------------------------------------------------------------------- producers

  // By one warp, which zeroes dK and dV of items that no row sees; consumers do not get them.
  static HSTU_DEVICE void find_items(const BackwardParams& params, const BackwardBuffers& buffers,
                                     SharedMemory& shared) {
    const WorkList& list = buffers.list;
    const int lane = static_cast<int>(threadIdx.x);
    ItemPlace place;
    if (lane == 0) shared.number = static_cast<int>(blockIdx.x);
    for (;;) {
      Item& item = shared.items[place.stage()];
      shared.item_handover.wait_empty(place);
      __syncwarp();
      if (lane == 0) {
        const int tile = shared.number / list.parts;
        const bool exists = tile < *list.count;
        item.head = exists ? shared.number - tile * list.parts : -1;
        if (exists) {
          item.work = list.tiles[tile];
          const Sequence& sequence = item.work.sequence;
          item.first_row_tile = first_tile(sequence.q_begin, item.work.sequence_number, kRows);
        }
      }
      __syncwarp();
      if (item.head >= 0) {
        const int tiles = (item.work.sequence.q_len + kRows - 1) / kRows;
        item.map.fill(tiles, lane, 32, [&](int m) { return classify(buffers, item, m); });
        __syncwarp();
      }
      if (item.head >= 0 && item.map.last() < 0) {
        const Sequence& sequence = item.work.sequence;
        const int first = item.work.tile * kKeys;
        const int count = min(kKeys, sequence.k_len - first);
        zero_rows_of_head<Element>(params.dk, sequence.k_begin + first, count, item.head);
        zero_rows_of_head<Element>(params.dv, sequence.k_begin + first, count, item.head);
        __syncwarp();
      } else {
        if (lane == 0) shared.item_handover.full[place.stage()].arrive();
        if (item.head < 0) return;
        place.advance();
      }
      if (lane == 0) shared.number = static_cast<int>(gridDim.x) + atomicAdd(list.next, 1);
    }
  }

  // What the item's keys are to tile m of rows.
  static HSTU_DEVICE TileKind classify(const BackwardBuffers& buffers, const Item& item, int m) {
    const int tile = item.work.tile;
    const int64_t row_tile = item.first_row_tile + m;
    if constexpr (kIsDeterministic) {
      // NOTE: by the same spans that others count turns by, so that none waits for a turn that is
      // not taken.
      const TileSpans& spans = buffers.turns[row_tile];
      bool takes_turn = false;
      for (int n = 0; n < 2; ++n) takes_turn |= spans.begin[n] <= tile && tile < spans.end[n];
      if (!takes_turn) return TileKind::kEmpty;
    }
    const SpanSummary summary = buffers.list.summaries.at(row_tile, item.head);
    const int k0 = tile * kKeys;
    const TileKind kind = summary.classify(k0, min(k0 + kKeys, item.work.sequence.k_len));
    return kIsDeterministic && kind == TileKind::kEmpty ? TileKind::kPartial : kind;
  }

  // The others are a thread each.

  static HSTU_DEVICE void copy_rows_of_items(const BackwardMaps& maps, SharedMemory& shared) {
    RowPlace place;
    for_each_row_tile(shared, [&](const Item& item, int m, int next) {
      const Sequence& sequence = item.work.sequence;
      const RaggedRows rows{sequence.q_begin, sequence.q_len, item.head};
      const int first = m * kRows;
      shared.q_handover.wait_empty(place);
      shared.row_tiles[place.stage()] = {first | (item.map.has_partial(m) ? RowTile::kPartial : 0) |
                                         (next < 0 ? RowTile::kLast : 0)};
      copy_rows<kRows, kHeadDim>(maps.q, rows, first, shared.q[place.stage()],
                                 shared.q_handover.full[place.stage()]);
      shared.dout_handover.wait_empty(place);
      copy_rows<kRows, kHeadDim>(maps.dout, rows, first, shared.dout[place.stage()],
                                 shared.dout_handover.full[place.stage()]);
      place.advance();
    });
  }

  static HSTU_DEVICE void copy_keys_of_items(const BackwardMaps& maps, SharedMemory& shared) {
    KeyPlace place;
    for_each_item(shared.items, shared.item_handover, [&](const Item& item) {
      const Sequence& sequence = item.work.sequence;
      const RaggedRows rows{sequence.k_begin, sequence.k_len, item.head};
      const int first = item.work.tile * kKeys;
      shared.key_handover.wait_empty(place);
      auto& barrier = shared.key_handover.full[place.stage()];
      barrier.arrive_and_expect_tx(2 * kKeys * kHeadDim * sizeof(Element));
      start_copy_rows<kKeys, kHeadDim>(maps.k, rows, first, shared.k, barrier);
      start_copy_rows<kKeys, kHeadDim>(maps.v, rows, first, shared.v, barrier);
      place.advance();
    });
  }

  // Adds each part of dQ to its sum.
  static HSTU_DEVICE void add_dq(const BackwardParams& params, const BackwardBuffers& buffers,
                                 SharedMemory& shared) {
    DqPlace place;
    for_each_row_tile(shared, [&](const Item& item, int m, int) {
      const int64_t row_tile = item.first_row_tile + m;
      const int64_t number = row_tile * params.heads + item.head;
      shared.dq_handover.wait_full(place);
      if constexpr (kIsDeterministic) {
        wait_for_turn(buffers.turns[row_tile], item.work.tile, buffers.turn + number);
      }
      asm volatile(
          "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
              buffers.dq + number * Dq::kSize),
          "r"(cute::cast_smem_ptr_to_uint(shared.dq)),
          "n"(static_cast<int>(Dq::kSize * sizeof(float)))
          : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      if constexpr (kIsDeterministic) {
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        pass_turn(buffers.turn + number);
      } else {
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      }
      shared.dq_handover.release(place);
      place.advance();
    });
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }

  // Deterministic: key tiles add to a dQ in ascending order, each in its turn.

  // NOTE: less, not unequal: offsets that overlap let sequences share a tile.
  static HSTU_DEVICE void wait_for_turn(const TileSpans& spans, int key_tile, const int* turn) {
    int before = 0;
    for (int n = 0; n < 2; ++n) before += max(0, min(spans.end[n], key_tile) - spans.begin[n]);
    int seen;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(turn) : "memory");
    } while (seen < before);
    asm volatile("fence.proxy.async;" ::: "memory");
  }

  static HSTU_DEVICE void pass_turn(int* turn) {
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turn) : "memory");
  }

  // Calls visit(item, tile, next tile) for each tile of rows, from the last to the first.
  template <typename Visit>
  static HSTU_DEVICE void for_each_row_tile(SharedMemory& shared, Visit visit) {
    for_each_item(shared.items, shared.item_handover, [&](const Item& item) {
      for (int m = item.map.last(); m >= 0;) {
        const int next = item.map.before(m);
        visit(item, m, next);
        m = next;
      }
    });
  }

  // --------------------------------------------------------------------------------- consumers

  using Scores =
      decltype(partition_fragment_C(ScoreMma{}, Shape<Int<kWarpgroupRows>, Int<kRows>>{}));
  using KeySum =
      decltype(partition_fragment_C(KeyMma{}, Shape<Int<kWarpgroupRows>, Int<kHeadDim>>{}));
  using DqPart =
      decltype(partition_fragment_C(DqMma{}, Shape<Int<kWarpgroupRows>, Int<Dq::kColumns>>{}));
  using Weights = decltype(make_tensor_like<Element>(Scores{}));

  static HSTU_DEVICE void consume(const BackwardParams& params, SharedMemory& shared,
                                  int warpgroup) {
    RowPlace row_place;
    for (ItemPlace item_place;; item_place.advance()) {
      shared.item_handover.wait_full(item_place);
      const Item& item = shared.items[item_place.stage()];
      if (item.head < 0) return;
      const KeyPlace key_place{item_place.count};
      shared.key_handover.wait_full(key_place);
      KeySum dk, dv;
      GMMA::ScaleOut scale = GMMA::ScaleOut::Zero;
      RowTile tile;
      do {
        Scores scores, gradients;
        Weights weights, dscores;
        Element* const q = shared.q[row_place.stage()];
        Element* const dout = shared.dout[row_place.stage()];
        shared.q_handover.wait_full(row_place);
        tile = read_by_warp(shared.row_tiles[row_place.stage()]);
        if (tile.is_partial() || params.attn_scale_per_row) {
          look_at_rows(params, item, warpgroup, tile, shared);
        }
        // S^T = K Q^T and dP^T = V dO^T
        start_gemm(ScoreMma{}, warpgroup_keys(shared.k, warpgroup), rows_tensor<kRows, kHeadDim>(q),
                   scores, GMMA::ScaleOut::Zero);
        shared.dout_handover.wait_full(row_place);
        start_gemm(ScoreMma{}, warpgroup_keys(shared.v, warpgroup),
                   rows_tensor<kRows, kHeadDim>(dout), gradients, GMMA::ScaleOut::Zero);

        // P = M * silu(alpha * S); what is left in S is its derivative
        wait_for_products<1>(scores);
        activate(params, scores, weights);
        if (params.attn_scale_per_row) {
          scale_rows(shared.row_scales[warpgroup], scores, weights);
        }
        if (tile.is_partial()) hide(shared.visible[warpgroup], weights);
        // dV += P^T dO
        start_gemm_registers(KeyMma{}, weights, transposed_tensor<kRows, kHeadDim>(dout), dv,
                             scale);
        // dS = M * dP * silu'(alpha * S)
        wait_for_products<1>(gradients);
        multiply(scores, gradients, dscores);
        if (tile.is_partial()) hide(shared.visible[warpgroup], dscores);
        Element* const ds = shared.ds[DsPlace{row_place.count}.stage()];
        store_transposed(dscores, ds + warpgroup * (kRows * kWarpgroupRows));
        cutlass::arch::fence_view_async_shared();
        sync_consumers();
        // dK += dS^T Q and dQ = dS K
        start_gemm_registers(KeyMma{}, dscores, transposed_tensor<kRows, kHeadDim>(q), dk, scale);
        DqPart dq;
        start_dq(ds, shared.k, warpgroup, dq);
        scale = GMMA::ScaleOut::One;
        wait_for_products<1>(dv);
        warpgroup_fence_operand(dk);
        shared.q_handover.release_by_warp(row_place);
        shared.dout_handover.release_by_warp(row_place);
        wait_for_products<0>(dq);
        const DqPlace dq_place{row_place.count};
        shared.dq_handover.wait_empty(dq_place);
        float* const own_dq = shared.dq + Dq::first(warpgroup);
#pragma unroll
        for (int n = 0; n < Dq::kValues; n += 4) {
          *reinterpret_cast<float4*>(own_dq + Dq::offset(n)) = {dq(n), dq(n + 1), dq(n + 2),
                                                                dq(n + 3)};
        }
        cutlass::arch::fence_view_async_shared();
        shared.dq_handover.full[dq_place.stage()].arrive();
        row_place.advance();
      } while (!tile.is_last());

      shared.key_handover.release_by_warp(key_place);
      const float uniform = uniform_scale(params);
      store_keys(params.dk, item, warpgroup, dk, static_cast<float>(params.alpha) * uniform);
      store_keys(params.dv, item, warpgroup, dv, uniform);
      shared.item_handover.release(item_place);
    }
  }

  static HSTU_DEVICE auto warpgroup_keys(Element* keys, int warpgroup) {
    return local_tile(rows_tensor<kKeys, kHeadDim>(keys),
                      Shape<Int<kWarpgroupRows>, Int<kHeadDim>>{}, make_coord(warpgroup, _0{}));
  }

  // This warpgroup's part of dQ = dS K, started
  static HSTU_DEVICE void start_dq(Element* ds, Element* k, int warpgroup, DqPart& dq) {
    const auto rows =
        local_tile(rows_tensor<kRows, kKeys>(ds), Shape<Int<kWarpgroupRows>, Int<kKeys>>{},
                   make_coord(Dq::kSplitsRows ? warpgroup : 0, _0{}));
    const auto columns =
        local_tile(transposed_tensor<kKeys, kHeadDim>(k), Shape<Int<Dq::kColumns>, Int<kKeys>>{},
                   make_coord(Dq::kSplitsRows ? 0 : warpgroup, _0{}));
    start_gemm(DqMma{}, rows, columns, dq, GMMA::ScaleOut::Zero);
  }

  static HSTU_DEVICE void sync_consumers() {
    asm volatile("bar.sync %0, %1;" ::"n"(static_cast<int>(NamedBarrier::kConsumers)),
                 "n"(kConsumers * kWarpgroup)
                 : "memory");
  }

  // Which of the warpgroup's keys each row sees, and what scales it, into shared memory: a thread
  // takes a row.
  static HSTU_DEVICE void look_at_rows(const BackwardParams& params, const Item& item,
                                       int warpgroup, RowTile tile, SharedMemory& shared) {
    const Sequence& sequence = item.work.sequence;
    const int thread = thread_anew() % kWarpgroup;
    const int row = tile.first_row() + thread;
    if (thread < kRows && row < sequence.q_len) {
      if (params.attn_scale_per_row) {
        shared.row_scales[warpgroup][thread] = params.attn_scale[sequence.q_begin + row];
      }
      if (tile.is_partial()) {
        const int first_key = item.work.tile * kKeys + warpgroup * kWarpgroupRows;
        const Mask mask(params.mask, sequence, item.head);
        shared.visible[warpgroup][thread] = mask.row_bits(row, first_key);
      }
    } else if (thread < kRows) {
      shared.row_scales[warpgroup][thread] = 0.0f;
      shared.visible[warpgroup][thread] = 0;
    }
    asm volatile(
        "bar.sync %0, %1;" ::"r"(static_cast<int>(NamedBarrier::kFirstOfWarpgroup) + warpgroup),
        "n"(kWarpgroup)
        : "memory");
  }

  // Zeroes what the mask hides.
  static HSTU_DEVICE void hide(const uint64_t (&visible)[kRows], Weights& weights) {
    const int thread = thread_anew() % kWarpgroup;
    const int lane = thread % 32;
    const int key = thread / 32 * 16 + lane / 4;
    Tensor words = recast<uint32_t>(weights);  // for each 8 rows one of keys m = 0, one of m = 1
#pragma unroll
    for (int row = 0; row < kRows; row += 8) {
      const auto bits = *reinterpret_cast<const ulonglong2*>(visible + row + lane % 4 * 2);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint32_t low = bits.x >> (key + 8 * m) & 1 ? 0x0000ffff : 0;
        const uint32_t high = bits.y >> (key + 8 * m) & 1 ? 0xffff0000 : 0;
        words(row / 4 + m) &= low | high;
      }
    }
  }

  // P = silu(alpha * S), rounded, and S = silu'(alpha * S)
  static HSTU_DEVICE void activate(const BackwardParams& params, Scores& scores, Weights& weights) {
    const float half_alpha = 0.5f * static_cast<float>(params.alpha);
    const cutlass::NumericArrayConverter<Element, float, 2> convert;
    Tensor pairs = recast<cutlass::Array<Element, 2>>(weights);
#pragma unroll
    for (int n = 0; n < size(scores); n += 2) {
      cutlass::Array<float, 2> p;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float x = half_alpha * scores(n + i);
        const float t = tanh_approx(x);
        p[i] = silu_of_half(x, t);
        scores(n + i) = silu_derivative_of_half(x, t);
      }
      pairs(n / 2) = convert(p);
    }
  }

  // Both times what scales each row by itself.
  // NOTE: P is rounded twice then: to scale it before it is rounded takes registers that are not
  // there.
  static HSTU_DEVICE void scale_rows(const float (&row_scales)[kRows], Scores& scores,
                                     Weights& weights) {
    const float* own = row_scales + thread_anew() % 4 * 2;
    const cutlass::NumericArrayConverter<Element, float, 2> convert;
    Tensor words = recast<uint32_t>(weights);
    Tensor pairs = recast<cutlass::Array<Element, 2>>(weights);
#pragma unroll
    for (int row = 0; row < kRows; row += 8) {
      __syncwarp();  // NOTE: else the compiler would load all factors at once, and spill.
      const float2 factors = *reinterpret_cast<const float2*>(own + row);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int n = row / 4 + m;
        pairs(n) = convert(
            {low_half<Element>(words(n)) * factors.x, high_half<Element>(words(n)) * factors.y});
        scores(2 * n) *= factors.x;
        scores(2 * n + 1) *= factors.y;
      }
    }
  }

  // result = x * y, rounded
  static HSTU_DEVICE void multiply(const Scores& x, const Scores& y, Weights& result) {
    const cutlass::NumericArrayConverter<Element, float, 2> convert;
    Tensor pairs = recast<cutlass::Array<Element, 2>>(result);
#pragma unroll
    for (int n = 0; n < size(x); n += 2) {
      pairs(n / 2) = convert(cutlass::Array<float, 2>{x(n) * y(n), x(n + 1) * y(n + 1)});
    }
  }

  // dS^T of a warpgroup as rows by keys, in the order of rows_tensor().
  static HSTU_DEVICE void store_transposed(const Weights& dscores, Element* to) {
    const int thread = thread_anew() % kWarpgroup;
    const int lane = thread % 32;
    const int row = lane / 16 * 8 + lane % 8;
    const int chunk = thread / 32 * 2 + lane / 8 % 2;  // of 16 bytes, swizzled
    Element* const first = to + row * kWarpgroupRows + (chunk ^ row % 8) * 8;
    const Tensor words = recast<const uint32_t>(dscores);
#pragma unroll
    for (int r = 0; r < kRows; r += 16) {
      const int n = r / 4;
      SM90_U16x8_STSM_T::copy(words(n), words(n + 1), words(n + 2), words(n + 3),
                              *reinterpret_cast<uint128_t*>(first + r * kWarpgroupRows));
    }
  }

  static HSTU_DEVICE void store_keys(const PackedTensor& tensor, const Item& item, int warpgroup,
                                     KeySum& sum, float factor) {
#pragma unroll
    for (int n = 0; n < size(sum); ++n) sum(n) *= factor;
    const Sequence& sequence = item.work.sequence;
    const int first = item.work.tile * kKeys + warpgroup * kWarpgroupRows;
    store_sum<Element, kHeadDim>(sum, tensor, item.head, sequence.k_begin + first,
                                 sequence.k_len - first, 0);
  }

 public:
  // The factor that all rows share; 1 where each row has its own.
  static HSTU_DEVICE float uniform_scale(const BackwardParams& params) {
    if (params.attn_scale_per_row) return 1.0f;
    return params.attn_scale ? params.attn_scale[0] : static_cast<float>(params.scale);
  }
};

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    run_backward(const __grid_constant__ BackwardParams params,
                 const __grid_constant__ BackwardMaps maps,
                 const __grid_constant__ BackwardBuffers buffers) {
  extern __shared__ __align__(1024) char shared[];
  Kernel::run(params, maps, buffers, *reinterpret_cast<typename Kernel::SharedMemory*>(shared));
}

// dQ = alpha * scale * sum, rounded once. A block takes one tile of rows of one head.
template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kConsumers* kWarpgroup)
    finish_dq(const __grid_constant__ BackwardParams params, const float* sums) {
  using Dq = typename Kernel::Dq;
  wait_for_previous_kernel();
  const int number = blockIdx.x / params.heads;
  const int head = blockIdx.x % params.heads;
  WorkTile work;
  if (!find_row_tile(params.batch, number, Kernel::kRows, work)) return;

  const int warpgroup = threadIdx.x / kWarpgroup;
  const float* from = sums + int64_t{blockIdx.x} * Dq::kSize + Dq::first(warpgroup);
  const float factor = static_cast<float>(params.alpha) * Kernel::uniform_scale(params);
  Tensor dq = partition_fragment_C(typename Kernel::DqMma{},
                                   Shape<Int<kWarpgroupRows>, Int<Dq::kColumns>>{});
#pragma unroll
  for (int n = 0; n < Dq::kValues; n += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + Dq::offset(n));
    dq(n) = four.x * factor;
    dq(n + 1) = four.y * factor;
    dq(n + 2) = four.z * factor;
    dq(n + 3) = four.w * factor;
  }
  const int first = work.tile * Kernel::kRows + Dq::first_row(warpgroup);
  store_sum<typename Kernel::Element, Dq::kColumns>(
      dq, params.dq, head, work.sequence.q_begin + first, work.sequence.q_len - first,
      Dq::first_column(warpgroup));
}

}  // namespace hstu::sm90
