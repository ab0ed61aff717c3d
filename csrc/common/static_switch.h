// Turns run-time conditions into template arguments.
#pragma once

#include <type_traits>

#include "macros.h"

namespace hstu {

// Returns use(std::true_type()) or use(std::false_type()):
//
//   bool_switch(params.deterministic, [&](auto is_deterministic) {
//     return run<Kernel<is_deterministic>>(params);
//   });
#if defined(__CUDACC__)
#pragma nv_exec_check_disable  // `use` may be for the host or for the device alone
#endif
template <typename Use>
HSTU_HOST_DEVICE auto bool_switch(bool condition, Use use) {
  return condition ? use(std::true_type()) : use(std::false_type());
}

}  // namespace hstu
