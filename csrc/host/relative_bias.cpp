// Python bindings of the search for time buckets and of the exact sums, for tests.
#include "../common/relative_bias.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../common/fixed_point.h"
#include "../common/table_sum.h"

namespace py = pybind11;

namespace hstu {
namespace {

// The buckets of a list of thresholds. It owns the arrays that a RelativeBias refers to.
class HostBuckets {
 public:
  HostBuckets(std::vector<int64_t> thresholds, int num_buckets)
      : thresholds_(std::move(thresholds)), cells_(kDifferenceCells) {
    if (num_buckets < 1) {
      throw std::invalid_argument("num_buckets: expected at least 1, got " +
                                  std::to_string(num_buckets));
    }
    bias_.time.size = num_buckets;
    bias_.thresholds = thresholds_.data();
    bias_.num_thresholds = static_cast<int>(thresholds_.size());
    for (int cell = 0; cell < kDifferenceCells; ++cell) {
      cells_[cell] = find_bucket_cell(bias_, cell);
    }
    bias_.prepared.cells = cells_.data();
  }
  HostBuckets(const HostBuckets&) = delete;

  int bucket(int64_t row_time, int64_t key_time) const {
    return bucket_of(bias_, time_difference(row_time, key_time));
  }
  std::pair<int, int> range(std::pair<int64_t, int64_t> rows,
                            std::pair<int64_t, int64_t> keys) const {
    const BucketRange range =
        find_bucket_range(bias_, {rows.first, rows.second}, {keys.first, keys.second});
    return {range.first, range.last};
  }

 private:
  std::vector<int64_t> thresholds_;
  std::vector<BucketCell> cells_;
  RelativeBias bias_;
};

// Returns the sum that a TableSum gives for `values`, each of them added `count` times.
double table_sum(const std::vector<float>& values, int64_t count) {
  int64_t words[TableSum::kWords] = {};
  for (const float value : values) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const TableSum::Term term = TableSum::term_of(bits);
    words[term.word] += term.addend * count;
  }
  TableSum sum;
  sum.words = words;
  sum.entries = 1;
  return sum.value(0);
}

// Returns two sums of `values` (bf16 or fp16 numbers) in fixed point, scaled for the largest of
// them: the sum of the converted numbers, and their converted fp32 sum.
std::pair<double, double> fixed_point_sums(const std::vector<float>& values) {
  uint32_t largest = 0;
  float total = 0;
  for (const float value : values) {
    const float magnitude = std::fabs(value);
    uint32_t bits;
    std::memcpy(&bits, &magnitude, sizeof(bits));
    if (bits > largest) largest = bits;
    total += value;
  }
  const FixedPoint fixed = FixedPoint::of_largest(largest);
  int sum = 0;
  for (const float value : values) {
    if (__builtin_add_overflow(sum, fixed.small_to_integer(value), &sum)) {
      throw std::overflow_error("values: the sum of integers overflows");
    }
  }
  return {fixed.to_float(sum), fixed.to_float(fixed.to_integer(total))};
}

}  // namespace

void bind_relative_bias(py::module_& m) {
  py::class_<HostBuckets>(m, "Buckets", "Buckets of time differences (common/relative_bias.h).")
      .def(py::init<std::vector<int64_t>, int>(), py::arg("thresholds"), py::arg("num_buckets"))
      .def("bucket", &HostBuckets::bucket, py::arg("row_time"), py::arg("key_time"),
           "the bucket of a row and a key")
      .def("range", &HostBuckets::range, py::arg("rows"), py::arg("keys"),
           "(first, last) bucket of rows and keys, each with times (earliest, latest)");
  m.def("table_sum", &table_sum, py::arg("values"), py::arg("count") = 1,
        "the exact sum of fp32 values, each `count` times, in fp64 (common/table_sum.h)");
  m.def("fixed_point_sums", &fixed_point_sums, py::arg("values"),
        "the sum of bf16 or fp16 values in fixed point, of each value and of their fp32 sum "
        "(common/fixed_point.h)");
}

}  // namespace hstu
