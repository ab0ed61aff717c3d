#if defined(USE_CUDA)

#include "dispatch.h"

#include <cstdio>
#include <optional>
#include <string>
#include <utility>

#include "common/cuda_check.h"
#include "environment.h"
#include "sm80/kernels.h"
#if defined(HSTU_ATTN_SM90)
#include "sm90/kernels.h"
#endif

namespace hstu {
namespace {

// The head dims that are built, in ascending order.
template <int... kHeadDims>
using ListOf = std::integer_sequence<int, kHeadDims...>;  // may be empty
using HeadDims = ListOf<HSTU_ATTN_HEAD_DIMS>;
using Fp8HeadDims = ListOf<HSTU_ATTN_FP8_HEAD_DIMS>;
using Fp8BackwardHeadDims = ListOf<HSTU_ATTN_FP8_BACKWARD_HEAD_DIMS>;
using Fp8ProjectionHeadDims = ListOf<HSTU_ATTN_FP8_PROJECTION_HEAD_DIMS>;

template <int... kHeadDims>
std::string names(std::integer_sequence<int, kHeadDims...>) {
  std::string text;
  ((text += (text.empty() ? "" : ", ") + std::to_string(kHeadDims)), ...);
  return text.empty() ? "none" : text;
}

const char* built_dtypes() {
#if defined(HSTU_ATTN_DTYPE_BF16) && defined(HSTU_ATTN_DTYPE_FP16)
  return "bfloat16 and float16";
#elif defined(HSTU_ATTN_DTYPE_BF16)
  return "bfloat16";
#else
  return "float16";
#endif
}

// Returns make<head dim, dtype>() for the smallest built head dim that is large enough for the
// call.
template <typename Make, int... kHeadDims>
auto find(std::integer_sequence<int, kHeadDims...> head_dims, const ForwardParams& params,
          Make make) {
  std::optional<decltype(make.template operator()<32, DType::kBFloat16>())> kernel;
  [[maybe_unused]] const auto offer = [&]<int kHeadDim>() {
    if (kernel || params.q.head_dim > kHeadDim || params.v.head_dim > kHeadDim) return;
#if defined(HSTU_ATTN_DTYPE_BF16)
    if (params.dtype == DType::kBFloat16) {
      kernel = make.template operator()<kHeadDim, DType::kBFloat16>();
    }
#endif
#if defined(HSTU_ATTN_DTYPE_FP16)
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

// With HSTU_ATTN_DEBUG=1, prints which kernels a call gets and, if they are not the newest, why.
void print_choice(const char* pass, const char* kernels, const char* reason) {
  if (!environment::prints_choice()) return;
  std::fprintf(stderr, "hstu_attn: %s by %s%s%s\n", pass, kernels, reason ? ", because of " : "",
               reason ? reason : "");
}

#if defined(HSTU_ATTN_SM90)
constexpr char kShortSequences[] = "short sequences, for which they are faster";

// True if the sm80 kernels, which have tiles for short sequences, are faster on Hopper, too.
bool is_faster_by_sm80(const CudaLaunch& launch, const ForwardParams& params) {
#if defined(HSTU_ATTN_SM80)
  if (launch.device.is_forced) return false;
  const int longest = sm80::longest_if_short(params, launch);
  if (longest <= 64) return true;
  // For more than 256 tokens and few tiles, the small tiles of the sm90 kernels are faster.
  return sm80::gains_by_short_forward(params, launch) &&
         (longest <= 256 || sm80::short_row_tiles(params) > launch.device.multiprocessors);
#else
  return false;
#endif
}

// is_faster_by_sm80() for the backward.
bool is_faster_by_sm80(const CudaLaunch& launch, const BackwardParams& params) {
#if defined(HSTU_ATTN_SM80)
  if (launch.device.is_forced) return false;
  // From 65 tokens on, tiles of 64 rows and keys are not faster where sm90 needs no sums of dQ.
  const bool is_wide = larger(params.q.head_dim, params.v.head_dim) > 64;
  const bool is_long = sm80::longest_if_short(params, launch) > 64;
  if (is_wide && is_long && sm90::has_one_key_tile(params, launch)) return false;
  return sm80::blocks_of_sequence(params, launch) > 0;
#else
  return false;
#endif
}
#endif

#if defined(HSTU_ATTN_SM90) && defined(HSTU_ATTN_DTYPE_E4M3)
template <int... kHeadDims>
ForwardKernel find_fp8(std::integer_sequence<int, kHeadDims...> head_dims,
                       const ForwardParams& params) {
  std::optional<ForwardKernel> kernel;
  [[maybe_unused]] const auto offer = [&]<int kHeadDim>() {
    if (kernel || params.q.head_dim > kHeadDim || params.v.head_dim > kHeadDim) return;
    kernel = params.paged.kv_cache ? sm90::paged_forward<kHeadDim, DType::kFloat8E4M3>()
                                   : sm90::forward<kHeadDim, DType::kFloat8E4M3>();
  };
  (offer.template operator()<kHeadDims>(), ...);
  if (kernel) return *kernel;
  throw NotImplemented("q: this build has FP8 attention for head dims that fit into one of " +
                       names(head_dims) + "; got head_dim " + std::to_string(params.q.head_dim) +
                       " and head_dim_v " + std::to_string(params.v.head_dim));
}
#endif

// Returns the kernel for q, k and v in e4m3.
ForwardKernel fp8_forward_kernel(const CudaDevice& device, const ForwardParams& params) {
  const std::string lacks = "quant_mode, or float8_e4m3fn: there is no FP8 attention ";
#if defined(HSTU_ATTN_SM90) && defined(HSTU_ATTN_DTYPE_E4M3)
  if (device.arch != 90) throw NotImplemented(lacks + "but on Hopper GPUs");
  if (params.paged.kv_cache && (params.rab.data || params.relative_bias)) {
    throw NotImplemented(lacks + "with both a kv_cache and a bias");
  }
  if (params.paged.kv_cache && params.q.head_dim % 16 != 0) {
    throw NotImplemented(lacks + "over pages but for head dims that are multiples of 16; got " +
                         std::to_string(params.q.head_dim));
  }
  if (const char* reason = sm90::unsupported_reason(device, params)) {
    throw NotImplemented(lacks + "with " + reason);
  }
  print_choice(params.paged.kv_cache ? "paged forward in e4m3" : "forward in e4m3", "sm90",
               nullptr);
  return find_fp8(Fp8HeadDims{}, params);
#else
  throw NotImplemented(lacks + "in this build: HSTU_ATTN_DTYPES or HSTU_ATTN_ARCHS left it out");
#endif
}

// Returns the backward whose products are in e4m3.
BackwardKernel e4m3_backward_kernel(const CudaDevice& device, const BackwardParams& params) {
  const std::string lacks = "backward_e4m3: there is no such backward ";
#if defined(HSTU_ATTN_SM90) && defined(HSTU_ATTN_DTYPE_E4M3)
  if (device.arch != 90) throw NotImplemented(lacks + "but on Hopper GPUs");
  if (params.rab.data || params.relative_bias) throw NotImplemented(lacks + "with a bias");
  const int head_dim = larger(params.q.head_dim, params.v.head_dim);
  if (head_dim <= 64) {
    throw NotImplemented(lacks + "but for head dims from 65 on; got head_dim " +
                         std::to_string(params.q.head_dim) + " and head_dim_v " +
                         std::to_string(params.v.head_dim));
  }
  if (const char* reason = sm90::backward_unsupported_reason(device, params)) {
    throw NotImplemented(lacks + "with " + reason);
  }
  print_choice("backward in e4m3", "sm90", nullptr);
  return find(Fp8BackwardHeadDims{}, params,
              []<int kHeadDim, DType kDType>() { return sm90::backward_e4m3<kHeadDim, kDType>(); });
#else
  throw NotImplemented(lacks + "in this build: HSTU_ATTN_DTYPES or HSTU_ATTN_ARCHS left it out");
#endif
}

}  // namespace

std::string describe_build() {
  int driver = 0;
  check_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  std::string archs;
#if defined(HSTU_ATTN_SM80)
  archs += " sm80";
#endif
#if defined(HSTU_ATTN_SM90)
  archs += " sm90";
#endif
#if defined(HSTU_ATTN_SM90) && defined(HSTU_ATTN_DTYPE_E4M3)
  const std::string fp8 = "sm90";
#else
  const std::string fp8 = "none";
#endif
  return "archs" + archs + "\ndtypes " + built_dtypes() + "\nfp8 " + fp8 + "\nhead_dims " +
         names(HeadDims{}) + "\nruntime " + std::to_string(CUDART_VERSION) + "\ndriver " +
         std::to_string(driver);
}

std::optional<DenseBias> faster_rab(const CudaDevice& device, const ForwardParams& params,
                                    bool is_backward) {
#if defined(HSTU_ATTN_SM90)
  if (device.arch != 90 || !sm90::unsupported_reason(device, params)) return std::nullopt;
  ForwardParams copied = params;
  copied.rab = sm90::aligned_copy(params.rab);
  if (!sm90::unsupported_reason(device, copied) &&
      sm90::gains_by_aligned_copy(params, is_backward)) {
    return copied.rab;
  }
#endif
  return std::nullopt;
}

ForwardKernel forward_kernel(const CudaLaunch& launch, const ForwardParams& params) {
  [[maybe_unused]] const CudaDevice& device = launch.device;
  if (params.dtype == DType::kFloat8E4M3) return fp8_forward_kernel(device, params);
  const char* pass = params.paged.kv_cache ? "paged forward" : "forward";
  const char* reason_for_sm80 = nullptr;
#if defined(HSTU_ATTN_SM90)
  if (device.arch == 90) {
    reason_for_sm80 = sm90::unsupported_reason(device, params);
    if (is_faster_by_sm80(launch, params)) reason_for_sm80 = kShortSequences;
    if (!reason_for_sm80) {
      print_choice(pass, "sm90", nullptr);
      if (params.paged.kv_cache) {
        return find(HeadDims{}, params, []<int kHeadDim, DType kDType>() {
          return sm90::paged_forward<kHeadDim, kDType>();
        });
      }
      return find(HeadDims{}, params,
                  []<int kHeadDim, DType kDType>() { return sm90::forward<kHeadDim, kDType>(); });
    }
  }
#endif
  print_choice(pass, "sm80", reason_for_sm80);
#if defined(HSTU_ATTN_SM80)
  if (params.paged.kv_cache) {
    return find(HeadDims{}, params, []<int kHeadDim, DType kDType>() {
      return sm80::paged_forward<kHeadDim, kDType>();
    });
  }
  return find(HeadDims{}, params,
              []<int kHeadDim, DType kDType>() { return sm80::forward<kHeadDim, kDType>(); });
#else
  throw NotImplemented(std::string("sm90: no kernel for ") +
                       (reason_for_sm80 ? reason_for_sm80 : "this GPU") +
                       ", and sm80 is not built");
#endif
}

BackwardKernel backward_kernel(const CudaLaunch& launch, const BackwardParams& params) {
  [[maybe_unused]] const CudaDevice& device = launch.device;
  if (params.backward_e4m3) return e4m3_backward_kernel(device, params);
  const char* reason_for_sm80 = nullptr;
#if defined(HSTU_ATTN_SM90)
  if (device.arch == 90) {
    reason_for_sm80 = sm90::backward_unsupported_reason(device, params);
    if (is_faster_by_sm80(launch, params)) reason_for_sm80 = kShortSequences;
    if (!reason_for_sm80) {
      print_choice("backward", "sm90", nullptr);
      return find(HeadDims{}, params,
                  []<int kHeadDim, DType kDType>() { return sm90::backward<kHeadDim, kDType>(); });
    }
  }
#endif
  print_choice("backward", "sm80", reason_for_sm80);
#if defined(HSTU_ATTN_SM80)
  return find(HeadDims{}, params,
              []<int kHeadDim, DType kDType>() { return sm80::backward<kHeadDim, kDType>(); });
#else
  throw NotImplemented(std::string("sm90: no backward for ") +
                       (reason_for_sm80 ? reason_for_sm80 : "this GPU") +
                       ", and sm80 is not built");
#endif
}

void launch_projection(const ProjectionParams& params, const CudaLaunch& launch) {
  const std::string lacks = "x: there is no FP8 linear map ";
#if defined(HSTU_ATTN_SM90) && defined(HSTU_ATTN_DTYPE_E4M3)
  // NOTE: there is no sm80 kernel that HSTU_ATTN_FORCE_ARCH could choose.
  if (launch.device.capability != 90) throw NotImplemented(lacks + "but on Hopper GPUs");
  sm90::ProjectionKernel kernel = nullptr;
  [[maybe_unused]] const auto offer = [&]<int kHeadDim>() {
    constexpr DType kDType = DType::kFloat8E4M3;
    if (params.residual) kernel = sm90::output_map<kHeadDim, kDType>();
    if (params.head_dim == kHeadDim) kernel = sm90::projection<kHeadDim, kDType>();
  };
  [&]<int... kHeadDims>(std::integer_sequence<int, kHeadDims...>) {
    (offer.template operator()<kHeadDims>(), ...);
  }(Fp8ProjectionHeadDims{});
  if (kernel) return kernel(params, launch);
  throw NotImplemented(lacks + "but for head dims " + names(Fp8ProjectionHeadDims{}) +
                       "; got head_dim " + std::to_string(params.head_dim));
#else
  throw NotImplemented(lacks + "in this build: HSTU_ATTN_DTYPES or HSTU_ATTN_ARCHS left it out");
#endif
}

}  // namespace hstu

#endif
