#include "../launch_backward.h"

namespace hstu::sm90 {

#if HSTU_ATTN_DTYPE_BF16
template BackwardKernel backward<256, DType::kBFloat16>();
#endif
#if HSTU_ATTN_DTYPE_FP16
template BackwardKernel backward<256, DType::kFloat16>();
#endif

}  // namespace hstu::sm90
