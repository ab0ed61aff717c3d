#include "runner.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "select.h"

namespace hstu::cpu {
namespace {

struct FreeMemory {
  void operator()(void* p) const { std::free(p); }
};

template <typename T>
using Memory = std::unique_ptr<T[], FreeMemory>;

// Allocates uninitialized memory, aligned to cache lines.
template <typename T>
Memory<T> allocate(int64_t count) {
  const int64_t bytes = round_up(count * static_cast<int64_t>(sizeof(T)), 64);
  void* p = std::aligned_alloc(64, bytes > 0 ? bytes : 64);
  if (!p) throw std::bad_alloc();
  return Memory<T>(static_cast<T*>(p));
}

// Divides the list into parts, which threads take one by one. Returns where each part begins, and
// the end of the list. Neighbors in the list are the heads of the same rows, which share pages of
// memory: they are one part if their cost is at most half of what each thread still has to do on
// average; else each work tile is a part.
std::vector<size_t> divide(const std::vector<WorkTile>& work_tiles, int heads, int threads) {
  int64_t left = 0;
  for (const WorkTile& work_tile : work_tiles) left += work_tile.cost;
  std::vector<size_t> begins;
  for (size_t n = 0; n < work_tiles.size();) {
    const int64_t all_heads = work_tiles[n].cost * heads;
    const int taken = n % heads == 0 && 2 * threads * all_heads <= left ? heads : 1;
    begins.push_back(n);
    left -= taken * work_tiles[n].cost;
    n += taken;
  }
  begins.push_back(work_tiles.size());
  return begins;
}

// Runs the work tiles on all threads. Each `heads` work tiles in a row of the list have the same
// rows.
template <typename Work>
void run_work_tiles(const Kernel& kernel, const std::vector<WorkTile>& work_tiles, int heads,
                    int64_t scratch_bytes, const Parallel& parallel, Work work) {
  std::atomic<size_t> next{0};
  const int threads = std::min<int64_t>(parallel.threads, work_tiles.size());
  const std::vector<size_t> begins = divide(work_tiles, heads, threads);
  const size_t parts = begins.size() - 1;
  const auto worker = [&](int) {
    size_t part = next.fetch_add(1);
    if (part >= parts) return;
    const Memory<char> scratch = allocate<char>(scratch_bytes);
    kernel.begin_thread();
    for (; part < parts; part = next.fetch_add(1)) {
      for (size_t n = begins[part]; n < begins[part + 1]; ++n) work(n, scratch.get());
    }
    kernel.end_thread();
  };
  if (threads == 1) {
    worker(0);
  } else if (threads > 1) {
    parallel.run(threads, worker);
  }
}

int element_size(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kBFloat16:
      return 2;
    case DType::kFloat16:
      return 2;
    case DType::kFloat64:
      return 8;
    case DType::kFloat8E4M3:
      break;
  }
  return 0;
}

// Asks the system for huge pages for an output: its pages may not exist yet, and a page fault for
// each of them can take as long as the computation.
void expect_writes(const PackedTensor& tensor, const ForwardParams& params, int64_t rows) {
#if defined(__linux__)
  constexpr uintptr_t kHugePage = 2 << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(tensor.data);
  const uintptr_t end = begin + rows * tensor.row_stride * element_size(params.dtype);
  const uintptr_t first = round_up(begin, kHugePage);
  const uintptr_t last = end / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

void zero_rows(const PackedTensor& tensor, DType dtype, int heads, int64_t begin, int64_t end) {
  const int64_t size = element_size(dtype);
  char* data = static_cast<char*>(tensor.data);
  for (int64_t row = begin; row < end; ++row) {
    for (int head = 0; head < heads; ++head) {
      std::memset(data + (row * tensor.row_stride + head * tensor.head_stride) * size, 0,
                  tensor.head_dim * size);
    }
  }
}

// Zeroes the rows that belong to no sequence or are past a sequence's used length.
void zero_unused_rows(const PackedTensor& tensor, const ForwardParams& params, bool keys) {
  int64_t covered = 0;
  for (int b = 0; b < params.batch.batch; ++b) {
    const Sequence sequence = load_sequence(params.batch, b);
    const int64_t begin = keys ? sequence.k_begin : sequence.q_begin;
    zero_rows(tensor, params.dtype, params.heads, covered, begin);
    covered = begin + (keys ? sequence.k_len : sequence.q_len);
  }
  const int64_t total = keys ? params.batch.total_k : params.batch.total_q;
  zero_rows(tensor, params.dtype, params.heads, covered, total);
}

// The memory in which sequences of several key chunks sum their dQ.
class DqSums {
 public:
  DqSums(const BackwardParams& params, const Kernel& kernel) {
    int64_t row_tiles = 0;
    for (int b = 0; b < params.batch.batch; ++b) {
      const Sequence sequence = load_sequence(params.batch, b);
      const bool several_chunks = sequence.k_len > kernel.backward_chunk;
      first_row_tile_.push_back(several_chunks ? row_tiles : -1);
      if (several_chunks) row_tiles += ceil_div(sequence.q_len, kTileRows);
    }
    dq_semaphore_.resize(row_tiles * params.heads);
    dq_ = allocate<char>(row_tiles * params.heads * kernel.dq_tile_bytes(params));
  }

  BackwardBuffers buffers() { return {first_row_tile_.data(), dq_semaphore_.data(), dq_.get()}; }

 private:
  std::vector<int64_t> first_row_tile_;
  std::vector<int> dq_semaphore_;
  Memory<char> dq_;
};

// The partial table gradients of every work tile. They are summed in the order of the list, so that
// the result does not depend on timing.
class TableSums {
 public:
  TableSums(const BackwardParams& params, const std::vector<WorkTile>& work_tiles)
      : params_(params), work_tiles_(work_tiles) {
    if (!params.dpos_weight && !params.dts_weight) return;
    for (const WorkTile& work_tile : work_tiles) {
      offsets_.push_back(static_cast<int64_t>(sums_.size()));
      sums_.resize(sums_.size() + position_size(work_tile) + time_size());
    }
  }

  TableGradients of_work_tile(size_t n) {
    TableGradients gradients;
    if (offsets_.empty()) return gradients;
    double* sum = sums_.data() + offsets_[n];
    gradients.reach = reach(work_tiles_[n]);
    if (params_.dpos_weight) gradients.position = sum;
    if (params_.dts_weight) gradients.time = sum + position_size(work_tiles_[n]);
    return gradients;
  }

  void store() {
    if (offsets_.empty()) return;
    const BiasTable& position = params_.relative_bias.position;
    const BiasTable& time = params_.relative_bias.time;
    std::vector<double> position_sum(static_cast<size_t>(position.heads) * position.size);
    std::vector<double> time_sum(static_cast<size_t>(time.heads) * time.size);
    for (size_t n = 0; n < work_tiles_.size(); ++n) {
      const TableGradients part = of_work_tile(n);
      if (part.position) {
        const int head = work_tiles_[n].head / (params_.heads / position.heads);
        const int first = (position.size + 1) / 2 - part.reach;
        double* sum = position_sum.data() + static_cast<int64_t>(head) * position.size + first;
        for (int d = 0; d < 2 * part.reach - 1; ++d) sum[d] += part.position[d];
      }
      if (part.time) {
        const int head = work_tiles_[n].head / (params_.heads / time.heads);
        double* sum = time_sum.data() + static_cast<int64_t>(head) * time.size;
        for (int d = 0; d < time.size; ++d) sum[d] += part.time[d];
      }
    }
    if (params_.dpos_weight) {
      for (size_t n = 0; n < position_sum.size(); ++n) params_.dpos_weight[n] = position_sum[n];
    }
    if (params_.dts_weight) {
      for (size_t n = 0; n < time_sum.size(); ++n) params_.dts_weight[n] = time_sum[n];
    }
  }

 private:
  // The number of distances on each side that the work tile can have: the sequence's length bounds
  // it, and so does the table.
  int reach(const WorkTile& work_tile) const {
    const int k_len = load_sequence(params_.batch, work_tile.sequence).k_len;
    return std::min((params_.relative_bias.position.size + 1) / 2, std::max(k_len, 1));
  }
  int64_t position_size(const WorkTile& work_tile) const {
    return params_.dpos_weight ? 2 * reach(work_tile) - 1 : 0;
  }
  int64_t time_size() const { return params_.dts_weight ? params_.relative_bias.time.size : 0; }

  const BackwardParams& params_;
  const std::vector<WorkTile>& work_tiles_;
  std::vector<int64_t> offsets_;
  std::vector<double> sums_;
};

}  // namespace

void run_forward(const ForwardParams& params, const Parallel& parallel) {
  const Kernel& kernel = select_kernel(params.dtype);
  expect_writes(params.out, params, params.batch.total_q);
  zero_unused_rows(params.out, params, false);
  const ScheduleConfig config = {params.heads, 1, kTileRows, kTileKeys, kernel.forward_chunk};
  const std::vector<WorkTile> work_tiles = forward_schedule(params.batch, params.mask, config);
  run_work_tiles(kernel, work_tiles, params.heads, kernel.forward_scratch_bytes(params), parallel,
                 [&](size_t n, char* scratch) { kernel.forward(params, work_tiles[n], scratch); });
}

void run_backward(const BackwardParams& params, const Parallel& parallel) {
  const Kernel& kernel = select_kernel(params.dtype);
  expect_writes(params.dq, params, params.batch.total_q);
  expect_writes(params.dk, params, params.batch.total_k);
  expect_writes(params.dv, params, params.batch.total_k);
  zero_unused_rows(params.dq, params, false);
  zero_unused_rows(params.dk, params, true);
  zero_unused_rows(params.dv, params, true);
  // One work tile has all heads that share a bias head, because it sums their bias gradient.
  const int heads_per_work_tile = params.drab.data ? params.heads / params.drab.heads : 1;
  const ScheduleConfig config = {params.heads, heads_per_work_tile, kTileRows, kTileKeys,
                                 kernel.backward_chunk};
  const std::vector<WorkTile> work_tiles = backward_schedule(params.batch, params.mask, config);
  DqSums dq_sums(params, kernel);
  TableSums tables(params, work_tiles);
  const BackwardBuffers buffers = dq_sums.buffers();
  run_work_tiles(kernel, work_tiles, params.heads / heads_per_work_tile,
                 kernel.backward_scratch_bytes(params, heads_per_work_tile), parallel,
                 [&](size_t n, char* scratch) {
                   kernel.backward(params, buffers, tables.of_work_tile(n), work_tiles[n],
                                   heads_per_work_tile, scratch);
                 });
  tables.store();
}

}  // namespace hstu::cpu
