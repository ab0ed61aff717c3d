// Tensors of tiles in shared memory, and their products by wgmma.
#pragma once

#include <cute/tensor.hpp>

#include "../common/fragments.h"
#include "../common/opaque.h"
#include "tensor_map.h"
#include "tile_config.h"

namespace hstu::sm90 {

using namespace cute;

// kTiles tiles of rows_tensor() that follow each other, as the stages of a pipeline do. The last
// mode is the tile.
template <int kTiles, int kRows, int kHeadDim, bool kIsNarrow = false, typename Element>
HSTU_DEVICE auto rows_tensors(Element* data) {
  constexpr int kBytes = kPanel<kHeadDim, sizeof(Element), kIsNarrow> * sizeof(Element);
  using Atom = std::conditional_t<kBytes == 64, GMMA::Layout_K_SW64_Atom<Element>,
                                  GMMA::Layout_K_SW128_Atom<Element>>;
  return make_tensor(make_smem_ptr(data),
                     tile_to_shape(Atom{}, Shape<Int<kRows>, Int<kHeadDim>, Int<kTiles>>{}));
}

// A tile of kRows rows of kHeadDim elements as copy_rows() writes it: swizzled panels of 128
// or 64 bytes of each row.
template <int kRows, int kHeadDim, bool kIsNarrow = false, typename Element>
HSTU_DEVICE auto rows_tensor(Element* data) {
  return rows_tensors<1, kRows, kHeadDim, kIsNarrow>(opaque_pointer(data))(_, _, _0{});
}

// The memory of rows_tensor() as a matrix of columns by rows.
template <int kRows, int kHeadDim, bool kIsNarrow = false, typename Element>
HSTU_DEVICE auto transposed_tensor(Element* data) {
  using Atom =
      std::conditional_t<kHeadDim % 64 != 0 || kIsNarrow, GMMA::Layout_MN_SW64_Atom<Element>,
                         GMMA::Layout_MN_SW128_Atom<Element>>;
  return make_tensor(make_smem_ptr(opaque_pointer(data)),
                     tile_to_shape(Atom{}, Shape<Int<kHeadDim>, Int<kRows>>{}, Step<_2, _1>{}));
}

// wgmmas of a warpgroup's 64 rows. SmemMma: A and B in shared memory, both K-major, accumulators of
// type `Sum`. RegisterMma: A in registers, B in shared memory, MN-major, or K-major for e4m3,
// because wgmma reads 8-bit operands only K-major.
template <typename Element, int kColumns, int kDepth, typename Sum = float>
using SmemMma = decltype(make_tiled_mma(
    GMMA::ss_op_selector<Element, Element, Sum,
                         Shape<Int<kWarpgroupRows>, Int<kColumns>, Int<kDepth>>>()));
template <typename Element, int kColumns, int kDepth>
using RegisterMma = decltype(make_tiled_mma(
    GMMA::rs_op_selector<Element, Element, float,
                         Shape<Int<kWarpgroupRows>, Int<kColumns>, Int<kDepth>>, GMMA::Major::K,
                         sizeof(Element) == 1 ? GMMA::Major::K : GMMA::Major::MN>()));

// A and B in shared memory, A K-major, B MN-major, or K-major for e4m3.
template <typename Element, int kColumns, int kDepth>
using RowsByColumnsMma = decltype(make_tiled_mma(
    GMMA::ss_op_selector<Element, Element, float,
                         Shape<Int<kWarpgroupRows>, Int<kColumns>, Int<kDepth>>, GMMA::Major::K,
                         sizeof(Element) == 1 ? GMMA::Major::K : GMMA::Major::MN>()));

// A and B in shared memory, both MN-major.
template <typename Element, int kColumns, int kDepth>
using ColumnsByColumnsMma = decltype(make_tiled_mma(
    GMMA::ss_op_selector<Element, Element, float,
                         Shape<Int<kWarpgroupRows>, Int<kColumns>, Int<kDepth>>, GMMA::Major::MN,
                         GMMA::Major::MN>()));

template <typename TiledMma, typename FragmentA, typename FragmentB, typename Sum>
HSTU_DEVICE void start_gemm_of_fragments(TiledMma mma, const FragmentA& a, const FragmentB& b,
                                         Sum& sum, GMMA::ScaleOut scale) {
  warpgroup_fence_operand(sum);
  warpgroup_arrive();
  mma.accumulate_ = scale;
#pragma unroll
  for (int step = 0; step < size<2>(a); ++step) {
    cute::gemm(mma, a(_, _, step), b(_, _, step), sum);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
  warpgroup_fence_operand(sum);
}

// Starts sum = scale * sum + A B^T from shared memory, as one wgmma group.
template <typename TiledMma, typename A, typename B, typename Sum>
HSTU_DEVICE void start_gemm(TiledMma mma, const A& a, const B& b, Sum& sum, GMMA::ScaleOut scale) {
  const auto thread = mma.get_slice(0);
  start_gemm_of_fragments(mma, thread.partition_fragment_A(a), thread.partition_fragment_B(b), sum,
                          scale);
}

// start_gemm() for tile `a_tile` of `a` and tile `b_tile` of `b`, from rows_tensors(). An offset of
// a descriptor takes fewer instructions than the descriptor of an address, but more registers.
template <typename TiledMma, typename A, typename B, typename Sum>
HSTU_DEVICE void start_gemm_of_tiles(TiledMma mma, const A& a, int a_tile, const B& b, int b_tile,
                                     Sum& sum, GMMA::ScaleOut scale) {
  const auto thread = mma.get_slice(0);
  start_gemm_of_fragments(mma, thread.partition_fragment_A(a)(_, _, _, a_tile),
                          thread.partition_fragment_B(b)(_, _, _, b_tile), sum, scale);
}

// start_gemm_of_fragments() with A in registers: `a` is the rounded accumulator of another product,
// which has kDepth columns.
template <int kDepth, typename TiledMma, typename A, typename FragmentB, typename Sum>
HSTU_DEVICE void start_gemm_registers_of_fragment(TiledMma mma, A& a, const FragmentB& b, Sum& sum,
                                                  GMMA::ScaleOut scale) {
  // A step of the product takes four words of each thread.
  constexpr int kWord = 4 / sizeof(typename A::value_type);  // elements
  Tensor left = make_tensor(
      a.data(), Layout<Shape<Shape<Int<kWord>, _2, _2>, _1, Int<kDepth / (8 * kWord)>>,
                       Stride<Stride<_1, Int<kWord>, Int<2 * kWord>>, _0, Int<4 * kWord>>>{});
  warpgroup_fence_operand(left);
  start_gemm_of_fragments(mma, left, b, sum, scale);
}

// start_gemm() with A in registers: the rounded accumulator of another product.
template <typename TiledMma, typename A, typename B, typename Sum>
HSTU_DEVICE void start_gemm_registers(TiledMma mma, A& a, const B& b, Sum& sum,
                                      GMMA::ScaleOut scale) {
  start_gemm_registers_of_fragment<decltype(size<1>(b))::value>(
      mma, a, mma.get_slice(0).partition_fragment_B(b), sum, scale);
}

// start_gemm_registers() for tile `b_tile` of `b`, from rows_tensors().
template <typename TiledMma, typename A, typename B, typename Sum>
HSTU_DEVICE void start_gemm_registers_of_tile(TiledMma mma, A& a, const B& b, int b_tile, Sum& sum,
                                              GMMA::ScaleOut scale) {
  start_gemm_registers_of_fragment<decltype(size<1>(b))::value>(
      mma, a, mma.get_slice(0).partition_fragment_B(b)(_, _, _, b_tile), sum, scale);
}

// Waits until at most kRunning wgmma groups are in flight. `sum` is the accumulator of one that has
// ended, and may be read after this.
template <int kRunning, typename Sum>
HSTU_DEVICE void wait_for_wgmma(Sum& sum) {
  warpgroup_wait<kRunning>();
  warpgroup_fence_operand(sum);
}

}  // namespace hstu::sm90
