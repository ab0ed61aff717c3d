// The composition is in Python, where torch's functions are called by names that every version has;
// torch's stable ABI has few of them. The operators call it, so that their schemas, fake kernels
// and gradients serve these calls, too, also when they are compiled or exported. A switch in Python
// in front of the operators would not do that.
#include "composed.h"

#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "../common/not_implemented.h"
#include "../environment.h"
#include "stable_tensor.h"

// NOTE: torch 2.13 and later have this function; older versions print the text of an exception.
extern "C" [[gnu::weak]] const char* torch_exception_get_what_without_backtrace();

namespace hstu {
namespace {

// Writes the arguments of a call through the dispatcher, in the order of the schema.
class StackWriter {
 public:
  void write(const TensorView& tensor) { put(as_tensor(tensor)); }
  void write(const OptionalView& tensor) {
    put(tensor ? std::optional<Tensor>(as_tensor(*tensor)) : std::nullopt);
  }
  template <typename Number>
  void write(const Number& number) {
    put(number);
  }

  // Calls the operator, which returns whether it has computed anything. `pass` is what it computes,
  // `what_needs_it` the argument for which there is no kernel.
  void call(const char* name, const char* pass, const std::string& what_needs_it) {
    if (environment::prints_choice()) {
      std::fprintf(stderr, "hstu_attn: %s by torch's functions\n", pass);
    }
    if (torch_call_dispatcher(name, "", stack_.data(), TORCH_ABI_VERSION) != TORCH_SUCCESS) {
      const auto what = torch_exception_get_what_without_backtrace;
      throw std::runtime_error(std::string(name) + ": " + (what ? what() : "failed, as printed"));
    }
    if (torch::stable::detail::to<bool>(stack_[0])) return;
    throw NotImplemented(what_needs_it +
                         " is computed by Python's hstu_attn, which this program does not import");
  }

 private:
  template <typename T>
  void put(const T& value) {
    stack_.push_back(torch::stable::detail::from(value));
  }

  std::vector<StableIValue> stack_;
};

}  // namespace

namespace {

std::string reason(const Arguments& args) {
  if (args.backward_e4m3) return "backward_e4m3: on a CPU e4m3";
  if (args.quant_mode >= 0) return "quant_mode: on a CPU e4m3";
  return "q: on a GPU " + describe_dtype(args.q);
}

}  // namespace

void composed_forward(const Arguments& args, const TensorView& out) {
  StackWriter stack;
  args.for_each([&stack](const auto& value) { stack.write(value); }, true);
  stack.write(out);
  stack.call("hstu_attn::composed_fwd", args.kv_cache ? "paged forward" : "forward", reason(args));
}

void composed_backward(const Arguments& args, const TensorView& dout, const Gradients& gradients) {
  StackWriter stack;
  stack.write(dout);
  args.for_each([&stack](const auto& value) { stack.write(value); }, false);
  gradients.for_each([&stack](const auto& gradient) { stack.write(gradient); });
  stack.call("hstu_attn::composed_bwd", "backward", reason(args));
}

void composed_quantize(const QuantizeArguments& args, const QuantizeOutputs& outputs) {
  StackWriter stack;
  args.for_each([&stack](const auto& value) { stack.write(value); });
  outputs.for_each([&stack](const auto& output) { stack.write(output); });
  stack.call("hstu_attn::composed_quantize", "quantize_qkv", "q: on a CPU quantize_qkv");
}

}  // namespace hstu
