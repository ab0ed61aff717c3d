// The gradient of a dense bias where the backward has no fp32 dS to store: summed over heads that
// share it, or in fp16, or with rows that no tensor map can have.
//
// dRab = sum over heads of alpha * scale * M * dP * silu'(alpha * S). S and dP are found once more,
// a tile of rows and keys at a time for all heads of a bias head, and the sum stays in registers:
// it is rounded once and in a fixed order.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "../common/activation.h"
#include "../common/launch.h"
#include "backward_block.h"
#include "bias.h"

namespace hstu::sm90 {

template <int kHeadDim_, typename Element_>
struct BiasGradient {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumers = 2;
  static constexpr int kRows = kConsumers * kWarpgroupRows;
  static constexpr int kKeys =
      BackwardBlock<kHeadDim, Element, true, false>::kBlockKeys;  // whose tensor maps are used
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr int kBlocksPerSm = 1;
  static constexpr Registers kRegisters = {56, 224};

  using Mma = SharedMma<Element, kKeys, kHeadDim>;  // rows by keys
  using Scores = decltype(partition_fragment_C(Mma{}, Shape<Int<kWarpgroupRows>, Int<kKeys>>{}));
  // A tile of a matrix, all of whose heads a block works on.
  struct Item {
    WorkTile work;  // the sequence; its tiles are not counted here
    int bias_head;
    int first_head;  // of those that share it
    int first_row;   // a query row, a multiple of kRows; below 0 there are none
    int first_key;
    bool is_visible;           // some row of some head sees some key
    bool is_full[kConsumers];  // all rows of a warpgroup see all keys, in every head
  };
  using ItemPlace = RingPlace<2>;
  using HeadPlace = RingPlace<kHeadDim <= 64 ? 2 : 1>;
  using BiasPlace = RingPlace<1>;

  struct SharedMemory {
    alignas(1024) Element q[HeadPlace::kStages][kRows * kHeadDim];
    alignas(1024) Element k[HeadPlace::kStages][kKeys * kHeadDim];
    alignas(1024) Element dout[HeadPlace::kStages][kRows * kHeadDim];
    alignas(1024) Element v[HeadPlace::kStages][kKeys * kHeadDim];
    alignas(1024) Element bias[kRows * kKeys];
    Item items[ItemPlace::kStages];
    Handover<ItemPlace::kStages> item_handover;
    Handover<HeadPlace::kStages> score_handover;     // of Q and K
    Handover<HeadPlace::kStages> gradient_handover;  // of dO and V
    Handover<BiasPlace::kStages> bias_handover;
  };
  static_assert(sizeof(SharedMemory) <= kSharedMemory, "a block has 227 KB of shared memory");

  // Of all matrices of the bias. Row tiles begin so that query row 0 begins one.
  static HSTU_HOST_DEVICE int row_tiles(const DenseBias& bias) { return bias.length / kRows + 2; }
  static HSTU_HOST_DEVICE int key_tiles(const DenseBias& bias) {
    return (bias.length + kKeys - 1) / kKeys;
  }
  static HSTU_HOST_DEVICE int64_t tiles(const DenseBias& bias, int batch) {
    return int64_t{batch} * bias.heads * row_tiles(bias) * key_tiles(bias);
  }

  static HSTU_DEVICE void run(const BackwardParams& params, const BackwardMaps& maps,
                              const WorkList& list, SharedMemory& shared) {
    if (threadIdx.x == 0) {
      shared.item_handover.init(kConsumers * kWarpgroup);
      shared.score_handover.init(kConsumers * 4);
      shared.gradient_handover.init(kConsumers * 4);
      shared.bias_handover.init(kConsumers * 4);
      cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    wait_for_previous_kernel();

    const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<kRegisters.producer>();
      if (threadIdx.x == 0) produce(params, maps, list, shared);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kRegisters.consumer>();
      consume(params, shared, warpgroup - 1);
    }
  }

 private:
  // Item `number`. By one thread.
  static HSTU_DEVICE void find_item(const BackwardParams& params, const WorkList& list,
                                    int64_t number, Item& item) {
    const DenseBias& bias = params.drab;
    const int key_tile = static_cast<int>(number % key_tiles(bias));
    number /= key_tiles(bias);
    const int row_tile = static_cast<int>(number % row_tiles(bias));
    number /= row_tiles(bias);
    const int heads = params.heads / bias.heads;
    item.bias_head = static_cast<int>(number % bias.heads);
    item.first_head = item.bias_head * heads;
    item.work.sequence_number = static_cast<int>(number / bias.heads);
    item.work.sequence = load_sequence(params.batch, item.work.sequence_number);
    forget_registers();
    const Sequence& sequence = item.work.sequence;
    const int tiles_before = (max(sequence.offset, 0) + kRows - 1) / kRows;
    item.first_row = (row_tile - tiles_before) * kRows;
    item.first_key = key_tile * kKeys;
    item.is_visible = false;
    for (int warpgroup = 0; warpgroup < kConsumers; ++warpgroup) {
      const int row = item.first_row + warpgroup * kWarpgroupRows;
      // NOTE: the bias does not end where the sequence does.
      bool is_full =
          row + kWarpgroupRows <= sequence.q_len && item.first_key + kKeys <= sequence.k_len;
      if (row >= 0 && row < sequence.q_len && item.first_key < sequence.k_len) {
#pragma unroll 1
        for (int head = item.first_head; head < item.first_head + heads; ++head) {
          static_assert(kBackwardRows == kWarpgroupRows, "summaries are of a warpgroup's rows");
          const TileKind kind = list.classify<kWarpgroupRows, kKeys>(
              params.mask, item.work, head, row / kWarpgroupRows, key_tile);
          item.is_visible |= kind != TileKind::kEmpty;
          is_full &= kind == TileKind::kFull;
        }
      } else {
        is_full = false;
      }
      item.is_full[warpgroup] = is_full;
    }
  }

  // Finds the items and copies what they need. By one thread.
  static HSTU_DEVICE void produce(const BackwardParams& params, const BackwardMaps& maps,
                                  const WorkList& list, SharedMemory& shared) {
    const int heads = params.heads / params.drab.heads;
    ItemPlace item_place;
    HeadPlace place;
    BiasPlace bias_place;
    for (int64_t n = blockIdx.x; n < tiles(params.drab, params.batch.batch); n += gridDim.x) {
      Item& item = shared.items[item_place.stage()];
      shared.item_handover.wait_empty(item_place);
      find_item(params, list, n, item);
      shared.item_handover.full[item_place.stage()].arrive();
      item_place.advance();
      if (!item.is_visible) continue;
      const Sequence& sequence = item.work.sequence;
      shared.bias_handover.wait_empty(bias_place);
      auto& bias_full = shared.bias_handover.full[bias_place.stage()];
      bias_full.arrive_and_expect_tx(kRows * kKeys * sizeof(Element));
      start_copy_bias<kRows, kKeys>(maps.bias, item.work.sequence_number, item.bias_head,
                                    item.first_row + sequence.offset, item.first_key, shared.bias,
                                    bias_full);
      bias_place.advance();
#pragma unroll 1
      for (int head = item.first_head; head < item.first_head + heads; ++head) {
        const RaggedRows rows = {sequence.q_begin, sequence.q_len, head};
        const RaggedRows keys = {sequence.k_begin, sequence.k_len, head};
        const int stage = place.stage();
        copy_both(maps.q, maps.k, rows, keys, item, shared.q[stage], shared.k[stage],
                  shared.score_handover, place);
        copy_both(maps.dout, maps.v, rows, keys, item, shared.dout[stage], shared.v[stage],
                  shared.gradient_handover, place);
        place.advance();
      }
    }
  }

  // The operands of a product.
  static HSTU_DEVICE void copy_both(const CUtensorMap& row_map, const CUtensorMap& key_map,
                                    const RaggedRows& rows, const RaggedRows& keys,
                                    const Item& item, Element* to_rows, Element* to_keys,
                                    Handover<HeadPlace::kStages>& handover, HeadPlace place) {
    handover.wait_empty(place);
    auto& full = handover.full[place.stage()];
    full.arrive_and_expect_tx((kRows + kKeys) * kHeadDim * sizeof(Element));
    start_copy_rows<kRows, kHeadDim, kWarpgroupRows>(row_map, rows, item.first_row, to_rows, full);
    start_copy_rows<kKeys, kHeadDim>(key_map, keys, item.first_key, to_keys, full);
  }

  static HSTU_DEVICE void consume(const BackwardParams& params, SharedMemory& shared,
                                  int warpgroup) {
    const int heads = params.heads / params.drab.heads;
    const int own = warpgroup * kWarpgroupRows;
    ItemPlace item_place;
    HeadPlace place;
    BiasPlace bias_place;
    for (int64_t n = blockIdx.x; n < tiles(params.drab, params.batch.batch); n += gridDim.x) {
      shared.item_handover.wait_full(item_place);
      const Item& item = shared.items[item_place.stage()];
      Scores sum;
      clear(sum);
      if (item.is_visible) {
        shared.bias_handover.wait_full(bias_place);
#pragma unroll 1
        for (int h = 0; h < heads; ++h) {
          const int stage = place.stage();
          const bool is_full = item.is_full[warpgroup];
          const uint64_t visible = is_full ? 0 : find_visible(params, item, h, own);
          // S = Q K^T + bias and dP = dO V^T
          Scores scores, gradients;
          load_bias<kKeys>(shared.bias + own * kKeys, scores);
          shared.score_handover.wait_full(place);
          start_product(shared.q[stage] + own * kHeadDim, shared.k[stage], scores,
                        GMMA::ScaleOut::One);
          shared.gradient_handover.wait_full(place);
          start_product(shared.dout[stage] + own * kHeadDim, shared.v[stage], gradients,
                        GMMA::ScaleOut::Zero);
          wait_for_products<1>(scores);
          shared.score_handover.release_by_warp(place);
          // S = silu'(alpha * S)
          const float half_alpha = 0.5f * static_cast<float>(params.alpha);
#pragma unroll
          for (int i = 0; i < size(scores); ++i) {
            const float x = half_alpha * scores(i);
            scores(i) = silu_derivative_of_half(x, tanh_approx(x));
          }
          if (!is_full) hide(visible, scores);
          warpgroup_fence_operand(scores);  // found beside the second product
          wait_for_products<0>(gradients);
          shared.gradient_handover.release_by_warp(place);
          place.advance();
          // dRab += M * dP * silu'(alpha * S)
#pragma unroll
          for (int i = 0; i < size(sum); ++i) sum(i) += scores(i) * gradients(i);
        }
        shared.bias_handover.release_by_warp(bias_place);
        bias_place.advance();
      }
      store(params, item, own, sum);
      shared.item_handover.release(item_place);
      item_place.advance();
    }
  }

  static HSTU_DEVICE void start_product(Element* rows, Element* keys, Scores& product,
                                        GMMA::ScaleOut scale) {
    start_gemm(Mma{}, rows_tensor<kWarpgroupRows, kHeadDim>(rows),
               rows_tensor<kKeys, kHeadDim>(keys), product, scale);
  }

  // The thread's row m of the tile, from the warpgroup's first on.
  static HSTU_DEVICE int row_of_thread(int m) {
    const int thread = thread_anew() % kWarpgroup;
    return thread / 32 * 16 + thread % 32 / 4 + 8 * m;
  }

  // Which of 64 keys one row sees in head h of the item: lane n of a warp finds it for row n % 16
  // of the warp's, and the first or second 64 keys of the item.
  static HSTU_DEVICE uint64_t find_visible(const BackwardParams& params, const Item& item, int h,
                                           int own) {
    const Sequence& sequence = item.work.sequence;
    const int thread = thread_anew() % kWarpgroup;
    const int row = item.first_row + own + thread / 32 * 16 + thread % 16;
    if (row < 0 || row >= sequence.q_len) return 0;
    return Mask(params.mask, sequence, item.first_head + h)
        .row_bits(row, item.first_key + thread % 32 / 16 * 64);
  }

  // Zeroes what the mask hides. Four lanes share a row, and each gets the bits of it.
  static HSTU_DEVICE void hide(uint64_t visible, Scores& scores) {
    const int lane = thread_anew() % 32;
    auto matrix = as_matrix(scores);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int first = 0; first < kKeys; first += 64) {
        const int owner = first / 4 + m * 8 + lane / 4;
        const uint64_t bits = __shfl_sync(0xffffffff, visible, owner) >> lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < 16; ++n) {
          const bool is_seen = bits >> (n / 2 * 8 + n % 2) & 1;
          if (!is_seen) matrix(m, first / 4 + n) = 0;
        }
      }
    }
  }

  // dRab = alpha * scale * sum, rounded, where the matrix has the tile
  static HSTU_DEVICE void store(const BackwardParams& params, const Item& item, int own,
                                Scores& sum) {
    const Sequence& sequence = item.work.sequence;
    auto matrix = as_matrix(sum);
    float scale = params.attn_scale ? params.attn_scale[0] : static_cast<float>(params.scale);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int row = item.first_row + own + row_of_thread(m);
      if (params.attn_scale_per_row && row >= 0 && row < sequence.q_len) {
        scale = params.attn_scale[sequence.q_begin + row];
      }
      const float factor = static_cast<float>(params.alpha) * scale;
#pragma unroll
      for (int n = 0; n < size<1>(matrix); ++n) matrix(m, n) *= factor;
    }
    const DenseBias& drab = params.drab;
    Element* const to = static_cast<Element*>(drab.data) +
                        item.work.sequence_number * drab.batch_stride +
                        item.bias_head * drab.head_stride + item.first_key;
    const int first = item.first_row + own + sequence.offset;  // may be below 0
    const int columns = drab.length - item.first_key;
    const bool is_aligned =
        drab.row_stride % 8 == 0 && columns % 8 == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0;
    if (is_aligned && first >= 0) {
      const PackedTensor rows = {to, drab.row_stride, 0, columns};
      store_sum<Element, kKeys>(sum, rows, 0, first, drab.length - first, 0);
      return;
    }
    const int lane_column = thread_anew() % 4 * 2;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int i = first + row_of_thread(m);
      if (i < 0 || i >= drab.length) continue;
#pragma unroll
      for (int n = 0; n < size<1>(matrix); ++n) {
        const int column = n / 2 * 8 + lane_column + n % 2;
        if (column < columns) to[i * drab.row_stride + column] = static_cast<Element>(matrix(m, n));
      }
    }
  }
};

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    run_bias_gradient(const __grid_constant__ BackwardParams params,
                      const __grid_constant__ BackwardMaps maps, const WorkList list) {
  extern __shared__ __align__(1024) char shared[];
  Kernel::run(params, maps, list, *reinterpret_cast<typename Kernel::SharedMemory*>(shared));
}

}  // namespace hstu::sm90
