// Operators of `_C` as plain C functions, which `_host` calls from Python without the dispatcher.
//
// The dispatcher, torch's Python binding and the boxed calls of the stable ABI cost a call of the
// forward's 38 arguments more host time than all that is behind them. Nothing but C passes between
// the two libraries: `_C` serves any torch and CPython, `_host` is built for one CPython.
#pragma once

#include <cstdint>

namespace hstu {

// ---------------------------------------------------------------------------------------- DLPack

// As in dlpack.h (https://dmlc.github.io/dlpack), version 1; those parts of it that are used here.
struct DLDevice {
  static constexpr int32_t kCpu = 1, kCuda = 2;
  int32_t type, index;
};

struct DLDataType {
  static constexpr uint8_t kInt = 0, kFloat = 2, kBfloat = 4, kFloat8E4m3fn = 10;
  uint8_t code, bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

// ----------------------------------------------------------------------------------------- calls

// By the argument's type in the schema; None is a null tensor, a bool an integer.
union FastArgument {
  const DLTensor* tensor;
  int64_t integer;
  double number;
};

constexpr int64_t kFastCallVersion = 2;

struct FastCall {
  int64_t version;
  const FastArgument* arguments;  // in the order of the schema
  const char* error;              // of what failed; until this thread's next call
};

enum class FastResult : int32_t {
  kDone,
  kLeftToOperator,  // nothing has been done; the operator may be able to, or say what is wrong
  kValueError,
  kRuntimeError
};

// Each is exported under a name of its own; see ops.cpp. The Python interpreter is not needed.
using FastFunction = FastResult (*)(FastCall* call);

}  // namespace hstu
