// The exception for calls for which a build or a GPU has no kernel.
#pragma once

#include <stdexcept>
#include <string>

namespace hstu {

// NOTE: torch's stable ABI turns this exception into a RuntimeError of the same text, which
// hstu_attn/ops.py turns into a NotImplementedError.
struct NotImplemented : std::runtime_error {
  explicit NotImplemented(const std::string& text)
      : std::runtime_error("NotImplementedError: " + text) {}
};

}  // namespace hstu
