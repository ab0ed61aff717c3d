#if defined(USE_CUDA)

#include "dispatch.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "sm80/kernels.h"

namespace hstu {
namespace {

// What the build was asked for, in ascending order.
using HeadDims = std::integer_sequence<int, HSTU_ATTN_HEAD_DIMS>;

template <int... kHeadDims>
std::string names(std::integer_sequence<int, kHeadDims...>) {
  std::string text;
  ((text += (text.empty() ? "" : ", ") + std::to_string(kHeadDims)), ...);
  return text;
}

const char* built_dtypes() {
#if HSTU_ATTN_DTYPE_BF16 && HSTU_ATTN_DTYPE_FP16
  return "bfloat16 and float16";
#elif HSTU_ATTN_DTYPE_BF16
  return "bfloat16";
#else
  return "float16";
#endif
}

// make<head dim, dtype>() of the smallest built head dim that holds those of the call.
template <typename Make, int... kHeadDims>
auto find(std::integer_sequence<int, kHeadDims...> head_dims, const ForwardParams& params,
          Make make) {
  std::optional<decltype(make.template operator()<32, DType::kBFloat16>())> kernel;
  const auto offer = [&]<int kHeadDim>() {
    if (kernel || params.q.head_dim > kHeadDim || params.v.head_dim > kHeadDim) return;
#if HSTU_ATTN_DTYPE_BF16
    if (params.dtype == DType::kBFloat16) {
      kernel = make.template operator()<kHeadDim, DType::kBFloat16>();
    }
#endif
#if HSTU_ATTN_DTYPE_FP16
    if (params.dtype == DType::kFloat16) {
      kernel = make.template operator()<kHeadDim, DType::kFloat16>();
    }
#endif
  };
  (offer.template operator()<kHeadDims>(), ...);
  if (kernel) return *kernel;
  throw NotImplemented(std::string("q: this build has CUDA kernels for ") + built_dtypes() +
                       " and head dims that fit into one of " + names(head_dims) +
                       "; got head_dim " + std::to_string(params.q.head_dim) + " and head_dim_v " +
                       std::to_string(params.v.head_dim) + " in a dtype or size beyond them");
}

}  // namespace

ForwardKernel forward_kernel(const CudaDevice&, const ForwardParams& params) {
  return find(HeadDims{}, params,
              []<int kHeadDim, DType kDType>() { return sm80::forward<kHeadDim, kDType>(); });
}

BackwardKernel backward_kernel(const CudaDevice&, const BackwardParams& params) {
  return find(HeadDims{}, params,
              []<int kHeadDim, DType kDType>() { return sm80::backward<kHeadDim, kDType>(); });
}

}  // namespace hstu

#endif
