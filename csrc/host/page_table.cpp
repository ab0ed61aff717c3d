// `hstu_attn._host.PageTable`: the Python binding of serving/page_table.h. Arrays of a whole batch
// are passed, so that a step costs one call.
#include "../serving/page_table.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

namespace py = pybind11;

namespace hstu {
namespace {

using Int64s = py::array_t<int64_t, py::array::c_style>;
using Int32s = py::array_t<int32_t, py::array::c_style>;
using NoGil = py::call_guard<py::gil_scoped_release>;

const int64_t* values_of(const Int64s& array, const char* name, const Int64s& users) {
  if (array.ndim() != 1 || array.size() != users.size()) {
    throw std::invalid_argument(std::string(name) + ": expected " + std::to_string(users.size()) +
                                " values, one for each user, got " + std::to_string(array.size()));
  }
  return array.data();
}

// Returns the step's number, its tables one after the other in one array, and their lengths.
std::tuple<int64_t, Int32s, std::array<int64_t, 5>> begin(PageTable& table, const Int64s& users,
                                                          const Int64s& new_tokens,
                                                          const std::optional<Int64s>& cached_lens,
                                                          const std::optional<Int64s>& rewritten) {
  const int64_t batch = users.size();
  const int64_t* ids = values_of(users, "users", users);
  const int64_t* tokens = values_of(new_tokens, "new_tokens", users);
  const int64_t* cached = cached_lens ? values_of(*cached_lens, "cached_lens", users) : nullptr;
  const int64_t* again = rewritten ? values_of(*rewritten, "rewritten", users) : nullptr;
  StepSize size;
  {
    const py::gil_scoped_release no_gil;
    size = table.begin(ids, tokens, cached, again, batch);
  }
  try {
    const std::array<int64_t, 5> lengths = {batch + 1, size.pages, batch, batch, size.tokens};
    Int32s tables(3 * batch + 1 + size.pages + size.tokens);
    StepTables out;
    out.page_offsets = tables.mutable_data();
    out.page_ids = out.page_offsets + lengths[0];
    out.last_page_lens = out.page_ids + lengths[1];
    out.cached_lens = out.last_page_lens + lengths[2];
    out.slots = out.cached_lens + lengths[3];
    {
      const py::gil_scoped_release no_gil;
      table.write_tables(size.step, out);
    }
    return {size.step, tables, lengths};
  } catch (...) {
    table.cancel(size.step);  // the caller does not learn of the step, so nothing copies its pages
    throw;
  }
}

Int32s lookup(const PageTable& table, const Int64s& users) {
  Int32s lengths(users.size());
  const int64_t* ids = values_of(users, "users", users);
  int32_t* out = lengths.mutable_data();
  const py::gil_scoped_release no_gil;
  table.lookup(ids, users.size(), out);
  return lengths;
}

void free_users(PageTable& table, const Int64s& users) {
  const int64_t* ids = values_of(users, "users", users);
  const py::gil_scoped_release no_gil;
  table.free(ids, users.size());
}

// Returns (2, pages): the pages on the device, then those on the host.
py::array_t<int64_t> to_array(const PageMoves& moves) {
  const py::ssize_t pages = static_cast<py::ssize_t>(moves.device.size());
  py::array_t<int64_t> array({py::ssize_t{2}, pages});
  std::copy(moves.device.begin(), moves.device.end(), array.mutable_data());
  std::copy(moves.host.begin(), moves.host.end(), array.mutable_data() + pages);
  return array;
}

py::tuple moves(const PageTable& table, int64_t step) {
  const auto [evicted, returned] = table.moves(step);
  return py::make_tuple(to_array(evicted), to_array(returned));
}

py::dict stats(const PageTable& table) {
  const PageTableStats stats = table.stats();
  using namespace py::literals;
  return py::dict("free_pages"_a = stats.free_pages, "used_pages"_a = stats.used_pages,
                  "pinned_pages"_a = stats.pinned_pages, "users"_a = stats.users,
                  "hits"_a = stats.hits, "misses"_a = stats.misses, "evictions"_a = stats.evictions,
                  "free_host_pages"_a = stats.free_host_pages,
                  "used_host_pages"_a = stats.used_host_pages, "host_users"_a = stats.host_users,
                  "returning_users"_a = stats.returning_users, "host_hits"_a = stats.host_hits,
                  "losses"_a = stats.losses, "pages_to_host"_a = stats.pages_to_host,
                  "pages_from_host"_a = stats.pages_from_host);
}

}  // namespace

void bind_page_table(py::module_& m) {
  py::register_exception<OutOfPages>(m, "OutOfPagesError", PyExc_RuntimeError);

  py::class_<PageTable>(m, "PageTable", "Users to pages of a KV cache (csrc/serving/page_table.h).")
      .def(py::init([](int64_t num_pages, int64_t page_size, bool evict, int64_t host_pages) {
             return std::make_unique<PageTable>(
                 PageTableConfig{num_pages, page_size, evict, host_pages});
           }),
           py::arg("num_pages"), py::arg("page_size"), py::kw_only(), py::arg("evict") = true,
           py::arg("host_pages") = 0)
      .def("begin", &begin, py::arg("users"), py::arg("new_tokens"),
           py::arg("cached_lens") = py::none(), py::arg("rewritten") = py::none(),
           "opens a step: its number, then page_offsets, page_ids, last_page_lens, cached_lens and "
           "slots in one array, and the length of each")
      .def("moves", &moves, py::arg("step"),
           "pages to copy to the host, and back: of each the pages on the device and on the host")
      .def("release", &PageTable::release, py::arg("step"), NoGil(),
           "closes a step and keeps its tokens")
      .def("roll_back", &PageTable::roll_back, py::arg("step"), NoGil(),
           "closes a step and drops its tokens")
      .def("cancel", &PageTable::cancel, py::arg("step"), NoGil(),
           "closes a step whose pages could not be copied; drops its tokens and whom it evicted")
      .def("lookup", &lookup, py::arg("users"), "tokens of each user, 0 for an unknown one")
      .def("pages", &PageTable::pages, py::arg("user"), NoGil(),
           "a user's pages on the device, in order")
      .def("host_pages", &PageTable::host_pages, py::arg("user"), NoGil(),
           "a user's pages on the host, in order")
      .def("free", &free_users, py::arg("users"), "forgets users")
      .def("clear", &PageTable::clear, NoGil(), "forgets all users")
      .def("stats", &stats, "counts of pages, users and what became of them");
}

}  // namespace hstu
