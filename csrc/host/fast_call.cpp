// `hstu_attn._host.fast_forward`: the forward operator as a Python function that goes straight to
// `_C`, past torch's binding and the dispatcher. See hstu_attn/fast_call.py for when it is used.
//
// Plain CPython in the call itself: pybind11's conversion of 38 arguments alone costs more than the
// rest. torch's tensors are read by DLPack's C exchange API, which torch publishes as a capsule.
#include "../api/fast_call.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

namespace py = pybind11;

namespace hstu {
namespace {

// As in dlpack.h, version 1. Of the functions, one is used.
struct ExchangeApi {
  uint32_t major, minor;
  const void* previous;
  void* allocate;
  void* from_object;
  void* to_object;
  int (*view_object)(void* object,
                     DLTensor* view);  // 0, or -1 with a Python exception; may be null
  void* current_stream;
};

constexpr size_t kMaxArguments = 48;

// An argument's type in the schema.
enum Kind : char {
  kTensor = 't',
  kOptionalTensor = 'o',
  kInt = 'i',
  kFloat = 'f',
  kBool = 'b',
};

// The caller holds the tensors of a call until it returns, so nothing here counts references to
// them.
class FastForward {
 public:
  FastForward(uintptr_t function, std::string kinds, const py::capsule& exchange_api,
              py::tuple tensor_types, py::tuple obstacles)
      : function_(reinterpret_cast<FastFunction>(function)),
        kinds_(std::move(kinds)),
        tensor_types_(std::move(tensor_types)),
        obstacles_(std::move(obstacles)) {
    const auto* api = static_cast<const ExchangeApi*>(exchange_api.get_pointer());
    if (api->major != 1 || !api->view_object) {
      throw std::invalid_argument("exchange_api: expected version 1 of DLPack's, with views; got " +
                                  std::to_string(api->major) + "." + std::to_string(api->minor));
    }
    // The last is the output, which is made here.
    if (kinds_.size() < 4 || kinds_.size() > kMaxArguments || kinds_.back() != kTensor) {
      throw std::invalid_argument("kinds: expected those of hstu_varlen_fwd_out, got " + kinds_);
    }
    view_object_ = api->view_object;
  }

  // The output, or NotImplemented where the operator must be called; null with an exception set.
  PyObject* call(PyObject* const* arguments, size_t count) const {
    for (const py::handle obstacle : obstacles_) {
      const int found = is_true(PyObject_CallNoArgs(obstacle.ptr()));
      if (found) return found < 0 ? nullptr : left_to_operator();
    }
    std::array<PyObject*, kMaxArguments> objects;
    if (!flatten(arguments, count, objects)) return left_to_operator();

    std::array<FastArgument, kMaxArguments> converted;
    std::array<DLTensor, kMaxArguments> tensors;
    const size_t out = kinds_.size() - 1;
    for (size_t n = 0; n < out; ++n) {
      if (!convert(objects[n], kinds_[n], tensors[n], converted[n])) {
        return PyErr_Occurred() ? nullptr : left_to_operator();
      }
    }
    // NOTE: q and v; what is no matrix of heads is for the operator to refuse.
    if (tensors[0].ndim != 3 || tensors[2].ndim != 3) return left_to_operator();
    const auto output =
        new_empty(objects[0], {tensors[0].shape[0], tensors[0].shape[1], tensors[2].shape[2]});
    if (!output) return nullptr;
    if (!convert(output.ptr(), kTensor, tensors[out], converted[out])) {
      return PyErr_Occurred() ? nullptr : left_to_operator();
    }

    FastCall call = {kFastCallVersion, converted.data(), nullptr};
    FastResult result;
    Py_BEGIN_ALLOW_THREADS;  // as torch does around its operators
    result = function_(&call);
    Py_END_ALLOW_THREADS;
    switch (result) {
      case FastResult::kDone:
        return output.inc_ref().ptr();
      case FastResult::kLeftToOperator:
        return left_to_operator();
      case FastResult::kValueError:
        PyErr_SetString(PyExc_ValueError, call.error);
        return nullptr;
      default:
        PyErr_SetString(PyExc_RuntimeError, call.error);
        return nullptr;
    }
  }

 private:
  static PyObject* left_to_operator() { return Py_NewRef(Py_NotImplemented); }

  // Of a new reference, which it takes; -1 with an exception set.
  static int is_true(PyObject* object) {
    if (!object) return -1;
    const int result = PyObject_IsTrue(object);
    Py_DECREF(object);
    return result;
  }

  // Arguments may come by themselves or in tuples.
  bool flatten(PyObject* const* arguments, size_t count,
               std::array<PyObject*, kMaxArguments>& objects) const {
    const size_t expected = kinds_.size() - 1;
    size_t found = 0;
    const auto append = [&](PyObject* const* items, size_t number) {
      if (number > expected - found) return false;
      std::copy_n(items, number, objects.begin() + found);
      found += number;
      return true;
    };
    for (size_t n = 0; n < count; ++n) {
      const bool is_tuple = PyTuple_Check(arguments[n]);
      const bool fits = is_tuple ? append(PySequence_Fast_ITEMS(arguments[n]),
                                          static_cast<size_t>(PyTuple_GET_SIZE(arguments[n])))
                                 : append(arguments + n, 1);
      if (!fits) return false;
    }
    return found == expected;
  }

  // False where only the operator knows what the argument is; with an exception set, for an error.
  bool convert(PyObject* object, char kind, DLTensor& tensor, FastArgument& argument) const {
    switch (kind) {
      case kOptionalTensor:
        if (object == Py_None) {
          argument.tensor = nullptr;
          return true;
        }
        [[fallthrough]];
      case kTensor:
        argument.tensor = &tensor;
        return view(object, tensor);
      case kInt: {
        int overflow = 0;
        if (!PyLong_CheckExact(object)) return false;
        argument.integer = PyLong_AsLongLongAndOverflow(object, &overflow);
        return overflow == 0;
      }
      case kFloat:
        if (!PyFloat_CheckExact(object) && !PyLong_CheckExact(object)) return false;
        argument.number = PyFloat_AsDouble(object);
        if (!PyErr_Occurred()) return true;
        PyErr_Clear();  // beyond a double
        return false;
      case kBool:
        argument.integer = object == Py_True;
        return PyBool_Check(object);
      default:
        return false;
    }
  }

  // Plain tensors alone: a subclass may give the operator another meaning.
  bool view(PyObject* object, DLTensor& tensor) const {
    const auto is_plain = [object](const py::handle type) {
      return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type.ptr();
    };
    if (std::none_of(tensor_types_.begin(), tensor_types_.end(), is_plain)) return false;
    if (view_object_(object, &tensor) != 0) {
      PyErr_Clear();  // such as a sparse tensor
      return false;
    }
    // NOTE: torch's lazy negation. It comes of complex numbers, of which bfloat16 has none.
    if (tensor.dtype.code == DLDataType::kFloat &&
        is_true(PyObject_CallMethodNoArgs(object, is_neg_.ptr()))) {
      return false;
    }
    // No memory: a zero of torch's own kind, or storage that was taken away.
    const bool is_empty = std::count(tensor.shape, tensor.shape + tensor.ndim, 0) > 0;
    return tensor.data != nullptr || is_empty;
  }

  py::object new_empty(PyObject* like, std::array<int64_t, 3> sizes) const {
    const std::array<py::int_, 3> numbers = {sizes[0], sizes[1], sizes[2]};
    PyObject* const arguments[] = {like, numbers[0].ptr(), numbers[1].ptr(), numbers[2].ptr()};
    return py::reinterpret_steal<py::object>(
        PyObject_VectorcallMethod(new_empty_.ptr(), arguments, 4, nullptr));
  }

  FastFunction function_;
  std::string kinds_;
  py::tuple tensor_types_, obstacles_;
  py::str is_neg_ = "is_neg", new_empty_ = "new_empty";
  int (*view_object_)(void* object, DLTensor* view) = nullptr;
};

constexpr char kName[] = "hstu_attn._host.FastForward";

PyObject* call_fast_forward(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  const auto* forward = static_cast<const FastForward*>(PyCapsule_GetPointer(self, kName));
  return forward ? forward->call(arguments, static_cast<size_t>(count)) : nullptr;
}

void destroy(PyObject* capsule) {
  delete static_cast<FastForward*>(PyCapsule_GetPointer(capsule, kName));
}

PyMethodDef kMethod = {
    "fast_forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call_fast_forward)),
    METH_FASTCALL, "The arguments of hstu_varlen_fwd, also in tuples; NotImplemented: call that."};

py::object make_fast_forward(uintptr_t function, std::string kinds, const py::capsule& exchange_api,
                             py::tuple tensor_types, py::tuple obstacles) {
  auto forward = std::make_unique<FastForward>(function, std::move(kinds), exchange_api,
                                               std::move(tensor_types), std::move(obstacles));
  const auto self = py::reinterpret_steal<py::object>(PyCapsule_New(forward.get(), kName, destroy));
  if (!self) throw py::error_already_set();
  forward.release();
  const auto callable = py::reinterpret_steal<py::object>(PyCFunction_New(&kMethod, self.ptr()));
  if (!callable) throw py::error_already_set();
  return callable;
}

}  // namespace

void bind_fast_call(py::module_& m) {
  m.def("make_fast_forward", &make_fast_forward, py::kw_only(), py::arg("function"),
        py::arg("kinds"), py::arg("exchange_api"), py::arg("tensor_types"), py::arg("obstacles"),
        "The forward operator as a function that does not go through the dispatcher.\n\n"
        "Args:\n"
        "    function: the address of the operator's C function (csrc/api/fast_call.h).\n"
        "    kinds: a letter for each argument of hstu_varlen_fwd_out: t, o, i, f or b.\n"
        "    exchange_api: torch.Tensor.__dlpack_c_exchange_api__.\n"
        "    tensor_types: the types of tensors that are taken.\n"
        "    obstacles: functions without arguments; the operator is to be called where one of\n"
        "        them returns what is true.");
}

}  // namespace hstu
