// Quantizes Q, K and V to e4m3.
//
// A block of threads takes 128 rows of one head of Q, K or V, and holds them in registers: so one
// pass over the inputs finds the largest magnitude of the rows and converts them. Scales of whole
// sequences need their largest magnitude before, and smooth_k the mean of K: a kernel for each.
#include "../common/arena.h"
#include "../common/cuda_check.h"
#include "../common/device_math.h"
#include "../scheduler/work_list.h"
#include "codes.h"
#include "quantize.h"

namespace hstu {
namespace {

constexpr int kPiece = 8;  // elements of a row that a thread holds
constexpr int kSteps = 8;  // rows that a thread holds a piece of
constexpr int kRowsAtOnce = Fp8Params::kBlock / kSteps;

// Blocks of a multiprocessor: with 80 registers a thread, or 64 where a block has 512 threads. Each
// thread has 128 bytes of rows under way.
constexpr int blocks_per_sm(int lanes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  return 1;  // conversions to e4m3 are no single instructions and take more registers
#else
  return (lanes <= 16 ? 768 : 1024) / (lanes * kRowsAtOnce);
#endif
}

// A norm is multiplied by this, so that it is an upper bound although its sum is rounded.
constexpr float kNormMargin = 1.0f + 0x1p-12f;

struct E4m3 {};

// ------------------------------------------------------------------------------------- blocks

enum class Part : int { kQ, kK, kV };

// Rows of a sequence that a block of threads quantizes.
struct RowBlock {
  int sequence = 0;
  int64_t number = 0;  // see first_tile()
  int64_t begin = 0;   // the first row in the packed tensor
  int rows = 0;        // at most Fp8Params::kBlock; 0: there is no such block
};

// Finds block `number` of Q or of K and V. Called by all lanes of a warp.
HSTU_DEVICE RowBlock find_block(const BatchParams& batch, bool is_q, int64_t number) {
  const IndexArray& offsets = is_q ? batch.cu_seqlens_q : batch.cu_seqlens_k;
  const IndexArray& used = is_q ? batch.seqused_q : batch.seqused_k;
  const int64_t total = is_q ? batch.total_q : batch.total_k;
  const int lane = threadIdx.x % 32;
  // The last sequence that does not begin after the block is one of `count`, from `low` on.
  int low = 0, count = batch.batch;
  while (count > 1) {
    const int step = ceil_div(count, 32);
    const int b = low + lane * step;
    const bool is_before =
        lane * step < count &&
        (lane == 0 || first_tile(clamp(offsets[b], 0, total), b, Fp8Params::kBlock) <= number);
    const int last = 31 - __clz(__ballot_sync(~0u, is_before));
    low += last * step;
    count = min(step, count - last * step);
  }
  const int64_t begin = clamp(offsets[low], 0, total);
  const int64_t room = clamp(offsets[low + 1], begin, total) - begin;
  const int64_t length = used ? clamp(used[low], 0, room) : room;
  const int64_t first = (number - first_tile(begin, low, Fp8Params::kBlock)) * Fp8Params::kBlock;
  if (first < 0 || first >= length) return {};
  return {low, number, begin + first,
          static_cast<int>(clamp(length - first, 0, Fp8Params::kBlock))};
}

// -------------------------------------------------------------------------------------- pieces

// kPiece elements of a row.
template <typename Element>
struct Piece {
  static constexpr bool kIsE4m3 = std::is_same_v<Element, E4m3>;
  static constexpr int kElementBytes = kIsE4m3 ? 1 : 2;
  using Words = std::conditional_t<kIsE4m3, uint2, uint4>;

  alignas(Words) uint32_t words[sizeof(Words) / 4];

  HSTU_DEVICE void load(const PackedTensor& tensor, int64_t row, int head, int column,
                        bool exists) {
    Words loaded = {};
    if (exists) {
      const int64_t element = row * tensor.row_stride + head * tensor.head_stride + column;
      loaded = __ldg(reinterpret_cast<const Words*>(static_cast<const char*>(tensor.data) +
                                                    element * kElementBytes));
    }
    *reinterpret_cast<Words*>(words) = loaded;
  }

  HSTU_DEVICE float operator[](int n) const {
    return n % 2 ? high_half<Element>(words[n / 2]) : low_half<Element>(words[n / 2]);
  }

  HSTU_DEVICE void set_nan(int n) { words[n / 2] |= n % 2 ? 0x7fff0000u : 0x7fffu; }
};

template <int kLanes, typename Combine>
HSTU_DEVICE float reduce_lanes(float x, Combine combine) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
struct Largest {
  HSTU_DEVICE float operator()(float x, float y) const { return fmaxf(x, y); }
};
struct Sum {
  HSTU_DEVICE float operator()(float x, float y) const { return x + y; }
};

// The largest `x` of a block of threads. `scratch` has 32 elements; all threads call it.
template <int kThreads>
HSTU_DEVICE float largest_of_block(float x, float* scratch) {
  x = reduce_lanes<32>(x, Largest());
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) x = fmaxf(x, scratch[warp]);
  return x;
}

// ----------------------------------------------------------------------------------- workspace

// Device memory of a call. What must be zero before the kernels run comes first.
struct Workspace {
  int* finished = nullptr;      // [B, H] with smooth_k: blocks whose sums are written
  unsigned* largest = nullptr;  // [3, B, H]: bits of the largest magnitudes of Q, K and V
  int64_t zeroed_bytes = 0;
  float* mean = nullptr;        // [B, H, D] of K
  float* block_sums = nullptr;  // [blocks, H, D] of K
  int64_t bytes = 0;

  explicit Workspace(const QuantizeParams& params) {
    Arena<16> arena(params.workspace);
    const int64_t sequences = int64_t{params.batch.batch} * params.heads;
    if (params.smooth_k) finished = arena.take<int>(sequences);
    if (params.mode >= QuantMode::kHead) largest = arena.take<unsigned>(3 * sequences);
    zeroed_bytes = arena.used();
    if (params.smooth_k) {
      mean = params.k_mean ? params.k_mean : arena.take<float>(sequences * params.k.head_dim);
      block_sums = arena.take<float>(max_blocks(params.batch.total_k, params.batch.batch) *
                                     params.heads * params.k.head_dim);
    }
    bytes = arena.used();
  }
};

// The place in Workspace::largest of a part of sequence `b`.
HSTU_DEVICE int64_t largest_index(const QuantizeParams& params, Part part, int b, int head) {
  const int64_t first = static_cast<int>(part) * int64_t{params.batch.batch} * params.heads;
  switch (params.mode) {
    case QuantMode::kHead:
      return first + int64_t{b} * params.heads + head;
    case QuantMode::kSequence:
      return first + b;
    default:
      return first;
  }
}

// ------------------------------------------------------------------------------------- a block

// The rows of a block of threads: each row of a head is divided among kLanes lanes.
template <typename Element, int kLanes>
struct Rows {
  static constexpr int kThreads = kLanes * kRowsAtOnce;

  const QuantizeParams& params;
  const PackedTensor& tensor;
  RowBlock block;
  int head;
  int row;     // the first row of this thread; the next are kRowsAtOnce further each
  int column;  // of this thread's pieces
  Piece<Element> pieces[kSteps];
  float mean[kPiece];  // K's, where it is subtracted or multiplied with; else 0

  HSTU_DEVICE Rows(const QuantizeParams& params, const PackedTensor& tensor, const RowBlock& block,
                   int head)
      : params(params),
        tensor(tensor),
        block(block),
        head(head),
        row(threadIdx.x / kLanes),
        column(threadIdx.x % kLanes * kPiece) {
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      const int r = row + n * kRowsAtOnce;
      pieces[n].load(tensor, block.begin + r, head, column,
                     r < block.rows && column < tensor.head_dim);
    }
#pragma unroll
    for (float& x : mean) x = 0.0f;
  }

  HSTU_DEVICE void load_mean(const float* means) {
    if (column >= tensor.head_dim) return;
    const int64_t at = (int64_t{block.sequence} * params.heads + head) * tensor.head_dim + column;
#pragma unroll
    for (int n = 0; n < kPiece; n += 4) {
      *reinterpret_cast<float4*>(mean + n) = *reinterpret_cast<const float4*>(means + at + n);
    }
  }

  HSTU_DEVICE bool has_row(int step) const { return row + step * kRowsAtOnce < block.rows; }

  // The element without the mean if `subtracts`.
  HSTU_DEVICE float value(int step, int n, bool subtracts) const {
    const float x = pieces[step][n];
    return subtracts ? x - mean[n] : x;
  }

  HSTU_DEVICE float largest_of_row(int step, bool subtracts) const {
    float largest = 0.0f;
    // NOTE: a row without elements has no mean to subtract.
    if (has_row(step)) {
#pragma unroll
      for (int n = 0; n < kPiece; ++n) {
        largest = fmaxf(largest, fabsf(value(step, n, subtracts)));  // not NaN
      }
    }
    return largest;
  }

  // Returns this thread's largest finite magnitude. Infinities become NaN.
  HSTU_DEVICE float find_largest(bool subtracts) {
    float largest = 0.0f;
#pragma unroll
    for (int n = 0; n < kSteps; ++n) largest = fmaxf(largest, largest_of_row(n, subtracts));
    if (is_finite(largest)) return largest;
    largest = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int n = 0; n < kPiece; ++n) {
        if (!is_finite(value(step, n, subtracts))) pieces[step].set_nan(n);
      }
      largest = fmaxf(largest, largest_of_row(step, subtracts));
    }
    return largest;
  }

  // The codes of a piece, with reciprocal `scale` of the descale.
  HSTU_DEVICE uint2 codes(int step, bool subtracts, float scale) const {
    if constexpr (Piece<Element>::kIsE4m3) {
      return {pieces[step].words[0], pieces[step].words[1]};
    } else {
      if (!has_row(step) || column >= tensor.head_dim) return {};
      uint32_t pairs[kPiece / 2];
#pragma unroll
      for (int n = 0; n < kPiece; n += 2) {
        const float2 two = {value(step, n, subtracts) * scale,
                            value(step, n + 1, subtracts) * scale};
        pairs[n / 2] = __nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3);
      }
      return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
    }
  }

  // sum_of_rounded_squares() of the codes of a row, with reciprocal `scale` of the descale.
  HSTU_DEVICE float rounded_squares_of_row(int step, bool subtracts, float scale) const {
    return reduce_lanes<kLanes>(sum_of_rounded_squares(codes(step, subtracts, scale)), Sum());
  }
};

// --------------------------------------------------------------------------------- K's mean

// Writes the mean of K over each sequence and head. The sums of blocks are added by the last block
// of threads of a sequence and head, in an order that depends on nothing but their number.
template <typename Element, int kLanes>
__global__ void __launch_bounds__(kLanes* kRowsAtOnce)
    mean_kernel(const __grid_constant__ QuantizeParams params,
                const __grid_constant__ Workspace workspace) {
  constexpr int kColumns = kLanes * kPiece;
  __shared__ float sums[kRowsAtOnce][kColumns];
  __shared__ bool is_last;
  const int head = blockIdx.x % params.heads;
  const RowBlock block = find_block(params.batch, false, blockIdx.x / params.heads);
  if (block.rows == 0) return;
  const int head_dim = params.k.head_dim;
  const Rows<Element, kLanes> rows(params, params.k, block, head);
#pragma unroll
  for (int n = 0; n < kPiece; ++n) {
    float sum = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float x = rows.pieces[step][n];
      sum += is_finite(x) ? x : 0.0f;
    }
    sums[rows.row][rows.column + n] = sum;
  }
  __syncthreads();
  // Two threads have each column.
  const int column = threadIdx.x % kColumns;
  const int half = threadIdx.x / kColumns;
  float* const block_sums = workspace.block_sums + head * head_dim + column;
  const int64_t stride = int64_t{params.heads} * head_dim;
  if (half == 0 && column < head_dim) {
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) sum += sums[r][column];
    block_sums[block.number * stride] = sum;
    __threadfence();
  }
  __syncthreads();
  const int64_t begin = clamp(params.batch.cu_seqlens_k[block.sequence], 0, params.batch.total_k);
  const int64_t first = first_tile(begin, block.sequence, Fp8Params::kBlock);
  const int64_t room =
      clamp(params.batch.cu_seqlens_k[block.sequence + 1], begin, params.batch.total_k) - begin;
  const int64_t length =
      params.batch.seqused_k ? clamp(params.batch.seqused_k[block.sequence], 0, room) : room;
  const int64_t blocks = ceil_div(length, Fp8Params::kBlock);
  const int64_t own = int64_t{block.sequence} * params.heads + head;
  if (threadIdx.x == 0) is_last = atomicAdd(workspace.finished + own, 1) == blocks - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  float sum = 0.0f;
  if (column < head_dim) {
#pragma unroll 8
    for (int64_t n = half; n < blocks; n += 2) sum += __ldcg(block_sums + (first + n) * stride);
  }
  sums[half][column] = sum;
  __syncthreads();
  if (half == 0 && column < head_dim) {
    workspace.mean[own * head_dim + column] =
        (sums[0][column] + sums[1][column]) / static_cast<float>(length);
  }
}

// --------------------------------------------------------------------------- largest magnitudes

template <typename Element, int kLanes>
__global__ void __launch_bounds__(kLanes* kRowsAtOnce)
    largest_kernel(const __grid_constant__ QuantizeParams params,
                   const __grid_constant__ Workspace workspace) {
  __shared__ float scratch[32];
  const int64_t q_blocks = max_blocks(params.batch.total_q, params.batch.batch);
  const int64_t k_blocks = max_blocks(params.batch.total_k, params.batch.batch);
  const int head = blockIdx.x % params.heads;
  const int64_t index = blockIdx.x / params.heads;
  const Part part = index < q_blocks ? Part::kQ : index < q_blocks + k_blocks ? Part::kK : Part::kV;
  const int64_t number =
      index - (part == Part::kQ ? 0 : q_blocks) - (part == Part::kV ? k_blocks : 0);
  const RowBlock block = find_block(params.batch, part == Part::kQ, number);
  if (block.rows == 0) return;
  const PackedTensor& tensor = part == Part::kQ ? params.q : part == Part::kK ? params.k : params.v;
  Rows<Element, kLanes> rows(params, tensor, block, head);
  const bool subtracts = part == Part::kK && params.smooth_k;
  if (subtracts) rows.load_mean(workspace.mean);
  using Block = Rows<Element, kLanes>;
  const float largest = largest_of_block<Block::kThreads>(rows.find_largest(subtracts), scratch);
  if (threadIdx.x == 0) {
    atomicMax(workspace.largest + largest_index(params, part, block.sequence, head),
              __float_as_uint(largest));
  }
}

// ------------------------------------------------------------------------------------ quantize

// The values of a block of keys, on their way to the order of v8.
template <int kLanes>
struct Transpose {
  // A row of words, each of four channels of a key. Rows begin in the same bank.
  static constexpr int kRowWords = larger(kLanes * kPiece / 4, 32);

  alignas(16) uint32_t words[Fp8Params::kBlock * kRowWords];

  // The place of a word. Neither the writes nor the reads have bank conflicts: 8 lanes write
  // neighboring pairs of words of a row, and 8 read the same word of rows that are 16 apart.
  static HSTU_DEVICE int at(int key, int word) {
    return key * kRowWords + (word ^ key / 16 % 8 * 4 ^ key % 2 * 16);
  }

  HSTU_DEVICE void write(int key, int column, const uint2& codes) {
    *reinterpret_cast<uint2*>(words + at(key, column / 4)) = codes;
  }

  // Writes four channels of 16 keys: the four words at each position, turned.
  HSTU_DEVICE void store(uint8_t* v8, int head_dim) const {
    const int group = threadIdx.x % 8;  // 16 keys
    const int word = threadIdx.x / 8;   // four channels
    if (word * 4 >= head_dim) return;
    uint32_t channels[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t x[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) x[m] = words[at(group * 16 + key_at(4 * n + m), word)];
      const uint32_t low01 = __byte_perm(x[0], x[1], 0x5140);  // channels 0 and 1 of two keys
      const uint32_t high01 = __byte_perm(x[0], x[1], 0x7362);
      const uint32_t low23 = __byte_perm(x[2], x[3], 0x5140);
      const uint32_t high23 = __byte_perm(x[2], x[3], 0x7362);
      channels[0][n] = __byte_perm(low01, low23, 0x5410);
      channels[1][n] = __byte_perm(low01, low23, 0x7632);
      channels[2][n] = __byte_perm(high01, high23, 0x5410);
      channels[3][n] = __byte_perm(high01, high23, 0x7632);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      *reinterpret_cast<uint4*>(v8 + (word * 4 + n) * Fp8Params::kBlock + group * 16) = {
          channels[n][0], channels[n][1], channels[n][2], channels[n][3]};
    }
  }
};

// The descale of all rows of a block, unless each row has its own.
template <typename Element, int kLanes>
HSTU_DEVICE float block_descale(Rows<Element, kLanes>& rows, Part part, bool subtracts,
                                const Workspace& workspace, float* scratch) {
  const QuantizeParams& params = rows.params;
  if constexpr (Piece<Element>::kIsE4m3) {
    const GivenDescale& given = part == Part::kQ   ? params.given_q
                                : part == Part::kK ? params.given_k
                                                   : params.given_v;
    const int64_t index = given.per == GivenDescale::Per::kSequence ? rows.block.sequence
                          : given.per == GivenDescale::Per::kBlock  ? rows.block.number
                                                                    : 0;
    return given.data[index * given.stride + rows.head * given.head_stride];
  } else {
    const float largest = rows.find_largest(subtracts);
    switch (params.mode) {
      case QuantMode::kCast:
        return 1.0f;
      case QuantMode::kRow:
        if (part == Part::kQ) return 1.0f;  // not used
        [[fallthrough]];
      case QuantMode::kBlock: {
        constexpr int kThreads = Rows<Element, kLanes>::kThreads;
        const float descale = descale_of(largest_of_block<kThreads>(largest, scratch));
        if (part == Part::kV) return descale;
        float squares = 0.0f;
#pragma unroll
        for (int n = 0; n < kSteps; ++n) {
          squares = fmaxf(squares, rows.rounded_squares_of_row(n, subtracts, 0.5f / descale));
        }
        return descale * growth_of_descale(largest_of_block<kThreads>(squares, scratch));
      }
      default:
        return descale_of(__uint_as_float(
            workspace.largest[largest_index(params, part, rows.block.sequence, rows.head)]));
    }
  }
}

template <typename Element, int kLanes>
HSTU_DEVICE void quantize_q(Rows<Element, kLanes>& rows, const Workspace& workspace,
                            float* scratch) {
  const QuantizeParams& params = rows.params;
  const int head_dim8 = round_up(params.q.head_dim, kQuantizedHeadDimUnit);
  if (params.smooth_k) rows.load_mean(workspace.mean);
  float descale = block_descale(rows, Part::kQ, false, workspace, scratch);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int64_t row = rows.block.begin + rows.row + step * kRowsAtOnce;
    const int64_t out = rows.head * params.batch.total_q + row;
    if constexpr (Piece<Element>::kIsE4m3) {
      const GivenDescale& given = params.given_q;
      if (given.per == GivenDescale::Per::kRow && rows.has_row(step)) {
        descale = given.data[row * given.stride + rows.head * given.head_stride];
      }
    } else if (params.mode == QuantMode::kRow) {
      const float largest = reduce_lanes<kLanes>(rows.largest_of_row(step, false), Largest());
      descale = descale_of(largest);
      descale *= growth_of_descale(rows.rounded_squares_of_row(step, false, 0.5f / descale));
    }
    const uint2 codes = rows.codes(step, false, 1.0f / descale);
    const float squares = reduce_lanes<kLanes>(sum_of_squares(codes), Sum());
    float product = 0.0f;
    if constexpr (!Piece<Element>::kIsE4m3) {
      if (params.smooth_k) {
#pragma unroll
        for (int n = 0; n < kPiece; ++n) product += rows.pieces[step][n] * rows.mean[n];
        product = reduce_lanes<kLanes>(product, Sum());
      }
    }
    if (!rows.has_row(step)) continue;
    if (params.q8 && rows.column < head_dim8) {
      *reinterpret_cast<uint2*>(params.q8 + (row * params.heads + rows.head) * head_dim8 +
                                rows.column) = codes;
    }
    if (rows.column != 0) continue;
    params.q_descale[out] = descale;
    params.q_norm[out] = sqrtf(squares) * descale * kNormMargin;
    if (params.smooth_k) params.q_mean_product[out] = product;
  }
}

template <typename Element, int kLanes>
HSTU_DEVICE void quantize_k(Rows<Element, kLanes>& rows, const Workspace& workspace,
                            float* scratch) {
  const QuantizeParams& params = rows.params;
  const int head_dim8 = round_up(params.k.head_dim, kQuantizedHeadDimUnit);
  if (params.smooth_k) rows.load_mean(workspace.mean);
  const float descale = block_descale(rows, Part::kK, params.smooth_k, workspace, scratch);
  float most_squares = 0.0f;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int64_t row = rows.block.begin + rows.row + step * kRowsAtOnce;
    const uint2 codes = rows.codes(step, params.smooth_k, 1.0f / descale);
    most_squares = fmaxf(most_squares, reduce_lanes<kLanes>(sum_of_squares(codes), Sum()));
    if (params.k8 && rows.has_row(step) && rows.column < head_dim8) {
      *reinterpret_cast<uint2*>(params.k8 + (row * params.heads + rows.head) * head_dim8 +
                                rows.column) = codes;
    }
  }
  most_squares = largest_of_block<Rows<Element, kLanes>::kThreads>(most_squares, scratch);
  if (threadIdx.x != 0) return;
  const int64_t out =
      rows.head * max_blocks(params.batch.total_k, params.batch.batch) + rows.block.number;
  params.k_descale[out] = descale;
  params.k_norm[out] = sqrtf(most_squares) * descale * kNormMargin;
}

template <typename Element, int kLanes>
HSTU_DEVICE void quantize_v(Rows<Element, kLanes>& rows, const Workspace& workspace, float* scratch,
                            Transpose<kLanes>& transpose) {
  const QuantizeParams& params = rows.params;
  const float descale = block_descale(rows, Part::kV, false, workspace, scratch);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    transpose.write(rows.row + step * kRowsAtOnce, rows.column,
                    rows.codes(step, false, 1.0f / descale));
  }
  __syncthreads();
  const int head_dim = params.v.head_dim;
  transpose.store(
      params.v8 + (rows.block.number * params.heads + rows.head) * head_dim * Fp8Params::kBlock,
      head_dim);
  if (threadIdx.x != 0) return;
  params.v_descale[rows.head * max_blocks(params.batch.total_k, params.batch.batch) +
                   rows.block.number] = descale;
}

template <typename Element, int kLanes>
__global__ void __launch_bounds__(kLanes* kRowsAtOnce, blocks_per_sm(kLanes))
    quantize_kernel(const __grid_constant__ QuantizeParams params,
                    const __grid_constant__ Workspace workspace) {
  __shared__ float scratch[32];
  __shared__ Transpose<kLanes> transpose;
  const int64_t q_blocks = max_blocks(params.batch.total_q, params.batch.batch);
  const int64_t k_blocks = max_blocks(params.batch.total_k, params.batch.batch);
  const int head = blockIdx.x % params.heads;
  const int64_t index = blockIdx.x / params.heads;
  const Part part = index < q_blocks ? Part::kQ : index < q_blocks + k_blocks ? Part::kK : Part::kV;
  const int64_t number =
      index - (part == Part::kQ ? 0 : q_blocks) - (part == Part::kV ? k_blocks : 0);
  const RowBlock block = find_block(params.batch, part == Part::kQ, number);
  if (block.rows == 0) return;
  const PackedTensor& tensor = part == Part::kQ ? params.q : part == Part::kK ? params.k : params.v;
  Rows<Element, kLanes> rows(params, tensor, block, head);
  switch (part) {
    case Part::kQ:
      return quantize_q(rows, workspace, scratch);
    case Part::kK:
      return quantize_k(rows, workspace, scratch);
    case Part::kV:
      return quantize_v(rows, workspace, scratch, transpose);
  }
}

// ------------------------------------------------------------------------------------- launches

template <typename Element, int kLanes>
void launch(const QuantizeParams& params, cudaStream_t stream) {
  const Workspace workspace(params);
  const int64_t q_blocks = max_blocks(params.batch.total_q, params.batch.batch);
  const int64_t k_blocks = max_blocks(params.batch.total_k, params.batch.batch);
  const auto grid = static_cast<unsigned>((q_blocks + 2 * k_blocks) * params.heads);
  constexpr int kThreads = kLanes * kRowsAtOnce;
  if (workspace.zeroed_bytes > 0) {
    check_cuda(cudaMemsetAsync(params.workspace, 0, workspace.zeroed_bytes, stream),
               "quantize_qkv");
  }
  if constexpr (!Piece<Element>::kIsE4m3) {
    if (params.smooth_k) {
      const auto blocks = static_cast<unsigned>(k_blocks * params.heads);
      mean_kernel<Element, kLanes><<<blocks, kThreads, 0, stream>>>(params, workspace);
    }
    if (workspace.largest) {
      largest_kernel<Element, kLanes><<<grid, kThreads, 0, stream>>>(params, workspace);
    }
  }
  quantize_kernel<Element, kLanes><<<grid, kThreads, 0, stream>>>(params, workspace);
  check_launch("quantize_qkv");
}

template <typename Element>
void launch(const QuantizeParams& params, cudaStream_t stream) {
  const int head_dim = larger(params.k.head_dim, params.v.head_dim);
  if (head_dim <= 64) return launch<Element, 8>(params, stream);
  if (head_dim <= 128) return launch<Element, 16>(params, stream);
  return launch<Element, 32>(params, stream);
}

}  // namespace

int64_t quantize_workspace_bytes(const QuantizeParams& params) { return Workspace(params).bytes; }

void quantize_qkv(const QuantizeParams& params, void* stream) {
  if (params.batch.batch == 0) return;
  const auto on = static_cast<cudaStream_t>(stream);
  if (params.dtype == DType::kFloat8E4M3) return launch<E4m3>(params, on);
  if (params.dtype == DType::kBFloat16) return launch<cutlass::bfloat16_t>(params, on);
  launch<cutlass::half_t>(params, on);
}

}  // namespace hstu
