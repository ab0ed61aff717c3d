// `hstu_attn._host`: Python bindings of the host code: masks, schedules, split-KV plans and the
// arithmetic of the relative bias, so that what the kernels use is tested on a machine without a
// GPU, and what serving needs in C++.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "../cpu/schedule.h"
#include "../sm90/split_heuristic.h"

namespace py = pybind11;

namespace hstu {
namespace {

using Spans = std::vector<std::vector<int32_t>>;
using Pairs = std::vector<std::pair<int, int>>;

template <int kCapacity>
Pairs to_pairs(const IntervalList<kCapacity>& list) {
  Pairs pairs;
  for (int n = 0; n < list.count; ++n)
    pairs.emplace_back(list.interval[n].begin, list.interval[n].end);
  return pairs;
}

std::vector<int32_t> flatten(const Spans& rows, const char* name, size_t width) {
  std::vector<int32_t> flat;
  for (const std::vector<int32_t>& row : rows) {
    if (row.size() != width) {
      throw std::invalid_argument(std::string(name) + ": expected " + std::to_string(width) +
                                  " values in each row, got " + std::to_string(row.size()));
    }
    flat.insert(flat.end(), row.begin(), row.end());
  }
  return flat;
}

// The mask of one sequence. It owns the arrays that a Mask refers to.
class HostMask {
 public:
  HostMask(int q_len, int k_len, int num_contexts, int num_targets, int target_group_size,
           std::pair<int, int> window_size, int min_full_attn_seq_len,
           const std::optional<Spans>& row_spans, const std::optional<Spans>& func,
           bool func_causal)
      : offsets_q_{0, q_len}, offsets_k_{0, k_len}, contexts_(num_contexts), targets_(num_targets) {
    BatchParams batch;
    batch.batch = 1;
    batch.total_q = q_len;
    batch.total_k = k_len;
    batch.cu_seqlens_q = {offsets_q_, false};
    batch.cu_seqlens_k = {offsets_k_, false};
    batch.num_contexts = {&contexts_, false};
    batch.num_targets = {&targets_, false};
    sequence_ = load_sequence(batch, 0);
    // load_sequence() leaves out the rows in front of the first key. This puts them back, since a
    // mask is defined for them, too.
    sequence_.q_begin = 0;
    sequence_.q_len = q_len;
    sequence_.offset = k_len - q_len;

    MaskParams params;
    params.window_left = window_size.first;
    params.window_right = window_size.second;
    params.min_full_attn_seq_len = min_full_attn_seq_len;
    params.target_group_size = target_group_size;
    if (row_spans) {
      values_ = flatten(*row_spans, "row_spans", 4);
      params.row_spans = values_.data();
      params.row_spans_row_stride = 4;
    }
    if (func) {
      const size_t rows = func->empty() ? 0 : func->front().size();
      values_ = flatten(*func, "func", rows);
      params.func = values_.data();
      params.func_length = static_cast<int>(func->size());
      params.func_entry_stride = static_cast<int64_t>(rows);
      params.func_causal = func_causal;
    }
    mask_ = std::make_unique<Mask>(params, sequence_, 0);
  }

  std::tuple<int, int, int, int> row(int r) const {
    const RowSpan span = mask_->row(r);
    return {span.a0, span.a1, span.b0, span.b1};
  }
  uint64_t row_bits(int r, int k0) const { return mask_->row_bits(r, k0); }
  Pairs kv_intervals(int r0, int r1) const { return to_pairs(mask_->kv_intervals(r0, r1)); }
  Pairs q_intervals(int k0, int k1) const { return to_pairs(mask_->q_intervals(k0, k1)); }
  int classify(int r0, int r1, int k0, int k1) const {
    return static_cast<int>(mask_->classify(r0, r1, k0, k1));
  }
  int classify_by_summary(int r0, int r1, int k0, int k1) const {
    SpanSummary summary;
    if (mask_->arbitrary()) {
      for (int r = r0; r < r1; ++r) summary.add(mask_->summarize(r));
    } else {
      summary.set_hull(mask_->kv_intervals(r0, r1));
      mask_->fully_visible(r0, r1, summary.fully_visible);
    }
    return static_cast<int>(summary.classify(k0, k1));
  }
  // These return ranges of key tiles that row tile m may see, and of row tiles that may see key
  // tile n.
  Pairs kv_tiles(int m, int tile_rows, int tile_keys) const {
    const int r1 = std::min((m + 1) * tile_rows, sequence_.q_len);
    return to_pairs(tiles(mask_->kv_intervals(m * tile_rows, r1), tile_keys));
  }
  Pairs q_tiles(int n, int tile_rows, int tile_keys) const {
    return to_pairs(tiles(mask_->q_intervals(n * tile_keys, (n + 1) * tile_keys), tile_rows));
  }

 private:
  int32_t offsets_q_[2];
  int32_t offsets_k_[2];
  int32_t contexts_;
  int32_t targets_;
  std::vector<int32_t> values_;
  Sequence sequence_;
  std::unique_ptr<Mask> mask_;
};

std::vector<WorkTile> schedule(bool backward, const std::vector<int64_t>& cu_seqlens_q,
                               const std::vector<int64_t>& cu_seqlens_k,
                               std::pair<int, int> window_size, int heads, int heads_per_work_tile,
                               int tile_rows, int tile_keys, int chunk) {
  if (cu_seqlens_q.empty() || cu_seqlens_q.size() != cu_seqlens_k.size()) {
    throw std::invalid_argument(
        "cu_seqlens_k: expected as many offsets as cu_seqlens_q, at least 1");
  }
  BatchParams batch;
  batch.batch = static_cast<int>(cu_seqlens_q.size()) - 1;
  batch.total_q = cu_seqlens_q.back();
  batch.total_k = cu_seqlens_k.back();
  batch.cu_seqlens_q = {cu_seqlens_q.data(), true};
  batch.cu_seqlens_k = {cu_seqlens_k.data(), true};
  MaskParams mask;
  mask.window_left = window_size.first;
  mask.window_right = window_size.second;
  const ScheduleConfig config = {heads, heads_per_work_tile, tile_rows, tile_keys, chunk};
  return backward ? backward_schedule(batch, mask, config) : forward_schedule(batch, mask, config);
}

// Returns (reduction, num_splits, keys_per_split): see csrc/sm90/split_heuristic.h.
std::tuple<std::string, int, int> plan_split_kv(int64_t row_tiles, int64_t key_tiles, int tile_keys,
                                                int head_dim, int64_t blocks,
                                                decltype(sm90::SplitKVShape::clusters) clusters) {
  if (blocks < 1) {
    throw std::invalid_argument("blocks: expected at least 1, got " + std::to_string(blocks));
  }
  const SplitKVPlan plan =
      sm90::plan_split_kv({row_tiles, key_tiles, tile_keys, head_dim, blocks, clusters});
  const char* const names[] = {"none", "cluster", "global memory"};
  return {names[static_cast<int>(plan.reduction)], plan.num_splits, plan.keys_per_split};
}

}  // namespace

void bind_memory_holder(py::module_& m);  // memory_holder.cpp
void bind_page_table(py::module_& m);     // page_table.cpp
void bind_relative_bias(py::module_& m);  // relative_bias.cpp

}  // namespace hstu

PYBIND11_MODULE(_host, m) {
  using namespace hstu;
  m.doc() = "Masks and schedules, as the kernels compute them; parts of serving.";
  bind_memory_holder(m);
  bind_page_table(m);
  bind_relative_bias(m);

  py::class_<HostMask>(m, "Mask", "What each row of one sequence may see (csrc/common/mask.h).")
      .def(py::init<int, int, int, int, int, std::pair<int, int>, int, const std::optional<Spans>&,
                    const std::optional<Spans>&, bool>(),
           py::arg("q_len"), py::arg("k_len"), py::kw_only(), py::arg("num_contexts") = 0,
           py::arg("num_targets") = 0, py::arg("target_group_size") = 1,
           py::arg("window_size") = std::pair(-1, -1), py::arg("min_full_attn_seq_len") = 0,
           py::arg("row_spans") = py::none(), py::arg("func") = py::none(),
           py::arg("func_causal") = false)
      .def("row", &HostMask::row, py::arg("r"), "(a0, a1, b0, b1) of query row r")
      .def("row_bits", &HostMask::row_bits, py::arg("r"), py::arg("k0"),
           "bit n: row r sees key k0 + n, n < 64")
      .def("kv_intervals", &HostMask::kv_intervals, py::arg("r0"), py::arg("r1"),
           "keys that some row of [r0, r1) sees")
      .def("q_intervals", &HostMask::q_intervals, py::arg("k0"), py::arg("k1"),
           "rows that see some key of [k0, k1)")
      .def("classify", &HostMask::classify, py::arg("r0"), py::arg("r1"), py::arg("k0"),
           py::arg("k1"),
           "0 where no row of [r0, r1) sees a key of [k0, k1), 2 where all see all, else 1")
      .def("classify_by_summary", &HostMask::classify_by_summary, py::arg("r0"), py::arg("r1"),
           py::arg("k0"), py::arg("k1"), "the same from a summary of the rows; may say 1 instead")
      .def("kv_tiles", &HostMask::kv_tiles, py::arg("m"), py::arg("tile_rows"),
           py::arg("tile_keys"), "ranges of key tiles that row tile m may see")
      .def("q_tiles", &HostMask::q_tiles, py::arg("n"), py::arg("tile_rows"), py::arg("tile_keys"),
           "ranges of row tiles that may see key tile n");

  py::class_<WorkTile>(m, "WorkTile", "A chunk of rows (forward) or keys (backward) of one head.")
      .def_readonly("sequence", &WorkTile::sequence)
      .def_readonly("head", &WorkTile::head)
      .def_readonly("begin", &WorkTile::begin)
      .def_readonly("end", &WorkTile::end)
      .def_readonly("cost", &WorkTile::cost);

  m.def("schedule", &schedule, py::kw_only(), py::arg("backward"), py::arg("cu_seqlens_q"),
        py::arg("cu_seqlens_k"), py::arg("window_size") = std::pair(-1, -1), py::arg("heads") = 1,
        py::arg("heads_per_work_tile") = 1, py::arg("tile_rows") = 64, py::arg("tile_keys") = 64,
        py::arg("chunk") = 512, "The work tiles of a call on the CPU, in the order of work.");

  m.def("plan_split_kv", &plan_split_kv, py::kw_only(), py::arg("row_tiles"), py::arg("key_tiles"),
        py::arg("tile_keys") = 128, py::arg("head_dim") = 128, py::arg("blocks") = 132,
        py::arg("clusters") = decltype(sm90::SplitKVShape::clusters){},
        "(reduction, num_splits, keys_per_split) of a paged forward on sm90.");
}
