// The fused CPU forward: O = (M * silu(alpha * (Q K^T + bias)) * scale) V.
//
// A work tile is a chunk of query rows of one head. Key tiles are packed once per chunk and used by
// each of its row tiles. Scores exist for one tile at a time, in scratch.
#pragma once

#include "tile.h"

namespace hstu::cpu::HSTU_CPU_ISA {

template <typename Arithmetic, typename T>
class Forward {
  using Unit = typename Arithmetic::Unit;
  using Accum = typename Arithmetic::Accum;
  using Pack = Packer<Arithmetic, T>;
  static constexpr int kPair = Arithmetic::kPair;

 public:
  static constexpr int kChunk = 512;  // rows that share the packing of a key tile

  static int64_t scratch_bytes(const ForwardParams& params) {
    return Scratch(nullptr, params).bytes;
  }

  static void run(const ForwardParams& params, const WorkTile& work_tile, char* scratch) {
    Forward(params, work_tile, scratch).run();
  }

 private:
  struct Scratch {
    Unit* q;        // [kChunk][D]
    Unit* k;        // K^T [D][kTileKeys]
    Unit* v;        // [kTileKeys][Dv]
    Unit* staging;  // [kTileKeys][D]
    Accum* scores;  // [kTileRows][kTileKeys]
    Unit* weights;  // P, left form [kTileRows][kTileKeys]
    Accum* out;     // [kChunk][Dv]
    int64_t bytes;

    Scratch(char* base, const ForwardParams& params) {
      const int depth = round_up(params.q.head_dim, kPadding) / kPair;
      const int columns = round_up(params.v.head_dim, kPadding);
      Arena arena(base);
      q = arena.take<Unit>(int64_t{kChunk} * depth);
      k = arena.take<Unit>(kTileKeys * depth);
      v = arena.take<Unit>(kTileKeys / kPair * columns);
      staging = arena.take<Unit>(kTileKeys * depth);
      scores = arena.take<Accum>(kTileRows * kTileKeys);
      weights = operand_of<Arithmetic>(scores, kTileRows * kTileKeys, arena);
      out = arena.take<Accum>(int64_t{kChunk} * columns);
      bytes = arena.used();
    }
  };

  Forward(const ForwardParams& params, const WorkTile& work_tile, char* scratch)
      : params_(params),
        work_tile_(work_tile),
        head_(params, work_tile.sequence, work_tile.head),
        scratch_(scratch, params),
        q_(Pack::rows(head_.q, work_tile.begin, work_tile.end - work_tile.begin, scratch_.q)),
        store_(params.out, params.batch.total_q),
        out_stride_(round_up(params.v.head_dim, kPadding)),
        has_bias_(params.rab.data || params.relative_bias) {}

  void run() {
    const int rows = work_tile_.end - work_tile_.begin;
    std::memset(scratch_.out, 0, round_up(rows, kPadding) * out_stride_ * sizeof(Accum));

    const KeyIntervals visible =
        tiles(head_.mask.kv_intervals(work_tile_.begin, work_tile_.end), kTileKeys);
    for (int n = 0; n < visible.count; ++n) {
      for (int tile = visible.interval[n].begin; tile < visible.interval[n].end; ++tile) {
        key_tile(tile * kTileKeys);
      }
    }
    store_out();
  }

  // Works on the row tiles of the chunk that see some of keys [k0, k0 + kTileKeys).
  void key_tile(int k0) {
    const int k1 = smaller(k0 + kTileKeys, head_.sequence.k_len);
    bool packed = false;
    for (int r0 = work_tile_.begin; r0 < work_tile_.end; r0 += kTileRows) {
      const int r1 = smaller(r0 + kTileRows, work_tile_.end);
      const TileKind kind = head_.mask.classify(r0, r1, k0, k1);
      if (kind == TileKind::kEmpty) continue;
      if (!packed) {
        k_transposed_ =
            Pack::columns(head_.k, k0, k1 - k0, scratch_.k, kTileKeys, scratch_.staging);
        v_ = Pack::row_pairs(head_.v, k0, k1 - k0, scratch_.v);
        packed = true;
      }
      if (kind == TileKind::kFull) {
        tile({r0, r1}, {k0, k1}, k0, false);
      } else {
        for_each_visible_block(head_.mask, {r0, r1}, {k0, k1}, Arithmetic::kBlock,
                               [&](Interval rows, Interval keys) { tile(rows, keys, k0, true); });
      }
    }
  }

  // Works on some rows, and some keys of the packed key tile that begins with k0.
  void tile(Interval rows, Interval keys, int k0, bool partial) {
    const int row_count = rows.end - rows.begin;
    const int key_count = keys.end - keys.begin;
    const int padded_keys = round_up(key_count, Arithmetic::kColumns);
    const int first_row = rows.begin - work_tile_.begin;
    const int first_key = keys.begin - k0;

    // S = Q K^T
    Arithmetic::gemm(row_count, padded_keys, params_.q.head_dim, q_.from(first_row, 0),
                     k_transposed_.from(0, first_key), scratch_.scores, kTileKeys, false);
    if (has_bias_) {
      add_bias(params_, head_.sequence, work_tile_.sequence, work_tile_.head,
               TileShape{rows.begin, row_count, keys.begin, key_count, kTileKeys, 1},
               scratch_.scores);
    }

    // P = M * silu(alpha * (S + bias)); store_out() applies the scale
    for (int row = 0; row < row_count; ++row) {
      const uint64_t bits =
          partial ? head_.mask.row_bits(rows.begin + row, keys.begin) : ~uint64_t{0};
      activate_row(bits, padded_keys, row);
      // Under a causal mask, this is the row's last tile.
      if (partial) store_.expect(head_.sequence.q_begin + rows.begin + row, work_tile_.head);
    }

    // O += P V
    Arithmetic::gemm(row_count, round_up(params_.v.head_dim, Arithmetic::kColumns), key_count,
                     {scratch_.weights, kTileKeys / kPair}, v_.from(first_key / kPair, 0),
                     scratch_.out + int64_t{first_row} * out_stride_, out_stride_, true);
  }

  HSTU_INLINE void activate_row(uint64_t bits, int keys, int row) {
    const Accum alpha = static_cast<Accum>(params_.alpha);
    const Accum* scores = scratch_.scores + row * kTileKeys;
    Unit* weights = scratch_.weights + row * (kTileKeys / kPair);
    for (int key = 0; key < keys; key += kLanes<Accum>) {
      const Vector<Accum> x = alpha * load(scores + key);
      const Vector<Accum> p = silu(x, sigmoid<Arithmetic::kAccuracy>(x));
      store_operand<Arithmetic>(weights, key, keep(bits >> key, p));
    }
  }

  // The epilogue: O = scale * O, rounded once.
  void store_out() {
    for (int r = work_tile_.begin; r < work_tile_.end; ++r) {
      const int64_t row = head_.sequence.q_begin + r;
      store_.store(row, work_tile_.head, scratch_.out + int64_t{r - work_tile_.begin} * out_stride_,
                   row_scale<Accum>(params_, row));
    }
  }

  const ForwardParams& params_;
  const WorkTile& work_tile_;
  HeadView<T> head_;
  Scratch scratch_;
  Matrix<Unit> q_;             // the rows of the work tile
  Matrix<Unit> k_transposed_;  // the current key tile
  Matrix<Unit> v_;
  RowStore<T, Accum> store_;
  int out_stride_;  // Dv, padded
  bool has_bias_;
};

}  // namespace hstu::cpu::HSTU_CPU_ISA
