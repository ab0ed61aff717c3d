// The weights by time of a relative bias in the backward, and the sums of dS for the gradient of
// the time table.
//
// A lane has one block of 8 x 8 scores of each tile: the same 8 keys in all tiles of a work tile,
// and the same 8 rows of each tile of 64. Elapsed time changes slowly from one tile to the next, so
// the lane keeps the bucket of its block, and the range of differences that have this bucket. Where
// all blocks of a tile keep their bucket, the tile costs a warp one comparison and one addition.
#pragma once

#include "../bias/relative_bias.h"
#include "../common/fixed_point.h"
#include "../common/mask.h"
#include "../common/ptx.h"
#include "../common/table_sum.h"
#include "blocks_of_warp.h"
#include "key_times.h"
#include "tile_config.h"

namespace hstu::sm90 {

// Shared memory of a warp.
template <int kRows, int kKeys>
struct TimeBlockMemory {
  // A block with several buckets, whose differences less the smallest one fit into 31 bits.
  struct alignas(16) Block {
    // With two buckets: the low word of what is added to the time of a key, so that |row time - key
    // time| becomes the difference less the smallest difference of the block.
    uint32_t offset;
    // With two buckets: the threshold between them, less the smallest difference. With more: the
    // last bucket.
    uint32_t threshold;
    uint32_t weights;  // with two buckets: the weights of both, in fp16
    int place;         // 8 times the chunk of 8 keys, plus the number of the 8 rows

    HSTU_DEVICE int chunk() const { return place / 8; }
    HSTU_DEVICE int row() const { return place % 8 * 8; }  // the first one
  };
  static constexpr int kBlocks = kRows * kKeys / 64 / 4;  // of a warp
  // With 64 keys, at head dim 256, `kept` is in registers, because no shared memory is left.
  static constexpr bool kHasKept = kKeys > 64;
  alignas(16) TimeRange ranges[kRows / 8];  // of the rows of the tile to be found next
  // Index 0 belongs to tiles with an even number, 1 to those with an odd one. `rows` has the low
  // words of the times of rows, and later sums by time; `blocks` lists blocks with two buckets,
  // then others.
  alignas(16) uint32_t rows[2][kRows];
  Block blocks[2][kBlocks];
  alignas(16) DifferenceRange kept[kHasKept ? 32 : 0];  // see TimeBlocks::kept()
};

// The weights by time of the blocks of a tile, in fp16, by chunk of 8 keys and by 8 rows.
template <int kKeys>
struct TimeBlockWeights {
  // Marks a block that has a patch: one weight for each score.
  static constexpr uint16_t kPatch = 0xffff;

  alignas(16) uint16_t blocks[kKeys / 8][8];
};

// The entries of the tables to which the sums of a work tile are added.
struct TableEntries {
  const TableSums& sums;
  const Sequence& sequence;
  int position_size;
  int first_position;  // the first entry of the head
  int first_time;
  int origin;  // the entry, from first_position on, of the first row and key of a work tile
};

// The tables and times of a work tile.
struct TimesOfTile {
  const RelativeBias& bias;
  const MaskParams& mask;
  // NOTE: these are in shared memory, so that they take no registers between the few uses.
  const SequenceTile& tile;
  const TileMap& map;
  const int& head;
  int table_head;
  int first_key;
  // In blocks of 8 rows: where the sequence begins in row_blocks, and the number of its last block.
  const int& first_rows;
  const int& last_rows;

  HSTU_DEVICE const float* weights() const {
    return bias.prepared.time + table_head * bias.time.size;
  }
  HSTU_DEVICE const NarrowCell* cells() const {
    return bias.prepared.narrow_cells + table_head * kNarrowCells;
  }
  // The times of a block of 8 rows. A block past the end has the times of the last block.
  HSTU_DEVICE const KeyBlockTimes* rows(int row_block) const {
    return bias.prepared.row_blocks + (first_rows + min(row_block, last_rows));
  }
  // A row or key that does not exist has the time of the last one.
  HSTU_DEVICE int64_t time_of_row(int row) const {
    return hstu::time_of_row(bias, tile.sequence, min(row, tile.sequence.q_len - 1));
  }
  HSTU_DEVICE int64_t time_of_key(int key) const {
    const Sequence& sequence = tile.sequence;
    return bias.timestamps[sequence.k_begin + min(first_key + key, sequence.k_len - 1)];
  }
};

template <int kRows, int kKeys, typename Element, bool kIsDescending>
class TimeBlocks {
  using Blocks = BlocksOfWarp<kRows, kKeys, kIsDescending>;
  using Memory = TimeBlockMemory<kRows, kKeys>;
  using Block = typename Memory::Block;
  using Weights = TimeBlockWeights<kKeys>;
  static constexpr uint32_t kAllLanes = 0xffffffff;

 public:
  HSTU_DEVICE TimeBlocks(int thread, const KeyTimes<kKeys>& keys, Memory& memory)
      : thread_(thread), keys_(keys), memory_(memory) {}

  // See TableGradients::set_thread().
  HSTU_DEVICE void set_thread(int thread) { thread_ = thread; }

  // Begins a work tile.
  HSTU_DEVICE void enter() {
    kept() = {1, 0};
    state_ = kNone;
  }

  // Start loading what find() needs of row tile m: first the ranges of its rows, after find() of
  // the previous tile, then the times of its rows, after add() of the tile before the previous one.
  HSTU_DEVICE void start_load_ranges(const TimesOfTile& times, int m) {
    if (lane() < Blocks::kRowBlocks) {
      ptx::cp_async_cached_16(&times.rows(m * Blocks::kRowBlocks + lane())->range,
                              memory_.ranges + lane());
    }
    ptx::cp_async_commit();
  }
  HSTU_DEVICE void start_load_rows(const TimesOfTile& times, int m, int parity) {
    if (lane() < 2 * Blocks::kRowBlocks) {
      const KeyBlockTimes* const rows = times.rows(m * Blocks::kRowBlocks + lane() / 2);
      ptx::cp_async_cached_16(rows->times + lane() % 2 * 4, memory_.rows[parity] + lane() * 4);
    }
    ptx::cp_async_commit();
  }

  // Finds the weights of tile m, and the weights of the scores of blocks with several buckets: 64
  // weights in `patches` for each such block, in the order of the consumers' accumulator.
  HSTU_DEVICE void find(const TimesOfTile& times, int m, int parity, Weights& weights,
                        uint32_t* patches) {
    const int row_block = Blocks::row_block_of(lane() % 8);
    const int chunk = Blocks::chunk_of(Blocks::group_of(thread_), lane() % 8);
    const TimeRange keys = ptx::ld_shared_volatile(&keys_.blocks[chunk].range);
    ptx::cp_async_wait<1>();  // the times of rows may still be on their way
    __syncwarp();
    const TimeRange rows = ptx::ld_shared_volatile(&memory_.ranges[row_block]);
    const DifferenceRange differences = find_difference_range(rows, keys);
    const DifferenceRange same = kept();
    const bool is_same = (same.least <= differences.least && differences.most <= same.most) ||
                         !Blocks::has_block(lane());
    previous_ = state_;
    if (!__all_sync(kAllLanes, is_same)) {
      Block block;
      if (!is_same) block = find_bucket(times, m, row_block, chunk, rows, keys, differences);
      const int kind = kind_of(state_);
      const uint32_t two = __ballot_sync(kAllLanes, kind == kTwo);
      const uint32_t many = __ballot_sync(kAllLanes, kind == kMany);
      const uint32_t wide = __ballot_sync(kAllLanes, kind == kWide);
      if (two | many | wide) {
        if (kind == kTwo || kind == kMany) {
          memory_.blocks[parity][place_in_list(kind, two, many)] = block;
        }
        ptx::cp_async_wait<0>();
        __syncwarp();  // the list, and the times that all lanes have copied, can be read
        patch_two(__popc(two), parity, patches);
        if (many) patch_many(times, __popc(two), __popc(two) + __popc(many), parity, m, patches);
        if (__builtin_expect(wide != 0, 0)) patch_exactly(times, wide, m, patches);
      }
    }
    if (Blocks::has_block(lane())) weights.blocks[chunk][row_block] = weight_;
  }

  // Called instead of find() when there is no further tile, before add() of the last one.
  HSTU_DEVICE void skip() { previous_ = state_; }

  // Adds dS of tile m, the tile before the one that find() processed last. `total` is the sum of
  // the lane's block; if dS is not finite, `total` of some lane is not finite. Calls release() when
  // dS has been read.
  template <typename Release>
  HSTU_DEVICE void add(const TableEntries& entries, const TimesOfTile& times, int m, int parity,
                       float total, const Element* ds, Release release) {
    const int kind = kind_of(previous_);
    const bool is_finite = __float_as_uint(fabsf(total)) < 0x7f800000;
    const bool is_plain = previous_ == base_ * kKinds + kOne || kind == kNone;
    float above = 0;  // the part of `total` in the second of two buckets
    if (!__all_sync(kAllLanes, is_finite && is_plain)) {
      if (!__all_sync(kAllLanes, is_finite)) {
        add_exactly(entries, times, __ballot_sync(kAllLanes, kind != kNone), m, ds);
        release();
        return;
      }
      const uint32_t two = __ballot_sync(kAllLanes, kind == kTwo);
      const uint32_t many = __ballot_sync(kAllLanes, kind == kMany);
      const uint32_t wide = __ballot_sync(kAllLanes, kind == kWide);
      if (two) above = sum_above(kind, two, parity, ds);
      if (many) add_many(entries, times, kind, two, many, m, parity, ds);
      if (__builtin_expect(wide != 0, 0)) add_exactly(entries, times, wide, m, ds);
      release();
      move_to(entries, kind <= kTwo ? bucket_of(previous_) : base_);
    } else {
      release();
    }
    if (kind <= kTwo) {
      sums_[0] += total - above;
      sums_[1] += above;
    }
  }

  // Adds what has been summed up, at the end of a work tile.
  HSTU_DEVICE void finish(const TableEntries& entries) { move_to(entries, -2); }

 private:
  static constexpr int kTimeBins = kRows;  // sums by time of neighboring buckets

  // The state of a block is kKinds times its first bucket, plus one of these:
  static constexpr int kOne = 0;   // it has one bucket
  static constexpr int kTwo = 1;   // two buckets, and differences differ by less than 2^31
  static constexpr int kMany = 2;  // more buckets, and all differences are below 2^31
  static constexpr int kWide = 3;  // several buckets, and larger differences than kTwo or kMany
  static constexpr int kNone = 4;  // no row sees a key of the block, or the lane has no block
  static constexpr int kKinds = 8;

  static HSTU_DEVICE int kind_of(int state) { return state & (kKinds - 1); }
  static HSTU_DEVICE int bucket_of(int state) {
    return static_cast<int>(static_cast<uint32_t>(state) / kKinds);
  }

  HSTU_DEVICE int lane() const { return thread_ % 32; }

  // The range of differences that have the bucket of the lane's block in the tile found last; empty
  // if the block has several buckets.
  HSTU_DEVICE DifferenceRange& kept() {
    if constexpr (Memory::kHasKept) {
      return memory_.kept[lane()];
    } else {
      return kept_;
    }
  }

  // The place of the lane's block in the list: first those with two buckets, then those with more.
  HSTU_DEVICE int place_in_list(int kind, uint32_t two, uint32_t many) const {
    const uint32_t before = (1u << lane()) - 1;
    return kind == kTwo ? __popc(two & before) : __popc(two) + __popc(many & before);
  }

  // --- weights ---

  // Finds the bucket, or the buckets, of the lane's block.
  HSTU_DEVICE Block find_bucket(const TimesOfTile& times, int m, int row_block, int chunk,
                                const TimeRange& rows, const TimeRange& keys,
                                const DifferenceRange& differences) {
    const RelativeBias& bias = times.bias;
    const auto least = static_cast<uint32_t>(differences.least);
    const auto most = static_cast<uint32_t>(differences.most);
    const bool is_narrow = differences.most < uint64_t{1} << 31;
    // NOTE: both loads are issued before the first is waited for.
    const NarrowCell* const cells = times.cells();
    const NarrowCell low =
        ptx::ld_global_nc_volatile(cells + (is_narrow ? difference_cell(least) : 0));
    const NarrowCell high =
        ptx::ld_global_nc_volatile(cells + (is_narrow ? difference_cell(most) : 0));
    const bool is_low_past = least >= low.threshold;
    const bool is_high_past = most >= high.threshold;
    auto first = static_cast<int>(low.bucket) + is_low_past;
    auto last = static_cast<int>(high.bucket) + is_high_past;
    float first_weight = is_low_past ? low.high : low.low;
    float last_weight = is_high_past ? high.high : high.low;
    if (!is_narrow || ((low.bucket | high.bucket) & NarrowCell::kSeveral)) {
      first = hstu::bucket_of(bias, differences.least);
      last = hstu::bucket_of(bias, differences.most);
      first_weight = __ldg(times.weights() + first);
      last_weight = __ldg(times.weights() + last);
    }
    const int thresholds = min(bias.num_thresholds, bias.time.size - 1);
    const auto* const list = reinterpret_cast<const uint64_t*>(bias.thresholds) + first;
    const uint64_t next = first < thresholds ? __ldg(list) : UINT64_MAX;
    const bool is_one = first == last;
    kept() = {1, 0};
    if (is_one) kept() = {first > 0 ? __ldg(list - 1) : 0, next - 1};
    const bool is_short = differences.most - differences.least < uint64_t{1} << 31;
    const int kind = is_one                          ? kOne
                     : last - first == 1 && is_short ? kTwo
                     : is_narrow                     ? kMany
                                                     : kWide;
    Block block;
    const bool is_future = rows.latest <= keys.earliest && keys.latest > rows.earliest;
    block.offset = is_future ? -least : least;
    block.threshold = kind == kTwo ? static_cast<uint32_t>(next) - least : last;
    block.weights = ptx::cvt_satfinite_f16x2(first_weight, last_weight);
    block.place = chunk * 8 + row_block;
    state_ = first * kKinds + kind;
    weight_ = static_cast<uint16_t>(is_one ? block.weights : Weights::kPatch);
    if (!is_one && times.map.has_partial(m)) {
      const int row = m * kRows + row_block * 8;
      const Mask mask(times.mask, times.tile.sequence, times.head);
      if (times.first_key + chunk * 8 >= mask.estimate(row, row + 8).end) {
        state_ = kNone;
        weight_ = 0;
      }
    }
    return block;
  }

  // Writes the patches of the blocks with two buckets, which come first in the list. 8 lanes
  // process a block, each of them one key.
  HSTU_DEVICE void patch_two(int count, int parity, uint32_t* patches) const {
#pragma unroll 1
    for (int own = lane() / 8; own < count + lane() / 8; own += 4) {
      const Block block = ptx::ld_shared_volatile(&memory_.blocks[parity][min(own, count - 1)]);
      int differences[8];
      find_differences_of_key(block, block.offset, parity, differences);
      const auto threshold = static_cast<int>(block.threshold);
      const uint32_t low = __byte_perm(block.weights, 0, 0x1010);
      const uint32_t high = __byte_perm(block.weights, 0, 0x3232);
      uint32_t words[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        // A half is all ones if its difference is below the threshold, and zero otherwise.
        const uint32_t is_low =
            ptx::signs_of(differences[2 * n] - threshold, differences[2 * n + 1] - threshold);
        words[n] = (low & is_low) | (high & ~is_low);
      }
      if (own < count) store_patch(block, words, patches);
    }
  }

  // Writes the patches of the other blocks of the list, from `first` on, by looking up the bucket
  // of each score.
  HSTU_DEVICE void patch_many(const TimesOfTile& times, int first, int count, int parity, int m,
                              uint32_t* patches) const {
    const NarrowCell* const cells = times.cells();
#pragma unroll 1
    for (int own = first + lane() / 8; own < count + lane() / 8; own += 4) {
      const Block block = ptx::ld_shared_volatile(&memory_.blocks[parity][min(own, count - 1)]);
      const uint32_t key = keys_.blocks[block.chunk()].times[lane() % 8];
      uint32_t buckets = 0;
      // NOTE: the loop is not unrolled, to save space in the instruction cache.
#pragma unroll 1
      for (int first_row = 0; first_row < 8; first_row += 4) {
        uint32_t rows[4];
        ptx::ld_shared(memory_.rows[parity] + block.row() + first_row, rows);
        uint32_t differences[4];
        NarrowCell found[4];
        float x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          differences[n] = abs(static_cast<int>(rows[n] - key));
          found[n] = ptx::ld_global_nc_volatile(cells + difference_cell(differences[n]));
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          buckets |= found[n].bucket;
          x[n] = differences[n] >= found[n].threshold ? found[n].high : found[n].low;
        }
        if (own < count) {
          uint32_t* const to = patch_of(block, lane() % 8, patches) + first_row / 2;
          *reinterpret_cast<uint2*>(to) = {ptx::cvt_satfinite_f16x2(x[0], x[1]),
                                           ptx::cvt_satfinite_f16x2(x[2], x[3])};
        }
      }
      const bool has_search = buckets & NarrowCell::kSeveral;
      if (__any_sync(kAllLanes, has_search)) {
        if (has_search && own < count) patch_key(times, block, m, patches);
      }
    }
  }

  // The differences of the lane's key and 8 rows.
  HSTU_DEVICE void find_differences_of_key(const Block& block, uint32_t offset, int parity,
                                           int (&differences)[8]) const {
    const uint32_t* const rows = memory_.rows[parity] + block.row();
    uint32_t low[4], high[4];
    ptx::ld_shared(rows, low);
    ptx::ld_shared(rows + 4, high);
    const uint32_t key = keys_.blocks[block.chunk()].times[lane() % 8] + offset;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      differences[n] = abs(static_cast<int>(low[n] - key));
      differences[4 + n] = abs(static_cast<int>(high[n] - key));
    }
  }

  // Returns the place of the weights of 8 rows and of key n of a block.
  static HSTU_DEVICE uint32_t* patch_of(const Block& block, int n, uint32_t* patches) {
    return patches + block.place * 32 + n * 4;
  }
  HSTU_DEVICE void store_patch(const Block& block, const uint32_t (&words)[4],
                               uint32_t* patches) const {
    *reinterpret_cast<uint4*>(patch_of(block, lane() % 8, patches)) = {words[0], words[1], words[2],
                                                                       words[3]};
  }

  // Writes the part of a patch that belongs to the lane's key. It searches for buckets, so that
  // differences of times may be of any size.
  HSTU_DEVICE void patch_key(const TimesOfTile& times, const Block& block, int m,
                             uint32_t* patches) const {
    const int64_t key_time = times.time_of_key(block.chunk() * 8 + lane() % 8);
    uint32_t* const words = patch_of(block, lane() % 8, patches);
#pragma unroll 1
    for (int n = 0; n < 8; n += 2) {
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int64_t row_time = times.time_of_row(m * kRows + block.row() + n + e);
        const int bucket = hstu::bucket_of(times.bias, time_difference(row_time, key_time));
        x[e] = __ldg(times.weights() + bucket);
      }
      words[n / 2] = ptx::cvt_satfinite_f16x2(x[0], x[1]);
    }
  }

  // Writes the patches of the blocks of `lanes` by patch_key().
  HSTU_DEVICE void patch_exactly(const TimesOfTile& times, uint32_t lanes, int m,
                                 uint32_t* patches) const {
#pragma unroll 1
    for (; lanes; lanes &= lanes - 1) {
      if (lane() >= 8) continue;
      Block block;
      block.place = place_of(__ffs(static_cast<int>(lanes)) - 1);
      patch_key(times, block, m, patches);
    }
  }

  // The place in the tile of a lane's block.
  HSTU_DEVICE int place_of(int owner) const {
    return Blocks::chunk_of(Blocks::group_of(thread_ / 32 * 32 + owner), owner % 8) * 8 +
           Blocks::row_block_of(owner % 8);
  }

  // --- sums ---

  // Makes sums_ hold buckets `first` and `first` + 1. Sums of other buckets are added to the table.
  HSTU_DEVICE void move_to(const TableEntries& entries, int first) {
    const int distance = first - base_;
    const bool keeps_first = distance == 0 || distance == -1;
    const bool keeps_second = distance == 0 || distance == 1;
    // NOTE: the loop is not unrolled, to save space in the instruction cache.
#pragma unroll 1
    for (int n = 0; n < 2; ++n) {
      if (n == 0 ? keeps_first : keeps_second) continue;
      entries.sums.time.add(entries.first_time + base_ + n, n == 0 ? sums_[0] : sums_[1]);
    }
    const float low = keeps_first ? sums_[0] : 0;
    const float high = keeps_second ? sums_[1] : 0;
    sums_[0] = distance == 0 ? low : distance == 1 ? high : 0;
    sums_[1] = distance == 0 ? high : distance == -1 ? low : 0;
    base_ = first;
  }

  // A row of 8 elements of a block.
  HSTU_DEVICE uint4 read_row(const Block& block, const Element* ds) const {
    const int r = lane() % 8;
    return *Blocks::chunk_at(ds + r * 64, block.row(), r, block.chunk());
  }
  static HSTU_DEVICE void unpack(const uint4& words, float (&x)[8]) {
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      x[2 * n] = low_half<Element>(pairs[n]);
      x[2 * n + 1] = high_half<Element>(pairs[n]);
    }
  }

  // The differences of a row and 8 keys.
  HSTU_DEVICE void find_differences_of_row(const Block& block, uint32_t row,
                                           uint32_t (&differences)[8]) const {
    const uint32_t* const keys = keys_.blocks[block.chunk()].times;
    uint32_t low[4], high[4];
    ptx::ld_shared(keys, low);
    ptx::ld_shared(keys + 4, high);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      differences[n] = abs(static_cast<int>(row - low[n]));
      differences[4 + n] = abs(static_cast<int>(row - high[n]));
    }
  }

  // The sum of the elements in the second bucket of the lane's block, if it has two.
  HSTU_DEVICE float sum_above(int kind, uint32_t two, int parity, const Element* ds) const {
    const int count = __popc(two);
    const int own = place_in_list(kTwo, two, 0);
    float result = 0;
#pragma unroll 1
    for (int first = 0; first < count; first += 4) {
      const int n = min(first + lane() / 8, count - 1);
      const Block block = ptx::ld_shared_volatile(&memory_.blocks[parity][n]);
      float x[8];
      unpack(read_row(block, ds), x);
      uint32_t differences[8];
      const uint32_t row = memory_.rows[parity][block.row() + lane() % 8];
      find_differences_of_row(block, row - block.offset, differences);
      float above[2] = {};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (differences[e] >= block.threshold) above[e % 2] += x[e];
      }
      float sum = above[0] + above[1];
#pragma unroll
      for (int distance = 4; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, distance);
      }
      const float own_sum = __shfl_sync(kAllLanes, sum, own % 4 * 8);
      if (kind == kTwo && own / 4 == first / 4) result = own_sum;
    }
    return result;
  }

  // Adds the blocks of the lanes `many` score by score: first as integers in shared memory, whose
  // sums do not depend on the order, and then to the TableSum.
  HSTU_DEVICE void add_many(const TableEntries& entries, const TimesOfTile& times, int kind,
                            uint32_t two, uint32_t many, int m, int parity, const Element* ds) {
    const int list = __popc(two);
    const int count = list + __popc(many);
    const bool is_own = kind == kMany;
    const int own = place_in_list(kind, two, many);
    const auto lowest = static_cast<int>(
        __reduce_min_sync(kAllLanes, is_own ? static_cast<uint32_t>(bucket_of(previous_)) : ~0u));
    uint32_t largest = 0;
#pragma unroll 1
    for (int n = list + lane() / 8; n < count; n += 4) {
      const uint4 words = read_row(memory_.blocks[parity][n], ds);
      largest = larger_magnitudes<Element>(
          larger_magnitudes<Element>(larger_magnitudes<Element>(words.x, words.y),
                                     larger_magnitudes<Element>(words.z, words.w)),
          largest);
    }
    const uint32_t largest_bits =
        __reduce_max_sync(kAllLanes, max(__float_as_uint(fabsf(low_half<Element>(largest))),
                                         __float_as_uint(fabsf(high_half<Element>(largest)))));
    const FixedPoint fixed = FixedPoint::of_largest(largest_bits);
    uint32_t rows[kTimeBins / 32];
#pragma unroll
    for (int n = 0; n < kTimeBins / 32; ++n) rows[n] = memory_.rows[parity][n * 32 + lane()];
    __syncwarp();  // all lanes have loaded the times that the bins overwrite
    int* const bins = reinterpret_cast<int*>(memory_.rows[parity]);
#pragma unroll
    for (int bin = 0; bin < kTimeBins; bin += 32) bins[bin + lane()] = 0;
    __syncwarp();
#pragma unroll 1
    for (int first = list; first < count; first += 4) {
      const int n = min(first + lane() / 8, count - 1);
      const Block block = ptx::ld_shared_volatile(&memory_.blocks[parity][n]);
      const bool is_added = first + lane() / 8 < count && is_in_bins(block.threshold, lowest);
      add_to_bins(times, block, is_added, rows, ds, fixed, bins - lowest);
    }
    __syncwarp();
#pragma unroll
    for (int bin = lane(); bin < kTimeBins; bin += 32) {
      const int addend = bins[bin];
      if (addend == 0) continue;
      entries.sums.time.add(entries.first_time + lowest + bin, fixed.to_float(addend));
    }
    __syncwarp();
    const bool is_slow = is_own && !is_in_bins(memory_.blocks[parity][own].threshold, lowest);
    const uint32_t slow = __ballot_sync(kAllLanes, is_slow);
    if (__builtin_expect(slow != 0, 0)) add_exactly(entries, times, slow, m, ds);
  }

  // True if there is a bin for each bucket of a block whose last one is `last_bucket`.
  static HSTU_DEVICE bool is_in_bins(uint32_t last_bucket, int lowest) {
    return static_cast<int>(last_bucket) - lowest < kTimeBins;
  }

  // Adds the lane's row of a block, if `is_added`.
  HSTU_DEVICE void add_to_bins(const TimesOfTile& times, const Block& block, bool is_added,
                               const uint32_t (&rows)[kTimeBins / 32], const Element* ds,
                               const FixedPoint& fixed, int* bins) const {
    const int row = block.row() + lane() % 8;
    const uint32_t low_row = __shfl_sync(kAllLanes, rows[0], row);
    const uint32_t high_row = __shfl_sync(kAllLanes, rows[1], row);
    if (!is_added) return;
    const uint32_t row_time = row < 32 ? low_row : high_row;
    const auto* const elements = reinterpret_cast<const uint2*>(
        Blocks::chunk_at(ds + lane() % 8 * 64, block.row(), lane() % 8, block.chunk()));
    // NOTE: the loop is not unrolled, to save space in the instruction cache.
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      uint32_t keys[4];
      ptx::ld_shared(keys_.blocks[block.chunk()].times + half * 4, keys);
      const uint2 words = elements[half];
      const float x[4] = {low_half<Element>(words.x), high_half<Element>(words.x),
                          low_half<Element>(words.y), high_half<Element>(words.y)};
      uint32_t differences[4];
      NarrowCell cells[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        differences[n] = abs(static_cast<int>(row_time - keys[n]));
        cells[n] = load_cell(times.cells() + difference_cell(differences[n]));
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        int bucket = cells[n].bucket + (differences[n] >= cells[n].threshold ? 1 : 0);
        if (cells[n].bucket & NarrowCell::kSeveral) {
          bucket = hstu::bucket_of(times.bias, differences[n]);
        }
        const int addend = fixed.small_to_integer(x[n]);
        if (addend != 0) atomicAdd(bins + bucket, addend);
      }
    }
  }

  // Adds the blocks of some lanes to the TableSum, score by score. Times and elements of dS may
  // have any values.
  HSTU_DEVICE void add_exactly(const TableEntries& entries, const TimesOfTile& times,
                               uint32_t lanes, int m, const Element* ds) const {
#pragma unroll 1
    for (; lanes; lanes &= lanes - 1) {
      Block block;
      block.place = place_of(__ffs(static_cast<int>(lanes)) - 1);
      const int r = lane() / 4;
      const auto* const x = reinterpret_cast<const Element*>(
          Blocks::chunk_at(ds + r * 64, block.row(), r, block.chunk()));
      const int64_t row_time = times.time_of_row(m * kRows + block.row() + r);
#pragma unroll 1
      for (int n = lane() % 4 * 2; n < lane() % 4 * 2 + 2; ++n) {
        const int64_t key_time = times.time_of_key(block.chunk() * 8 + n);
        const int bucket = hstu::bucket_of(times.bias, time_difference(row_time, key_time));
        entries.sums.time.add(entries.first_time + bucket, static_cast<float>(x[n]));
      }
    }
  }

  int thread_;
  const KeyTimes<kKeys>& keys_;
  Memory& memory_;
  DifferenceRange kept_ = {1, 0};  // used if shared memory has no room for kept()
  uint16_t weight_ = 0;
  int state_ = kNone;
  int previous_ = kNone;  // the state of the tile before
  int base_ = 0;
  float sums_[2] = {};  // of dS in buckets base_ and base_ + 1
};

}  // namespace hstu::sm90
