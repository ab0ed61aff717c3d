// What forward and backward share: shared-memory layouts, copies of rows, and products of tiles.
#pragma once

#include <cute/tensor.hpp>

#include "../common/e4m3.h"
#include "../common/fragments.h"
#include "../common/pages.h"
#include "tile_config.h"

namespace hstu::sm80 {

using namespace cute;

// The thread's index, hidden from the optimiser.
// NOTE: else it would keep the addresses of every operand, swizzled for each step, in registers for
// the whole of a main loop, and spill; to find them again costs a few instructions a product.
template <bool kHidden = true>
HSTU_DEVICE int thread_index() {
  int index = threadIdx.x;
  if constexpr (kHidden) asm volatile("" : "+r"(index));
  return index;
}

// ------------------------------------------------------------------------- shared-memory layouts

// Rows of kColumns elements in shared memory, in pieces of up to 64 columns whose 16-byte chunks
// are swizzled, so that neither copies nor ldmatrix of 8 rows meet a bank twice.
template <int kColumns>
using RowsAtom = std::conditional_t<
    kColumns % 64 == 0,
    decltype(composition(Swizzle<3, 3, 3>{}, Layout<Shape<_8, _64>, Stride<_64, _1>>{})),
    decltype(composition(Swizzle<2, 3, 3>{}, Layout<Shape<_8, _32>, Stride<_32, _1>>{}))>;

template <int kRows, int kColumns>
using RowsLayout =
    decltype(tile_to_shape(RowsAtom<kColumns>{}, Shape<Int<kRows>, Int<kColumns>>{}));

template <int kRows, int kColumns, typename Element>
HSTU_DEVICE auto rows_tensor(Element* data) {
  return make_tensor(make_smem_ptr(data), RowsLayout<kRows, kColumns>{});
}

// The same memory, columns by rows.
template <int kRows, int kColumns, typename Element>
HSTU_DEVICE auto transposed_tensor(Element* data) {
  using Transpose = Layout<Shape<Int<kColumns>, Int<kRows>>, Stride<Int<kRows>, _1>>;
  return make_tensor(make_smem_ptr(data), composition(RowsLayout<kRows, kColumns>{}, Transpose{}));
}

// ------------------------------------------------------------------------------- order of keys

// Keys lie in shared memory in an order in which a thread's columns of a product are neighbours: in
// an mma fragment, thread t of a group of four has columns 8n + 2t and 8n + 2t + 1 of each block n
// of 8 columns. So slot 8n + 2t + i of kGroup slots holds key (kGroup / 4) t + 2n + i, and a thread
// reads its part of a bias row, and writes that of its gradient, by 16 bytes.
template <int kGroup>
struct KeyOrder {
  static_assert(kGroup == 16 || kGroup == 32, "groups are made of 2 or 4 blocks of 8 columns");
  static constexpr int kRun = kGroup / 4;  // neighbouring keys of a thread

  // NOTE: this only moves bits, so that key(x + y) = key(x) + key(y) where x and y share no bit.
  static HSTU_DEVICE int key(int slot) {
    return slot / kGroup * kGroup + slot % 8 / 2 * kRun + slot % kGroup / 8 * 2 + slot % 2;
  }
};

struct NaturalOrder {
  static HSTU_DEVICE int key(int slot) { return slot; }
};

// ------------------------------------------------------------------------------- copies of rows

// How the threads of a block go over kRows slots of kColumns elements, 16 bytes each at a time. In
// each pass, a thread's slot moves by a constant, and so does its row in any Order.
template <int kRows, int kColumns, int kThreads, bool kHidesThread>
struct RowPasses {
  static constexpr int kChunks = kColumns / 8;
  static constexpr int kStep = kThreads / kChunks;  // slots a pass
  static constexpr int kPasses = kRows / kStep;
  static_assert(kThreads % kChunks == 0 && kRows % kStep == 0,
                "a tile's rows are copied in whole passes of the block");

  int slot;  // of the first pass
  int column;

  HSTU_DEVICE RowPasses() {
    const int thread = thread_index<kHidesThread>();
    slot = thread / kChunks;
    column = thread % kChunks * 8;
  }

  // The thread's chunk of a tile in shared memory.
  template <typename Element>
  HSTU_DEVICE Element* chunk(Element* data, int pass) const {
    if constexpr (kStep % 8 == 0) {  // the swizzle repeats with every 8 rows
      return &rows_tensor<kRows, kColumns>(data)(slot, column) + pass * kStep * kPitch;
    } else {
      return &rows_tensor<kRows, kColumns>(data)(slot + pass * kStep, column);
    }
  }

 private:
  static constexpr int kPitch = kColumns < 64 ? kColumns : 64;
};

// The rows of one sequence and head in a packed tensor.
// NOTE: kernels keep it in shared memory, to leave the registers to the sums.
template <typename Element>
struct HeadRows {
  const Element* first;
  int row_stride;
  int count;
  int head_dim;

  HSTU_DEVICE HeadRows(const PackedTensor& tensor, int64_t begin, int count, int head)
      : first(static_cast<const Element*>(tensor.data) + begin * tensor.row_stride +
              head * tensor.head_stride),
        row_stride(static_cast<int>(tensor.row_stride)),
        count(count),
        head_dim(tensor.head_dim) {}
};

// Starts copying kRows rows from row `begin` on to shared memory; those past the end become zeros,
// and so do columns.
template <int kRows, int kColumns, int kThreads, typename Order, bool kHidesThread,
          typename Element>
HSTU_DEVICE void copy_rows_async(HeadRows<Element> rows, int begin, Element* to) {
  using Passes = RowPasses<kRows, kColumns, kThreads, kHidesThread>;
  const Passes passes;
  const int first = begin + Order::key(passes.slot);
  const Element* from = rows.first + static_cast<int64_t>(first) * rows.row_stride + passes.column;
  const int count = passes.column < rows.head_dim ? rows.count - first : 0;
#pragma unroll
  for (int pass = 0; pass < Passes::kPasses; ++pass) {
    const int row = Order::key(pass * Passes::kStep);
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                     cast_smem_ptr_to_uint(passes.chunk(to, pass))),
                 "l"(from + static_cast<int64_t>(row) * rows.row_stride),
                 "r"(row < count ? 16 : 0));
  }
}

// Starts copying 16 bytes, aligned to as many.
HSTU_DEVICE void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(cast_smem_ptr_to_uint(to)),
               "l"(from));
}

// The keys, or the values, of one sequence and head: history in pages, targets in packed rows.
template <typename Element>
struct PagedRows {
  const Element* pages;  // of the head
  const float* scales;   // of the head, or null; with them, pages hold e4m3
  const PagedParams* paged;
  PageList list;
  int history_end;
  HeadRows<Element> targets;

  HSTU_DEVICE PagedRows(const PagedParams& paged, PagePart part, const PackedTensor& tensor,
                        const Sequence& sequence, int b, int head)
      : scales(paged.scales),
        paged(&paged),
        list(paged, b),
        history_end(sequence.history_end),
        targets(tensor, TargetRows(sequence).begin, TargetRows(sequence).count, head) {
    const bool is_values = part == PagePart::kValues;
    const int64_t offset = head * paged.head_stride + (is_values ? paged.kv_stride : 0);
    if (scales) {
      pages =
          reinterpret_cast<const Element*>(static_cast<const uint8_t*>(paged.kv_cache) + offset);
      scales += head + (is_values ? paged.scale_kv_stride : 0);
    } else {
      pages = static_cast<const Element*>(paged.kv_cache) + offset;
    }
  }

  // Row `key` of the history on is a target's. Null where there is no such row.
  HSTU_DEVICE const Element* target_row(int key) const {
    const int target = key - history_end;
    if (target >= targets.count) return nullptr;
    return targets.first + static_cast<int64_t>(target) * targets.row_stride;
  }

  // Null where there is no such row. Not for e4m3.
  HSTU_DEVICE const Element* row(int key) const {
    if (key >= history_end) return target_row(key);
    const int page = key / paged->page_size;
    if (page >= list.count) return nullptr;
    return pages + list.page(*paged, page) * paged->page_stride +
           key % paged->page_size * paged->slot_stride;
  }

  // A row of e4m3 and its scale.
  struct Quantised {
    const uint8_t* elements = nullptr;  // null where the history has no such row
    const float* scale = nullptr;
  };
  HSTU_DEVICE Quantised quantised_row(int key) const {
    if (key >= history_end) return {};
    const int n = key / paged->page_size;
    if (n >= list.count) return {};
    const int64_t page = list.page(*paged, n);
    const int slot = key % paged->page_size;
    return {reinterpret_cast<const uint8_t*>(pages) + page * paged->page_stride +
                slot * paged->slot_stride,
            scales + page * paged->scale_page_stride + slot * paged->scale_slot_stride};
  }
};

// Copies rows of an e4m3 cache, but not asynchronously: they are in shared memory when this
// returns, and visible to others after the barrier that follows wait_for_copies().
template <int kRows, int kColumns, int kThreads, typename Order, bool kHidesThread,
          typename Element>
HSTU_DEVICE void copy_quantised_rows(const PagedRows<Element>& rows, int begin, Element* to) {
  using Passes = RowPasses<kRows, kColumns, kThreads, kHidesThread>;
  // Loads under way: more would take registers that the sums need.
  constexpr int kAtOnce = Passes::kPasses < 4 ? Passes::kPasses : 4;
  static_assert(Passes::kPasses % kAtOnce == 0, "passes are made of whole groups of loads");
  const Passes passes;
  const int first = begin + Order::key(passes.slot);
  const bool has_column = passes.column < rows.targets.head_dim;
#pragma unroll 1
  for (int group = 0; group < Passes::kPasses; group += kAtOnce) {
    uint2 elements[kAtOnce];
    float scales[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int key = first + Order::key((group + n) * Passes::kStep);
      const auto row = rows.quantised_row(key);
      const bool is_read = row.elements && has_column;
      elements[n] = is_read ? __ldg(reinterpret_cast<const uint2*>(row.elements + passes.column))
                            : uint2{0, 0};
      scales[n] = is_read ? __ldg(row.scale) : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const uint2 low = dequantised<Element>(elements[n].x, scales[n]);
      const uint2 high = dequantised<Element>(elements[n].y, scales[n]);
      *reinterpret_cast<uint4*>(passes.chunk(to, group + n)) = {low.x, low.y, high.x, high.y};
    }
  }
  // Targets, over the zeros of their rows.
  if (begin + kRows <= rows.history_end || !has_column) return;
#pragma unroll 1
  for (int pass = 0; pass < Passes::kPasses; ++pass) {
    const int key = first + Order::key(pass * Passes::kStep);
    const Element* target = key >= rows.history_end ? rows.target_row(key) : nullptr;
    if (target) {
      *reinterpret_cast<uint4*>(passes.chunk(to, pass)) =
          *reinterpret_cast<const uint4*>(target + passes.column);
    }
  }
}

template <int kRows, int kColumns, int kThreads, typename Order, bool kHidesThread,
          typename Element>
HSTU_DEVICE void copy_rows_async(const PagedRows<Element>& rows, int begin, Element* to) {
  if (rows.scales) {
    return copy_quantised_rows<kRows, kColumns, kThreads, Order, kHidesThread>(rows, begin, to);
  }
  using Passes = RowPasses<kRows, kColumns, kThreads, kHidesThread>;
  const Passes passes;
  const int first = begin + Order::key(passes.slot);
  const bool has_column = passes.column < rows.targets.head_dim;
#pragma unroll
  for (int pass = 0; pass < Passes::kPasses; ++pass) {
    const Element* row = has_column ? rows.row(first + Order::key(pass * Passes::kStep)) : nullptr;
    // NOTE: an address that exists, of which no byte is read.
    const Element* from = row ? row + passes.column : rows.pages;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                     cast_smem_ptr_to_uint(passes.chunk(to, pass))),
                 "l"(from), "r"(row ? 16 : 0));
  }
}

HSTU_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;"); }
HSTU_DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Copies a tile from shared memory to `count` rows of a packed tensor.
template <int kRows, int kColumns, int kThreads, typename Order, typename Element>
HSTU_DEVICE void store_rows(Element* from, const PackedTensor& tensor, int64_t begin, int count,
                            int head) {
  using Passes = RowPasses<kRows, kColumns, kThreads, true>;
  const Passes passes;
  const int first = Order::key(passes.slot);
  Element* to = static_cast<Element*>(tensor.data) + (begin + first) * tensor.row_stride +
                head * tensor.head_stride + passes.column;
  if (passes.column >= tensor.head_dim) return;
#pragma unroll
  for (int pass = 0; pass < Passes::kPasses; ++pass) {
    const int row = Order::key(pass * Passes::kStep);
    if (row < count - first) {
      *reinterpret_cast<uint4*>(to + row * tensor.row_stride) =
          *reinterpret_cast<const uint4*>(passes.chunk(from, pass));
    }
  }
}

// ----------------------------------------------------------------------------- products of tiles

// mma.sync m16n8k16 with fp32 sums: kRowWarps warps along the rows and kColumnWarps along the
// columns, each of which takes 16 neighbouring rows and kGroup neighbouring columns at a time.
template <typename Element, int kRowWarps, int kColumnWarps, int kGroup = 16>
using Mma = TiledMMA<
    MMA_Atom<std::conditional_t<std::is_same_v<Element, cutlass::half_t>,
                                SM80_16x8x16_F32F16F16F32_TN, SM80_16x8x16_F32BF16BF16F32_TN>>,
    Layout<Shape<Int<kRowWarps>, Int<kColumnWarps>, _1>>,
    Tile<Int<16 * kRowWarps>,
         Layout<Shape<_8, Int<kColumnWarps>, Int<kGroup / 8>>, Stride<_1, Int<kGroup>, _8>>, _16>>;

// How an operand lies in shared memory: the summed direction along its rows, or across them.
enum class Operand { kRows, kTransposed };

template <Operand kOperand, typename Element>
using LoadMatrix =
    Copy_Atom<std::conditional_t<kOperand == Operand::kRows, SM75_U32x4_LDSM_N, SM75_U16x8_LDSM_T>,
              Element>;

// sum += A B^T, A (rows, k) in registers and B (columns, k) in shared memory. load_a(step) brings A
// for one step of 16 of k. Of B, what one copy takes is read kReading.ahead products before it is
// used: more hides more of the wait for shared memory and takes more registers.
template <Operand kB, Reading kReading, typename TiledMma, typename Sum, typename FragmentA,
          typename B, typename LoadA>
HSTU_DEVICE void gemm(TiledMma mma, Sum& sum, FragmentA& fragment_a, const B& b, LoadA load_a) {
  using Element = typename B::value_type;
  const auto copy_b = make_tiled_copy_B(LoadMatrix<kB, Element>{}, mma);
  const auto thread_b = copy_b.get_thread_slice(thread_index<kReading.hides_thread>());
  const Tensor shared_b = thread_b.partition_S(b);
  Tensor fragment_b = make_tensor<Element>(partition_shape_B(mma, shape(b)));
  Tensor view_b = thread_b.retile_D(fragment_b);
  constexpr int kSteps = decltype(size<2>(fragment_b))::value;
  constexpr int kRowBlocks = decltype(size<1>(fragment_a))::value;
  constexpr int kColumnBlocks = decltype(size<1>(fragment_b))::value;
  constexpr int kCopies = decltype(size<1>(view_b))::value;  // a step
  constexpr int kBlocksPerCopy = kColumnBlocks / kCopies;

  const auto load_b = [&](int n) {
    copy(copy_b, shared_b(_, n % kCopies, n / kCopies), view_b(_, n % kCopies, n / kCopies));
  };
  load_a(0);
#pragma unroll
  for (int n = 0; n < kReading.ahead && n < kSteps * kCopies; ++n) load_b(n);
#pragma unroll
  for (int n = 0; n < kSteps * kCopies; ++n) {
    const int step = n / kCopies;
    if (n % kCopies == 0 && step + 1 < kSteps) load_a(step + 1);
    if (n + kReading.ahead < kSteps * kCopies) load_b(n + kReading.ahead);
#pragma unroll
    for (int column = n % kCopies * kBlocksPerCopy; column < (n % kCopies + 1) * kBlocksPerCopy;
         ++column) {
#pragma unroll
      for (int row = 0; row < kRowBlocks; ++row) {
        cute::gemm(mma, fragment_a(_, row, step), fragment_b(_, column, step), sum(_, row, column));
      }
    }
  }
}

// The same with A in shared memory, too.
template <Operand kA, Operand kB, Reading kReading, typename TiledMma, typename Sum, typename A,
          typename B>
HSTU_DEVICE void gemm(TiledMma mma, Sum& sum, const A& a, const B& b) {
  using Element = typename A::value_type;
  const auto copy_a = make_tiled_copy_A(LoadMatrix<kA, Element>{}, mma);
  const auto thread_a = copy_a.get_thread_slice(thread_index<kReading.hides_thread>());
  const Tensor shared_a = thread_a.partition_S(a);
  Tensor fragment_a = make_tensor<Element>(partition_shape_A(mma, shape(a)));
  Tensor view_a = thread_a.retile_D(fragment_a);
  gemm<kB, kReading>(mma, sum, fragment_a, b,
                     [&](int step) { copy(copy_a, shared_a(_, _, step), view_a(_, _, step)); });
}

// All of a left operand at once, for gemm_registers().
template <Operand kA, typename TiledMma, typename A, typename FragmentA>
HSTU_DEVICE void load_left_operand(TiledMma mma, const A& a, FragmentA& fragment) {
  using Element = typename A::value_type;
  const auto copy_a = make_tiled_copy_A(LoadMatrix<kA, Element>{}, mma);
  const auto thread_a = copy_a.get_thread_slice(thread_index());
  Tensor view = thread_a.retile_D(fragment);
  copy(copy_a, thread_a.partition_S(a), view);
}

// The same product with A in registers, as load_left_operand() or another product left it.
template <Operand kB, Reading kReading, typename TiledMma, typename Sum, typename FragmentA,
          typename B>
HSTU_DEVICE void gemm_registers(TiledMma mma, Sum& sum, const FragmentA& fragment_a, const B& b) {
  gemm<kB, kReading>(mma, sum, fragment_a, b, [](int) {});
}

// Two neighbouring 16 x 8 blocks of a product are one 16 x 16 block of a left operand:
// ((2, 2), rows, columns) -> ((2, 2, 2), rows, columns / 2).
template <typename Fragment>
HSTU_DEVICE auto as_left_operand(const Fragment& fragment) {
  const auto split = logical_divide(fragment.layout(), Shape<X, X, _2>{});
  const auto pairs = make_layout(get<0>(split), get<2, 0>(split));
  return make_tensor(fragment.data(), make_layout(pairs, get<1>(split), get<2, 1>(split)));
}

// Writes sums, rounded, to shared memory rows.
template <typename Element, int kRows, int kColumns, typename TiledMma, typename Sum>
HSTU_DEVICE void to_shared(TiledMma mma, const Sum& sum, Element* data) {
  const auto copy_out = make_tiled_copy_C(Copy_Atom<UniversalCopy<uint32_t>, Element>{}, mma);
  const auto thread_out = copy_out.get_thread_slice(thread_index());
  Tensor registers = thread_out.retile_S(rounded<Element>(sum));
  Tensor shared = thread_out.partition_D(rows_tensor<kRows, kColumns>(data));
  copy(copy_out, registers, shared);
}

}  // namespace hstu::sm80
