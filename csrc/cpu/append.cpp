// append_paged_kv on the CPU: writes new keys and values into the pages of a cache.
#include "../paged/append.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace hstu {
namespace {

// Quantizes one row of one head to e4m3, with one scale.
template <typename T>
void quantize(const T* from, int count, c10::Float8_e4m3fn* to, float* scale) {
  float largest = 0.0f;
  for (int d = 0; d < count; ++d) {
    const float x = static_cast<float>(from[d]);
    if (is_finite(x)) largest = std::max(largest, std::fabs(x));
  }
  *scale = e4m3_scale(largest);
  for (int d = 0; d < count; ++d) {
    const float x = static_cast<float>(from[d]);
    to[d] = is_finite(x) ? std::clamp(x / *scale, -kLargestE4m3, kLargestE4m3)
                         : std::numeric_limits<float>::quiet_NaN();
  }
}

// Calls write(from, to, scale) for K and V of each row and head that has a slot in the pages: with
// the head's first element in the tensor and in the cache, and its scale, or null without scales.
template <typename Write>
void for_each_row(const AppendParams& params, int cache_element_bytes, Write write) {
  const PagedParams& paged = params.paged;
  auto* const cache = static_cast<char*>(const_cast<void*>(paged.kv_cache));
  auto* const scales = const_cast<float*>(paged.scales);
  for (int64_t row = 0; row < params.batch.total_q; ++row) {
    const Slot slot = find_slot(params, row);
    for (int head = 0; slot.element >= 0 && head < params.heads; ++head) {
      for (int part = 0; part < 2; ++part) {
        const PackedTensor& tensor = part ? params.v : params.k;
        const int64_t element = slot.element + part * paged.kv_stride + head * paged.head_stride;
        write(static_cast<const char*>(tensor.data) +
                  (row * tensor.row_stride + head * tensor.head_stride) * params.element_bytes,
              cache + element * cache_element_bytes,
              scales ? scales + slot.scale + part * paged.scale_kv_stride + head : nullptr);
      }
    }
  }
}

template <typename T>
void append_quantized(const AppendParams& params) {
  for_each_row(params, 1, [&](const char* from, char* to, float* scale) {
    quantize(reinterpret_cast<const T*>(from), params.k.head_dim,
             reinterpret_cast<c10::Float8_e4m3fn*>(to), scale);
  });
}

}  // namespace

void append_on_cpu(const AppendParams& params) {
  if (!params.paged.scales) {
    const size_t bytes = size_t(params.k.head_dim) * params.element_bytes;
    return for_each_row(params, params.element_bytes,
                        [&](const char* from, char* to, float*) { std::memcpy(to, from, bytes); });
  }
  switch (params.dtype) {
    case DType::kFloat32:
      return append_quantized<float>(params);
    case DType::kBFloat16:
      return append_quantized<c10::BFloat16>(params);
    case DType::kFloat16:
      return append_quantized<c10::Half>(params);
    case DType::kFloat64:
      return append_quantized<double>(params);
    case DType::kFloat8E4M3:
      break;
  }
}

}  // namespace hstu
