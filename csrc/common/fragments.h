// Views and conversions of accumulator fragments.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/tensor.hpp>

#include "device_math.h"
#include "macros.h"

namespace hstu {

// A thread's accumulator fragment as a matrix of rows by columns:
// ((2, 2, ...), m, n) -> ((2, m), (2, ..., n)).
template <typename Fragment>
HSTU_DEVICE auto as_matrix(Fragment&& fragment) {
  using namespace cute;
  const auto layout = fragment.layout();
  const auto rows = make_layout(get<0, 1>(layout), get<1>(layout));
  if constexpr (decltype(rank(get<0>(layout)))::value == 3) {  // wgmma: one atom has all columns
    const auto columns = make_layout(get<0, 0>(layout), get<0, 2>(layout), get<2>(layout));
    return make_tensor(fragment.data(), make_layout(rows, columns));
  } else {
    const auto columns = make_layout(get<0, 0>(layout), get<2>(layout));
    return make_tensor(fragment.data(), make_layout(rows, columns));
  }
}

// result = sum, rounded.
// NOTE: the whole fragment is converted at once. Element by element, the compiler unpacks pairs and
// packs them again.
template <typename Sum, typename Result>
HSTU_DEVICE void round_to(const Sum& sum, Result& result) {
  using Element = typename Result::value_type;
  constexpr int kCount = decltype(cute::size(sum))::value;
  const cutlass::NumericArrayConverter<Element, float, kCount> convert;
  using From = cutlass::Array<float, kCount>;
  using To = cutlass::Array<Element, kCount>;
  *reinterpret_cast<To*>(result.data()) = convert(*reinterpret_cast<const From*>(sum.data()));
}

template <typename Element, typename Sum>
HSTU_DEVICE auto rounded(const Sum& sum) {
  cute::Tensor result = cute::make_tensor_like<Element>(sum);
  round_to(sum, result);
  return result;
}

}  // namespace hstu
