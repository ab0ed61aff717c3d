// Checks the arguments of linear_fp8 and project_fp8.
#include <climits>

#include "arguments.h"

namespace hstu {
namespace {

// Checks a contiguous tensor that TMA or vector loads read.
template <typename Element>
const Element* to_aligned(const char* name, const TensorView& tensor, const TensorView& x,
                          ScalarType dtype, const char* dtype_name,
                          std::initializer_list<int64_t> shape, const char* meaning) {
  check_device(name, tensor, x, "x");
  check_dtype(name, tensor, dtype, dtype_name);
  check_shape(name, tensor, shape, meaning);
  if (!tensor.is_contiguous()) fail(name, "a contiguous tensor", describe_strides(tensor));
  if (reinterpret_cast<uintptr_t>(tensor.data) % 16 != 0) {
    fail(name, "an address that is a multiple of 16", "another one");
  }
  return static_cast<const Element*>(tensor.data);
}

void check_multiple(const char* name, int64_t value, int64_t of, const std::string& expected) {
  if (value < 1 || value > INT_MAX || value % of != 0) fail(name, expected, std::to_string(value));
}

}  // namespace

void to_params(const ProjectionArguments& args, bool is_linear, ProjectionParams& params) {
  const TensorView &x = args.x, &weight = args.weight;
  if (x.dim() != 2) fail("x", "shape (total, depth)", describe_shape(x));
  if (weight.dim() != 2) fail("weight", "shape (columns, depth)", describe_shape(weight));
  const int64_t total = x.size(0), depth = x.size(1), columns = weight.size(0);
  check_range("x", total, 0, INT_MAX - 255, "less than 2^31 - 255 rows");
  check_multiple("x", depth, 16, "a depth that is a multiple of 16");
  const auto kE4m3 = ScalarType::Float8_e4m3fn, kFloat = ScalarType::Float;
  params.x8 =
      to_aligned<uint8_t>("x", x, x, kE4m3, "float8_e4m3fn", {total, depth}, "(total, depth)");
  params.x_descale = to_aligned<float>("x_descale", args.x_descale, x, kFloat, "float32",
                                       {total, 1}, "(total, 1)");
  params.weight8 = to_aligned<uint8_t>("weight", weight, x, kE4m3, "float8_e4m3fn",
                                       {columns, depth}, "(columns, depth)");
  params.weight_descale = to_aligned<float>("weight_descale", args.weight_descale, x, kFloat,
                                            "float32", {columns, 1}, "(columns, 1)");
  params.bias = to_aligned<float>("bias", args.bias, x, kFloat, "float32", {columns}, "(columns)");
  params.depth = static_cast<int>(depth);
  params.batch.total_q = params.batch.total_k = total;
  if (is_linear) {
    check_multiple("weight", columns, kProjectionColumns,
                   join("a multiple of ", kProjectionColumns, " columns"));
    params.residual = to_aligned<uint16_t>("residual", args.residual, x, ScalarType::BFloat16,
                                           "bfloat16", {total, columns}, "(total, columns)");
    params.columns = params.u_columns = params.z_columns = static_cast<int>(columns);
    return;
  }
  check_multiple("weight", columns, 4 * kProjectionColumns,
                 join("u, v, q and k with multiples of ", kProjectionColumns, " columns each"));
  params.columns = static_cast<int>(columns);
  params.u_columns = params.columns / 4;
  params.z_columns = args.keeps_z ? params.columns : params.u_columns;
  check_range("heads", args.heads, 1, params.u_columns, "at least one head");
  if (params.u_columns % args.heads != 0) {
    fail("heads", join("a divisor of ", params.u_columns, " columns"), std::to_string(args.heads));
  }
  params.heads = static_cast<int>(args.heads);
  params.head_dim = params.u_columns / params.heads;
  params.batch.cu_seqlens_q = params.batch.cu_seqlens_k =
      to_index_array("cu_seqlens", args.cu_seqlens, x, -1, "(batch + 1)", "x");
  const int64_t batch = args.cu_seqlens.size(0) - 1;
  check_range("cu_seqlens", batch, 0, kMaxProjectionSequences, "offsets of at most 1024 sequences");
  params.batch.batch = static_cast<int>(batch);
}

}  // namespace hstu
