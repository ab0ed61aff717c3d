// The exception for what a build or a GPU has no kernel for.
#pragma once

#include <stdexcept>
#include <string>

namespace hstu {

// NOTE: torch's stable ABI turns it into a RuntimeError of the same text, and hstu_attn/ops.py that
// into a NotImplementedError.
struct NotImplemented : std::runtime_error {
  explicit NotImplemented(const std::string& text)
      : std::runtime_error("NotImplementedError: " + text) {}
};

}  // namespace hstu
