// Turns run-time conditions into template arguments.
#pragma once

#include <type_traits>

namespace hstu {

// Returns use(std::true_type()) or use(std::false_type()):
//
//   bool_switch(params.deterministic, [&](auto is_deterministic) {
//     return run<Kernel<is_deterministic>>(params);
//   });
template <typename Use>
auto bool_switch(bool condition, Use use) {
  return condition ? use(std::true_type()) : use(std::false_type());
}

}  // namespace hstu
