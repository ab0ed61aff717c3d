#include "../launch_forward.h"

namespace hstu::sm90 {

#if HSTU_ATTN_DTYPE_BF16
template ForwardKernel forward<128, DType::kBFloat16>();
template ForwardKernel paged_forward<128, DType::kBFloat16>();
#endif
#if HSTU_ATTN_DTYPE_FP16
template ForwardKernel forward<128, DType::kFloat16>();
template ForwardKernel paged_forward<128, DType::kFloat16>();
#endif

}  // namespace hstu::sm90
