// The fused CPU backward: it recomputes the scores and computes dQ, dK, dV and the bias gradient in
// one pass.
//
// A work tile is a chunk of keys of one head, or of all heads that share a bias head if a dense
// bias has a gradient. dK and dV of the chunk stay in scratch; each row tile's dQ is summed over
// the chunk and then added, chunk after chunk in ascending order, so that results do not depend on
// timing. Scores are computed transposed (keys by rows): P^T and dS^T are then operands of the
// products for dV and dK without another transposition.
#pragma once

#include <sched.h>

#include <new>

#include "tile.h"

namespace hstu::cpu::HSTU_CPU_ISA {

template <typename Arithmetic, typename T>
class Backward {
  using Unit = typename Arithmetic::Unit;
  using Accum = typename Arithmetic::Accum;
  using Pack = Packer<Arithmetic, T>;
  static constexpr int kPair = Arithmetic::kPair;

 public:
  static constexpr int kChunk = 512;  // keys: packing a row tile costs about as much as 20 keys

  static int64_t scratch_bytes(const BackwardParams& params, int heads_per_work_tile) {
    Arena arena(nullptr);
    Scratch(arena, params);
    arena.take<Head>(heads_per_work_tile);
    for (int n = 0; n < heads_per_work_tile; ++n) HeadScratch(arena, params);
    return arena.used();
  }

  static int64_t dq_tile_bytes(const BackwardParams& params) {
    return int64_t{round_up(params.q.head_dim, kPadding)} * kTileRows * sizeof(Accum);
  }

  static void run(const BackwardParams& params, const BackwardBuffers& buffers,
                  const TableGradients& tables, const WorkTile& work_tile, int heads_per_work_tile,
                  char* scratch) {
    Backward(params, buffers, tables, work_tile, heads_per_work_tile, scratch).run();
  }

 private:
  // Tiles that the heads of a work tile use one after another.
  struct Scratch {
    Unit* staging;           // [kTileRows][D or Dv]
    Accum* scores;           // S^T [kTileKeys][kTileRows]
    Accum* score_gradients;  // dP^T, then dS^T where the bias has a gradient
    Accum* bias_gradient;    // dS^T summed over the heads of a bias head
    Unit* weights;           // P^T, left form
    Unit* weight_gradients;  // dS^T, left form
    Unit* paired;            // dS^T with its keys in pairs: [kTileKeys / kPair][kTileRows]
    Unit* transposed;        // dS, left form

    Scratch(Arena& arena, const BackwardParams& params) {
      const int widest =
          params.q.head_dim > params.v.head_dim ? params.q.head_dim : params.v.head_dim;
      staging = arena.take<Unit>(kTileRows * round_up(widest, kPadding));
      scores = arena.take<Accum>(kTileKeys * kTileRows);
      score_gradients = arena.take<Accum>(kTileKeys * kTileRows);
      bias_gradient = arena.take<Accum>(kTileKeys * kTileRows);
      weights = operand_of<Arithmetic>(scores, kTileKeys * kTileRows, arena);
      weight_gradients = operand_of<Arithmetic>(score_gradients, kTileKeys * kTileRows, arena);
      paired = kPair == 1 ? weight_gradients : arena.take<Unit>(kTileKeys * kTileRows / kPair);
      transposed = arena.take<Unit>(kTileRows * kTileKeys / kPair);
    }
  };

  // Each head keeps the chunk's keys, and the row tile being worked on.
  struct HeadScratch {
    Unit* k;              // [kChunk][D]
    Unit* v;              // [kChunk][Dv]
    Unit* k_pairs;        // the same keys in pairs, where kPair is 2
    Accum* dk;            // [kChunk][D]
    Accum* dv;            // [kChunk][Dv]
    Unit* q_transposed;   // [D][kTileRows]
    Unit* q;              // [kTileRows][D]
    Unit* do_transposed;  // [Dv][kTileRows]
    Unit* dout;           // [kTileRows][Dv]
    Accum* dq;            // [kTileRows][D]

    HeadScratch(Arena& arena, const BackwardParams& params) {
      const int d = round_up(params.q.head_dim, kPadding);
      const int dv_columns = round_up(params.v.head_dim, kPadding);
      k = arena.take<Unit>(int64_t{kChunk} * d / kPair);
      v = arena.take<Unit>(int64_t{kChunk} * dv_columns / kPair);
      k_pairs = kPair == 1 ? nullptr : arena.take<Unit>(int64_t{kChunk} * d / kPair);
      dk = arena.take<Accum>(int64_t{kChunk} * d);
      dv = arena.take<Accum>(int64_t{kChunk} * dv_columns);
      q_transposed = arena.take<Unit>(kTileRows * d / kPair);
      q = arena.take<Unit>(kTileRows * d / kPair);
      do_transposed = arena.take<Unit>(kTileRows * dv_columns / kPair);
      dout = arena.take<Unit>(kTileRows * dv_columns / kPair);
      dq = arena.take<Accum>(int64_t{d} * kTileRows);
    }
  };

  // One head of the work tile, and what its current row tile sees.
  struct Head {
    HeadView<T> view;
    RowSource<T> dout_source;
    HeadScratch scratch;
    int number;
    Matrix<Unit> k, v, k_pairs;
    Matrix<Unit> q_transposed, q, do_transposed, dout;
    bool active = false;  // the row tile sees keys of this chunk
    int chunks_before = 0;
    int chunks_seen = 0;

    Head(const BackwardParams& params, int b, int head, Arena& arena)
        : view(params, b, head),
          dout_source(row_source<T>(params.dout, view.sequence.q_begin, head)),
          scratch(arena, params),
          number(head) {}
  };

  Backward(const BackwardParams& params, const BackwardBuffers& buffers,
           const TableGradients& tables, const WorkTile& work_tile, int heads, char* scratch)
      : params_(params),
        buffers_(buffers),
        tables_(tables),
        work_tile_(work_tile),
        head_count_(heads),
        arena_(scratch),
        scratch_(arena_, params),
        heads_(arena_.take<Head>(heads)),
        sequence_(load_sequence(params.batch, work_tile.sequence)),
        dq_(params.dq, params.batch.total_q),
        dk_(params.dk, params.batch.total_k),
        dv_(params.dv, params.batch.total_k),
        depth_(round_up(params.q.head_dim, kPadding)),
        value_depth_(round_up(params.v.head_dim, kPadding)),
        has_bias_(params.rab.data || params.relative_bias),
        has_bias_gradient_(params.drab.data || tables.position || tables.time) {
    for (int n = 0; n < heads; ++n)
      new (heads_ + n) Head(params, work_tile.sequence, work_tile.head + n, arena_);
  }

  void run() {
    for (Head& head : heads()) load_keys(head);
    for (int r0 = 0; r0 < sequence_.q_len; r0 += kTileRows) {
      row_tile(r0, smaller(r0 + kTileRows, sequence_.q_len));
    }
    for (Head& head : heads()) {
      const Accum alpha = static_cast<Accum>(params_.alpha);
      store_rows(dk_, sequence_.k_begin + work_tile_.begin, work_tile_.end - work_tile_.begin,
                 head.number, head.scratch.dk, depth_, alpha);
      store_rows(dv_, sequence_.k_begin + work_tile_.begin, work_tile_.end - work_tile_.begin,
                 head.number, head.scratch.dv, value_depth_, Accum{1});
    }
  }

  // Prepares the chunk's K and V and zeroes its dK and dV.
  void load_keys(Head& head) {
    const int keys = work_tile_.end - work_tile_.begin;
    head.k = Pack::rows(head.view.k, work_tile_.begin, keys, head.scratch.k);
    head.v = Pack::rows(head.view.v, work_tile_.begin, keys, head.scratch.v);
    head.k_pairs = kPair == 1
                       ? head.k
                       : Pack::row_pairs(head.view.k, work_tile_.begin, keys, head.scratch.k_pairs);
    const int64_t padded_keys = round_up(keys, kPadding);
    std::memset(head.scratch.dk, 0, padded_keys * depth_ * sizeof(Accum));
    std::memset(head.scratch.dv, 0, padded_keys * value_depth_ * sizeof(Accum));
  }

  // Works on rows [r0, r1) and every key tile of the chunk that they see.
  void row_tile(int r0, int r1) {
    bool any_active = false;
    for (Head& head : heads()) {
      find_chunks(head, r0, r1);
      any_active |= head.active;
      if (head.active) load_rows(head, r0, r1);
      if (head.chunks_seen == 0 && work_tile_.begin == 0) store_zero_dq(head, r0, r1);
    }
    if (!any_active) return;
    for (int k0 = work_tile_.begin; k0 < work_tile_.end; k0 += kTileKeys) {
      key_tile({r0, r1}, {k0, smaller(k0 + kTileKeys, work_tile_.end)});
    }
    for (Head& head : heads()) {
      if (head.active) add_dq(head, r0, r1);
    }
  }

  // Finds whether the row tile sees this chunk, and how many chunks it sees before this one and in
  // all. The chunks that it sees add to its dQ one after another.
  void find_chunks(Head& head, int r0, int r1) const {
    const int chunk = work_tile_.begin / kChunk;
    const KeyIntervals chunks = tiles(head.view.mask.kv_intervals(r0, r1), kChunk);
    head.active = false;
    head.chunks_before = head.chunks_seen = 0;
    for (int n = 0; n < chunks.count; ++n) {
      const Interval seen = chunks.interval[n];
      head.active |= seen.begin <= chunk && chunk < seen.end;
      head.chunks_before += larger(smaller(seen.end, chunk) - seen.begin, 0);
      head.chunks_seen += seen.end - seen.begin;
    }
  }

  // Packs Q and dO of the row tile as left and right operands, and zeroes its dQ.
  void load_rows(Head& head, int r0, int r1) {
    HeadScratch& s = head.scratch;
    const int rows = r1 - r0;
    head.q_transposed =
        Pack::columns(head.view.q, r0, rows, s.q_transposed, kTileRows, scratch_.staging);
    head.q = Pack::row_pairs(head.view.q, r0, rows, s.q);
    head.do_transposed =
        Pack::columns(head.dout_source, r0, rows, s.do_transposed, kTileRows, scratch_.staging);
    head.dout = Pack::row_pairs(head.dout_source, r0, rows, s.dout);
    std::memset(s.dq, 0, int64_t{depth_} * kTileRows * sizeof(Accum));
  }

  void key_tile(Interval rows, Interval keys) {
    bool any_visible = false;
    for (Head& head : heads()) {
      if (!head.active) continue;
      const TileKind kind = head.view.mask.classify(rows.begin, rows.end, keys.begin, keys.end);
      if (kind == TileKind::kEmpty) continue;
      if (kind == TileKind::kFull || params_.drab.data) {
        tile(head, rows, rows, keys, kind == TileKind::kPartial);
      } else {
        for_each_visible_block(
            head.view.mask, rows, keys, Arithmetic::kBlock,
            [&](Interval block, Interval seen) { tile(head, rows, block, seen, true); });
      }
      if (params_.drab.data) sum_bias_gradient(keys.end - keys.begin, any_visible);
      any_visible = true;
    }
    if (!any_visible || !params_.drab.data) return;
    const int bias_head = work_tile_.head / (params_.heads / params_.drab.heads);
    store_dense_gradient(params_.drab, sequence_, work_tile_.sequence, bias_head, shape(rows, keys),
                         scratch_.bias_gradient, static_cast<Accum>(params_.alpha));
  }

  static TileShape shape(Interval rows, Interval keys) {
    return {rows.begin, rows.end - rows.begin, keys.begin, keys.end - keys.begin, 1, kTileRows};
  }

  // Works on some rows of the row tile `packed` and some keys of the chunk.
  void tile(Head& head, Interval packed, Interval rows, Interval keys, bool partial) {
    const int row_count = rows.end - rows.begin;
    const int key_count = keys.end - keys.begin;
    const int padded_rows = round_up(row_count, Arithmetic::kColumns);
    const int first_row = rows.begin - packed.begin;
    const int64_t first_key = keys.begin - work_tile_.begin;
    const int d = params_.q.head_dim;
    const int dv = params_.v.head_dim;
    const Matrix<Unit> weights = {scratch_.weights, kTileRows / kPair};
    const Matrix<Unit> weight_gradients = {scratch_.weight_gradients, kTileRows / kPair};

    // S^T = K Q^T
    Arithmetic::gemm(key_count, padded_rows, d, head.k.from(first_key, 0),
                     head.q_transposed.from(0, first_row), scratch_.scores, kTileRows, false);
    if (has_bias_) {
      add_bias(params_, sequence_, work_tile_.sequence, head.number, shape(rows, keys),
               scratch_.scores);
    }
    // dP^T = V dO^T
    Arithmetic::gemm(key_count, padded_rows, dv, head.v.from(first_key, 0),
                     head.do_transposed.from(0, first_row), scratch_.score_gradients, kTileRows,
                     false);
    // P^T and dS^T
    activate(head, shape(rows, keys), padded_rows, partial);
    // dV += P^T dO
    Arithmetic::gemm(key_count, round_up(dv, Arithmetic::kColumns), row_count, weights,
                     head.dout.from(first_row / kPair, 0),
                     head.scratch.dv + first_key * value_depth_, value_depth_, true);
    // dK += dS^T Q
    Arithmetic::gemm(key_count, round_up(d, Arithmetic::kColumns), row_count, weight_gradients,
                     head.q.from(first_row / kPair, 0), head.scratch.dk + first_key * depth_,
                     depth_, true);
    // dQ += dS K
    const Matrix<Unit> transposed =
        Pack::transposed({scratch_.paired, kTileRows}, ceil_div(key_count, kPair), padded_rows,
                         scratch_.transposed, kTileKeys / kPair);
    Arithmetic::gemm(row_count, round_up(d, Arithmetic::kColumns), key_count, transposed,
                     head.k_pairs.from(first_key / kPair, 0),
                     head.scratch.dq + int64_t{first_row} * depth_, depth_, true);

    if (tables_.position || tables_.time) {
      add_table_gradients(tables_, params_.relative_bias, sequence_, shape(rows, keys),
                          scratch_.score_gradients, static_cast<Accum>(params_.alpha));
    }
  }

  // Computes P = M * silu(X) * scale and dX = M * dP * scale * silu'(X), with X = alpha * (S +
  // bias). The factor alpha of dS = alpha * dX is applied when dQ, dK and the bias gradient are
  // stored.
  void activate(const Head& head, const TileShape& shape, int padded_rows, bool partial) {
    uint64_t bits[kTileKeys];  // bit m of word n: row m sees key n
    for (int row = 0; row < kTileRows; ++row) {
      const bool real = row < shape.rows;
      bits[row] = !partial ? ~uint64_t{0}
                  : real   ? head.view.mask.row_bits(shape.r0 + row, shape.k0)
                           : 0;
    }
    if (partial) transpose_bits(bits);

    alignas(64) Accum scale[kTileRows] = {};
    for (int row = 0; row < shape.rows; ++row) {
      scale[row] = row_scale<Accum>(params_, sequence_.q_begin + shape.r0 + row);
    }
    // Products take whole blocks of keys, so the keys past the last one must hold zeros.
    const int keys = round_up(shape.keys, Arithmetic::kRows);
    for (int key = 0; key < keys; key += kPair) {
      for (int row = 0; row < padded_rows; row += kLanes<Accum>) {
        Vector<Accum> gradient[kPair];
#pragma GCC unroll 2
        for (int n = 0; n < kPair; ++n) {
          gradient[n] = activate_vector(key + n, row, bits[key + n] >> row, load(scale + row));
        }
        if constexpr (kPair == 2) {
          store_row_pair<Arithmetic>(scratch_.paired + key / kPair * kTileRows + row, gradient[0],
                                     gradient[kPair - 1]);
        }
      }
    }
  }

  HSTU_INLINE Vector<Accum> activate_vector(int key, int row, uint64_t bits, Vector<Accum> scale) {
    const int element = key * kTileRows + row;
    const Vector<Accum> x = static_cast<Accum>(params_.alpha) * load(scratch_.scores + element);
    const Vector<Accum> s = sigmoid<Arithmetic::kAccuracy>(x);
    const Vector<Accum> p = keep(bits, silu(x, s) * scale);
    const Vector<Accum> dp = load(scratch_.score_gradients + element) * scale;
    const Vector<Accum> gradient = keep(bits, dp * silu_derivative(x, s));
    const int unit_row = key * (kTileRows / kPair);
    store_operand<Arithmetic>(scratch_.weights + unit_row, row, p);
    store_operand<Arithmetic>(scratch_.weight_gradients + unit_row, row, gradient);
    if (has_bias_gradient_) store(scratch_.score_gradients + element, gradient);
    return gradient;
  }

  // Adds dX of one head to the tile of the dense bias gradient.
  void sum_bias_gradient(int keys, bool accumulate) {
    for (int n = 0; n < keys * kTileRows; n += kLanes<Accum>) {
      const Vector<Accum> part = load(scratch_.score_gradients + n);
      Accum* sum = scratch_.bias_gradient + n;
      store(sum, accumulate ? load(sum) + part : part);
    }
  }

  // Adds the chunk's dQ to that of the chunks before it; the last chunk stores the sum.
  void add_dq(Head& head, int r0, int r1) {
    Accum* sum = head.scratch.dq;
    int* semaphore = nullptr;
    if (head.chunks_seen > 1) {
      const int64_t tile =
          (buffers_.first_row_tile[work_tile_.sequence] + r0 / kTileRows) * params_.heads +
          head.number;
      semaphore = buffers_.dq_semaphore + tile;
      while (__atomic_load_n(semaphore, __ATOMIC_ACQUIRE) != head.chunks_before) sched_yield();
      sum = reinterpret_cast<Accum*>(buffers_.dq + tile * dq_tile_bytes(params_));
      for (int n = 0; n < depth_ * kTileRows; n += kLanes<Accum>) {
        const Vector<Accum> part = load(head.scratch.dq + n);
        store(sum + n, head.chunks_before == 0 ? part : load(sum + n) + part);
      }
    }
    if (head.chunks_before + 1 == head.chunks_seen) {
      store_rows(dq_, sequence_.q_begin + r0, r1 - r0, head.number, sum, depth_,
                 static_cast<Accum>(params_.alpha));
    }
    if (semaphore) __atomic_store_n(semaphore, head.chunks_before + 1, __ATOMIC_RELEASE);
  }

  void store_zero_dq(const Head& head, int r0, int r1) {
    std::memset(head.scratch.dq, 0, int64_t{kTileRows} * depth_ * sizeof(Accum));
    store_rows(dq_, sequence_.q_begin + r0, r1 - r0, head.number, head.scratch.dq, depth_,
               Accum{1});
  }

  static void store_rows(const RowStore<T, Accum>& store, int64_t begin, int count, int head,
                         const Accum* rows, int64_t stride, Accum factor) {
    for (int r = 0; r < count; ++r) store.store(begin + r, head, rows + r * stride, factor);
  }

  struct HeadRange {
    Head* first;
    Head* last;
    Head* begin() const { return first; }
    Head* end() const { return last; }
  };
  HeadRange heads() const { return {heads_, heads_ + head_count_}; }

  const BackwardParams& params_;
  const BackwardBuffers& buffers_;
  const TableGradients& tables_;
  const WorkTile& work_tile_;
  int head_count_;
  Arena arena_;
  Scratch scratch_;
  Head* heads_;
  Sequence sequence_;
  RowStore<T, Accum> dq_, dk_, dv_;
  int depth_;        // D, padded
  int value_depth_;  // Dv, padded
  bool has_bias_;
  bool has_bias_gradient_;
};

}  // namespace hstu::cpu::HSTU_CPU_ISA
