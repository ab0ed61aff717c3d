// Quantizes the other inputs of a call with pages of e4m3: Q, and the targets' K and V.
#pragma once

#include "../dispatch.h"
#include "quantize.h"

namespace hstu {

struct PagedQuantizeParams {
  PackedTensor q;  // [total_q, H, D]
  PackedTensor k;  // [total_q, H, D]
  PackedTensor v;  // [total_q, H, D]
  int heads = 0;
  DType dtype = DType::kBFloat16;
  BatchParams batch;
  PagedParams paged;

  // Outputs, contiguous. D is rounded up to kQuantizedHeadDimUnit in codes.
  //
  // The descale of a row of q is its norm, so that codes of a row have a norm of at most 1.08,
  // and sums of products with codes of at most 448 fit into fp16. Such a code is about 1 / sqrt(D),
  // at least 2^-4, and e4m3 has all its bits down to 2^-6.
  uint8_t* q8 = nullptr;  // [total_q, H, D]
  // Rows of k8 and v8 that are not targets, and their descales, are not written.
  uint8_t* k8 = nullptr;           // [total_q, H, D]
  uint8_t* v8 = nullptr;           // [total_q, H, D]
  float* q_descale = nullptr;      // [H, total_q]
  float* k_descale = nullptr;      // [H, total_q]
  float* v_descale = nullptr;      // [H, total_q]
  float* page_scales = nullptr;    // [num_page_ids, 2, H, page_size], as in Fp8Params
  float* page_descales = nullptr;  // [num_page_ids, 2, H], likewise
};

// Launches the kernel. q, k and v must be aligned to 16 bytes, with strides that are multiples of 8
// elements. The next kernel may start early (common/launch.h). With `starts_early` this one does,
// too, and it ends after the kernel before, of which it reads nothing.
void quantize_paged_call(const PagedQuantizeParams& params, const CudaLaunch& launch,
                         bool starts_early);

}  // namespace hstu
