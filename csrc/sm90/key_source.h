// The policies of ForwardTraits::Source, which find and load keys and values in the forward.
//
//   PackedKeys           packed rows of k and v
//   PagedKeys            the history in pages, the targets in packed rows of k and v
//   QuantizedPagedKeys   as PagedKeys, with pages of e4m3 that are converted to tiles of 16 bits
//   E4m3Keys             packed rows of k and blocks of v in e4m3, see e4m3_keys.h
//   E4m3PagedKeys        e4m3 in pages, and targets in packed rows, see e4m3_pages.h
//
// A policy defines how many lanes copy (kCopyLanes for each of K and V, kQueryCopyLanes for Q),
// which row tile an index stands for (find_row_tile), how keys are counted (pad_keys, key_of,
// visible_keys), and how a tile of K or V is copied to a stage (Loader::load). Its tile sizes and
// registers are in tile_config.h.
#pragma once

#include "../scheduler/work_list.h"
#include "paged_keys.h"
#include "pipeline.h"
#include "quantized_keys.h"

namespace hstu::sm90 {

// A stage of K or V, and the barrier that its copy completes.
template <PagePart kPart, typename SharedMemory>
HSTU_DEVICE auto* kv_stage(SharedMemory& smem, int stage) {
  return kPart == PagePart::kKeys ? smem.k[stage] : smem.v[stage];
}
template <PagePart kPart, typename SharedMemory>
HSTU_DEVICE cutlass::arch::ClusterTransactionBarrier& kv_full(SharedMemory& smem, int stage) {
  return kPart == PagePart::kKeys ? smem.pipeline_k.full[stage] : smem.pipeline_v.full[stage];
}
template <PagePart kPart, typename Maps>
HSTU_DEVICE const CUtensorMap& kv_map(const Maps& maps) {
  return kPart == PagePart::kKeys ? maps.k : maps.v;
}

struct PackedKeys {
  static constexpr bool kIsPaged = false;
  static constexpr bool kIsQuantized = false;
  static constexpr bool kIsFp8 = false;
  static constexpr bool kTransposesValues = false;
  static constexpr int kCopyLanes = 1;
  static constexpr int kQueryCopyLanes = 1;
  using ScoreSum = float;  // type of the accumulators of S

  static HSTU_DEVICE bool is_leader() { return true; }

  // Finds tile `tile_index`, see first_tile(). Called by a warp; only lane 0 has the result.
  template <int kRows, typename WorkTile>
  static HSTU_DEVICE bool find_row_tile(const ForwardParams& params, int tile_index,
                                        WorkTile& work_tile) {
    if (threadIdx.x % 32 != 0) return false;
    const bool has_rows = hstu::find_row_tile(params.batch, tile_index, kRows, work_tile.tile);
    if (!has_rows) work_tile.tile = {};
    return has_rows;
  }
  // Called by one thread for a row tile from the work list.
  template <typename WorkTile>
  static HSTU_DEVICE void find_pages(const ForwardParams&, WorkTile&) {}

  // pad_keys() converts the visible keys of a work tile to padded keys, padded_end() the end of an
  // interval.
  template <int kKeys, typename WorkTile>
  static HSTU_DEVICE void pad_keys(WorkTile&) {}
  template <int kKeys>
  static HSTU_DEVICE int padded_end(const Sequence&, int key) {
    return key;
  }
  // Converts a padded key to a key.
  template <int kKeys>
  static HSTU_DEVICE int key_of(const Sequence&, int padded_key) {
    return padded_key;
  }
  // Bit n tells whether a row sees padded key `first` + n, n < 64.
  template <int kKeys>
  static HSTU_DEVICE uint64_t visible_keys(const Mask& mask, const Sequence&, int row, int first) {
    return mask.row_bits(row, first);
  }

  template <typename Traits, PagePart kPart>
  struct Loader {
    // Starts copying the key tile that begins with key `first` to a stage.
    HSTU_DEVICE void load(const ForwardParams&, const typename Traits::Maps& maps,
                          typename Traits::SharedMemory& smem,
                          const typename Traits::WorkTile& work_tile, int first, int stage) {
      const Sequence& sequence = work_tile.tile.sequence;
      copy_rows<Traits::kKeys, Traits::kHeadDim>(
          kv_map<kPart>(maps), {sequence.k_begin, sequence.k_len, work_tile.head}, first,
          kv_stage<kPart>(smem, stage), kv_full<kPart>(smem, stage));
    }
  };

  // The copies of K and V that the warp of Q makes: none for packed keys.
  template <typename Traits>
  struct QueryWarpLoader {
    HSTU_DEVICE void load(const ForwardParams&, const typename Traits::Maps&,
                          typename Traits::SharedMemory&, const typename Traits::WorkTile&) {}
  };
};

struct PagedKeys {
  static constexpr bool kIsPaged = true;
  static constexpr bool kIsQuantized = false;
  static constexpr bool kIsFp8 = false;
  static constexpr bool kTransposesValues = false;
  using ScoreSum = float;
  static constexpr int kCopyLanes = 32;  // a lane copies the part of a tile that is in one page
  static constexpr int kQueryCopyLanes = 1;

  // True for one lane of each warp that copies.
  static HSTU_DEVICE bool is_leader() { return threadIdx.x % 32 == 0; }

  template <int kRows, typename WorkTile>
  static HSTU_DEVICE bool find_row_tile(const ForwardParams& params, int tile_index,
                                        WorkTile& work_tile) {
    return find_paged_tile(params, tile_index, kRows, work_tile.tile, work_tile.pages);
  }
  template <typename WorkTile>
  static HSTU_DEVICE void find_pages(const ForwardParams& params, WorkTile& work_tile) {
    work_tile.pages = PageList(params.paged, work_tile.tile.sequence_index);
  }

  template <int kKeys, typename WorkTile>
  static HSTU_DEVICE void pad_keys(WorkTile& work_tile) {
    const Sequence& sequence = work_tile.tile.sequence;
    const PaddedKeys<kKeys> padded(sequence);
    SpanSummary& summary = work_tile.summary;
    for (int n = 0; n < 2; ++n) {
      summary.hull[n] = padded.to_padded(summary.hull[n], sequence.k_len);
      summary.fully_visible[n] = padded.to_padded(summary.fully_visible[n], sequence.k_len);
    }
  }
  template <int kKeys>
  static HSTU_DEVICE int padded_end(const Sequence& sequence, int key) {
    return PaddedKeys<kKeys>(sequence).padded_end(key);
  }
  template <int kKeys>
  static HSTU_DEVICE int key_of(const Sequence& sequence, int padded_key) {
    return PaddedKeys<kKeys>(sequence).key(padded_key);
  }
  template <int kKeys>
  static HSTU_DEVICE uint64_t visible_keys(const Mask& mask, const Sequence& sequence, int row,
                                           int first) {
    const PaddedKeys<kKeys> padded(sequence);
    return padded.without_gap(mask.row_bits(row, padded.key(first)), first);
  }

  template <typename Traits, PagePart kPart>
  struct Loader {
    PageWindow window;

    // Called by a warp.
    HSTU_DEVICE void load(const ForwardParams& params, const typename Traits::Maps& maps,
                          typename Traits::SharedMemory& smem,
                          const typename Traits::WorkTile& work_tile, int first, int stage) {
      constexpr int kKeys = Traits::kKeys;
      constexpr int kHeadDim = Traits::kHeadDim;
      const Sequence& sequence = work_tile.tile.sequence;
      auto* const to = kv_stage<kPart>(smem, stage);
      auto& full = kv_full<kPart>(smem, stage);
      const PaddedKeys<kKeys> padded(sequence);
      const bool is_target = padded.is_target(first);
      if (is_leader()) full.arrive_and_expect_tx(kKeys * kHeadDim * sizeof(*to));
      if (!is_target) {
        window.set_sequence(work_tile.pages);
        start_copy_pages<kPart, kKeys, kHeadDim>(params.paged, maps.pages, window, sequence,
                                                 work_tile.head, first, to, full);
      } else if (is_leader()) {
        start_copy_rows<kKeys, kHeadDim>(kv_map<kPart>(maps), target_rows(sequence, work_tile.head),
                                         first - padded.first_target(), to, full);
      }
    }
  };

  template <typename Traits>
  using QueryWarpLoader = PackedKeys::QueryWarpLoader<Traits>;
};

struct QuantizedPagedKeys : PagedKeys {
  static constexpr bool kIsQuantized = true;
  static constexpr int kCopyLanes = 1;  // copies targets only
  static constexpr int kQueryCopyLanes = 32;

  // Copies a tile of targets. QueryWarpLoader copies tiles of history, which the converter
  // warpgroup converts (convert_pages()).
  template <typename Traits, PagePart kPart>
  struct Loader {
    // Called by one thread.
    HSTU_DEVICE void load(const ForwardParams&, const typename Traits::Maps& maps,
                          typename Traits::SharedMemory& smem,
                          const typename Traits::WorkTile& work_tile, int first, int stage) {
      constexpr int kKeys = Traits::kKeys;
      constexpr int kHeadDim = Traits::kHeadDim;
      const Sequence& sequence = work_tile.tile.sequence;
      auto* const to = kv_stage<kPart>(smem, stage);
      auto& full = kv_full<kPart>(smem, stage);
      const PaddedKeys<kKeys> padded(sequence);
      if (!padded.is_target(first)) {
        full.arrive();
      } else {
        full.arrive_and_expect_tx(kKeys * kHeadDim * sizeof(*to));
        start_copy_rows<kKeys, kHeadDim>(kv_map<kPart>(maps), target_rows(sequence, work_tile.head),
                                         first - padded.first_target(), to, full);
      }
    }
  };

  // Copies the bytes and scales of the tiles of K and V that are in pages.
  template <typename Traits>
  struct QueryWarpLoader {
    typename Traits::ByteState state;
    PageWindow window;

    // Called by a warp for each work tile.
    HSTU_DEVICE void load(const ForwardParams& params, const typename Traits::Maps& maps,
                          typename Traits::SharedMemory& smem,
                          const typename Traits::WorkTile& work_tile) {
      constexpr int kKeys = Traits::kKeys;
      const PaddedKeys<kKeys> padded(work_tile.tile.sequence);
      __syncwarp();
      window.set_sequence(work_tile.pages);
      for (int first = work_tile.tile_from(0); first != Traits::kNoKey;
           first = work_tile.tile_from(first + kKeys)) {
        if (padded.is_target(first)) continue;
        load_part<PagePart::kKeys>(params, maps, smem, work_tile, first);
        load_part<PagePart::kValues>(params, maps, smem, work_tile, first);
      }
    }

   private:
    template <PagePart kPart>
    HSTU_DEVICE void load_part(const ForwardParams& params, const typename Traits::Maps& maps,
                               typename Traits::SharedMemory& smem,
                               const typename Traits::WorkTile& work_tile, int first) {
      constexpr int kKeys = Traits::kKeys;
      const Sequence& sequence = work_tile.tile.sequence;
      const int stage = state.index();
      auto& full = smem.pipeline_bytes.full[stage];
      smem.pipeline_bytes.producer_acquire(state);
      if (is_leader()) full.arrive_and_expect_tx(sizeof(smem.bytes[stage]));
      start_copy_pages<kPart, kKeys, Traits::kHeadDim>(params.paged, maps.pages, window, sequence,
                                                       work_tile.head, first, smem.bytes[stage],
                                                       full);
      start_copy_scales<kPart>(params.paged, window, sequence, work_tile.head, first,
                               smem.scales[stage]);
      cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<uint64_t*>(&full));
      state.advance();
    }
  };
};

}  // namespace hstu::sm90
