// Quantizes Q, K and V to e4m3.
//
// A block of threads takes 128 rows of one head of Q, K or V, and holds them in registers: so one
// pass over the inputs finds the largest magnitude of the rows and converts them. Scales of whole
// sequences need the largest magnitude first, and smooth_k needs the mean of K: each is computed by
// one more kernel.
#include "../common/arena.h"
#include "../common/cuda_check.h"
#include "../common/static_switch.h"
#include "rows.h"

namespace hstu {
namespace {

// Resident blocks per multiprocessor, with 80 registers per thread, or 64 if a block has 512
// threads. Each thread has loads of 128 bytes in flight.
constexpr int blocks_per_sm(int lanes) {
  return (lanes <= 16 ? 768 : 1024) / (lanes * kRowsAtOnce);
}

// A norm is multiplied by this, so that it is an upper bound although its sum is rounded.
constexpr float kNormMargin = 1.0f + 0x1p-12f;

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

// The index in Workspace::largest of a part of sequence `b`.
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
    __threadfence();  // the sums are visible before the block counts as finished
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
  __threadfence();  // the sums of the other blocks are read after their counts
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
  const BlockOfPart own(params);
  if (!own.has_rows()) return;
  using Block = Rows<Element, kLanes>;
  Block rows(params, tensor_of(params, own.part), own.block, own.head);
  float of_steps[kSteps];
  if (own.part == Part::kK && params.smooth_k) {
    rows.load_mean(workspace.mean);
    rows.template find_largest<true>(of_steps);
  } else {
    rows.template find_largest<false>(of_steps);
  }
  const float largest = largest_of_block<Block::kThreads>(largest_of(of_steps), scratch);
  if (threadIdx.x == 0) {
    atomicMax(workspace.largest + largest_index(params, own.part, own.block.sequence, own.head),
              __float_as_uint(largest));
  }
}

// ------------------------------------------------------------------------------------ quantize

// Shared memory that transposes the values of a block of keys to the order of v8.
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

  // Writes four channels of 16 keys, with the four words of four channels transposed.
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

// Returns the descale of the rows of a block or, if is_by_row, of the row that the lane owns. It
// does not apply the norm rule.
template <bool kSubtracts, typename Element, int kLanes>
HSTU_DEVICE float base_descale(Rows<Element, kLanes>& rows, Part part, bool is_by_row,
                               const Workspace& workspace, float* scratch) {
  const QuantizeParams& params = rows.params;
  if constexpr (Piece<Element>::kIsE4m3) {
    const GivenDescale& given = part == Part::kQ   ? params.given_q
                                : part == Part::kK ? params.given_k
                                                   : params.given_v;
    int64_t index = given.per == GivenDescale::Per::kSequence ? rows.block.sequence
                    : given.per == GivenDescale::Per::kBlock  ? rows.block.number
                                                              : 0;
    if (given.per == GivenDescale::Per::kRow) {
      index = rows.has_row(rows.own_step()) ? rows.own_row() : rows.block.begin;
    }
    return given.data[index * given.stride + rows.head * given.head_stride];
  } else {
    float largest[kSteps];
    rows.template find_largest<kSubtracts>(largest);
    if (is_by_row) return descale_of(reduce_to_owners<kLanes>(largest, Largest()));
    if (params.mode == QuantMode::kCast) return 1.0f;
    if (params.mode > QuantMode::kBlock) {
      return descale_of(__uint_as_float(
          workspace.largest[largest_index(params, part, rows.block.sequence, rows.head)]));
    }
    return descale_of(
        largest_of_block<Rows<Element, kLanes>::kThreads>(largest_of(largest), scratch));
  }
}

// The scale with which a lane quantizes its row of Q or K.
struct Scale {
  float descale;
  float bound;  // of the norm of its codes times the descale; negative if not known
};

// `base` is the base_descale() of the rows.
template <bool kSubtracts, typename Element, int kLanes>
HSTU_DEVICE Scale row_scale(const Rows<Element, kLanes>& rows, float base, bool is_by_row,
                            float* scratch) {
  if constexpr (!Piece<Element>::kIsE4m3) {
    if (limits_norms(rows.params)) {
      float sums[kSteps];
      rows.template find_squares<kSubtracts>(0.5f / base, sums);
      const float squares = reduce_to_owners<kLanes>(sums, Sum());
      constexpr int kThreads = Rows<Element, kLanes>::kThreads;
      const float most = is_by_row ? squares : largest_of_block<kThreads>(squares, scratch);
      return {base * growth_of_descale(most), sqrtf(squares) * (2.0f * base) * kRounding};
    }
  }
  return {base, -1.0f};
}

// Writes the codes of the rows of Q or K, and returns the bound of the norm of the row that the
// lane owns.
template <bool kSubtracts, typename Element, int kLanes>
HSTU_DEVICE float write_rows(Rows<Element, kLanes>& rows, const Scale& scale, uint8_t* to) {
  const QuantizeParams& params = rows.params;
  const int head_dim8 = round_up(rows.tensor.head_dim, kQuantizedHeadDimUnit);
  const bool is_in_head = rows.column < head_dim8;
  const float reciprocal = 1.0f / scale.descale;
  const auto codes_of = [&](int step) {
    return rows.template codes<kSubtracts>(step, read_from_owner<kLanes>(reciprocal, step));
  };
  const int64_t first = (rows.block.begin + rows.row) * params.heads + rows.head;
  uint8_t* out = to + first * head_dim8 + rows.column;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint2 codes = codes_of(step);
    if (to && rows.has_row(step) && is_in_head) *reinterpret_cast<uint2*>(out) = codes;
    out += kRowsAtOnce * params.heads * head_dim8;
  }
  if (scale.bound >= 0.0f) return scale.bound;
  rows.forget_values();
  float squares[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const float sum = sum_of_squares(codes_of(step));
    squares[step] = rows.has_row(step) ? sum : 0.0f;
  }
  return sqrtf(reduce_to_owners<kLanes>(squares, Sum())) * scale.descale * kNormMargin;
}

// Writes the codes of a block transposed, in the order of v8. The rows of a step are multiplied by
// scale_of(step).
template <typename Element, int kLanes, typename Scale>
HSTU_DEVICE void write_columns(const Rows<Element, kLanes>& rows, uint8_t* to,
                               Transpose<kLanes>& transpose, Scale scale_of) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    transpose.write(rows.row + step * kRowsAtOnce, rows.column,
                    rows.template codes<false>(step, scale_of(step)));
  }
  __syncthreads();
  const int head_dim = rows.tensor.head_dim;
  const int64_t block = rows.block.number * rows.params.heads + rows.head;
  transpose.store(to + block * head_dim * Fp8Params::kBlock, head_dim);
}

// Writes and returns QuantizeParams::q_row_scale of the row of Q that the lane owns; 1: not wanted.
template <typename Element, int kLanes>
HSTU_DEVICE float write_row_scale(Rows<Element, kLanes>& rows, float descale) {
  const QuantizeParams& params = rows.params;
  if (!params.q_row_scale) return 1.0f;
  float largest[kSteps];
  rows.template find_largest<false>(largest);
  const float ratio = descale_of(reduce_to_owners<kLanes>(largest, Largest())) / descale;
  const float scale = fmaxf(round_up_to_power_of_two(ratio), kSmallestRowScale);
  if (rows.is_owner()) {
    params.q_row_scale[rows.head * params.batch.total_q + rows.own_row()] = scale;
  }
  return scale;
}

// Returns QuantizeParams::q_column_scale of the row that the lane owns.
template <typename Element, int kLanes>
HSTU_DEVICE float column_scale(const Rows<Element, kLanes>& rows, bool is_q) {
  const QuantizeParams& params = rows.params;
  if (!is_q || !params.q_column_scale || !rows.has_row(rows.own_step())) return 1.0f;
  return params.q_column_scale[rows.head * params.batch.total_q + rows.own_row()];
}

// Writes the descales, norms and products with the mean of K of the rows of Q. `bound` is the
// result of write_rows().
template <bool kIsSmooth, typename Element, int kLanes>
HSTU_DEVICE void write_factors_of_q(Rows<Element, kLanes>& rows, float descale, float bound,
                                    const Workspace& workspace) {
  const QuantizeParams& params = rows.params;
  const int64_t out = rows.head * params.batch.total_q + rows.own_row();
  if (rows.is_owner()) {
    params.q_descale[out] = descale;
    if (params.q_norm) params.q_norm[out] = bound;
  }
  if constexpr (kIsSmooth) {
    rows.load_mean(workspace.mean);
    float products[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      products[step] = 0.0f;
#pragma unroll
      for (int n = 0; n < kPiece; ++n) products[step] += rows.pieces[step][n] * rows.mean[n];
    }
    const float product = reduce_to_owners<kLanes>(products, Sum());
    if (rows.is_owner()) params.q_mean_product[out] = product;
  }
}

// Writes the descale and the norm of the rows of K. `bound` is the result of write_rows().
template <typename Element, int kLanes>
HSTU_DEVICE void write_factors_of_k(const Rows<Element, kLanes>& rows, float descale, float bound,
                                    float* scratch) {
  const QuantizeParams& params = rows.params;
  if (params.k_norm) bound = largest_of_block<Rows<Element, kLanes>::kThreads>(bound, scratch);
  if (threadIdx.x != 0) return;
  const int64_t out =
      rows.head * max_blocks(params.batch.total_k, params.batch.batch) + rows.block.number;
  params.k_descale[out] = descale;
  if (params.k_norm) params.k_norm[out] = bound;
}

// NOTE: the code is short, and shared by Q, K and V as far as possible: each instruction is
// executed once, and fetching it takes as long as executing it.
template <typename Element, int kLanes, bool kIsSmooth, bool kForBackward>
__global__ void __launch_bounds__(kLanes* kRowsAtOnce, blocks_per_sm(kLanes))
    quantize_kernel(const __grid_constant__ QuantizeParams params,
                    const __grid_constant__ Workspace workspace) {
  __shared__ float scratch[32];
  __shared__ Transpose<kLanes> transpose;
  const BlockOfPart own(params);
  if (!own.has_rows()) return;
  const Part part = own.part;
  Rows<Element, kLanes> rows(params, tensor_of(params, part), own.block, own.head);
  if (kIsSmooth && part == Part::kK) rows.load_mean(workspace.mean);
  const bool is_by_row = params.mode == QuantMode::kRow && part == Part::kQ;
  const float base = base_descale<kIsSmooth>(rows, part, is_by_row, workspace, scratch);
  rows.forget_values();
  if (part == Part::kV) {
    const float reciprocal = 1.0f / base;
    write_columns(rows, params.v8, transpose, [&](int) { return reciprocal; });
    if (threadIdx.x != 0) return;
    params.v_descale[rows.head * max_blocks(params.batch.total_k, params.batch.batch) +
                     rows.block.number] = base;
    return;
  }
  const bool is_q = part == Part::kQ;
  // NOTE: with a bound that is given, write_rows() computes no norms; the backward needs none.
  Scale scale{base, /*bound=*/0.0f};
  if constexpr (!kForBackward) {
    scale = row_scale<kIsSmooth>(rows, base, is_by_row, scratch);
  } else if (is_q) {
    scale.descale *= write_row_scale(rows, base);
  }
  rows.forget_values();
  const float bound = write_rows<kIsSmooth>(rows, scale, is_q ? params.q8 : params.k8);
  if constexpr (kForBackward) {
    rows.forget_values();
    if (uint8_t* const to = is_q ? params.q_columns : params.k_columns) {
      const float own = column_scale(rows, is_q) / base;
      write_columns(rows, to, transpose,
                    [&](int step) { return read_from_owner<kLanes>(own, step); });
    }
    scale.descale = base;
  }
  if (is_q) {
    write_factors_of_q<kIsSmooth>(rows, scale.descale, bound, workspace);
  } else {
    write_factors_of_k(rows, scale.descale, bound, scratch);
  }
}

// ------------------------------------------------------------------------------------- launches

template <typename Element, int kLanes>
void launch(const QuantizeParams& params, cudaStream_t stream) {
  const Workspace workspace(params);
  const int64_t q_blocks = max_blocks(params.batch.total_q, params.batch.batch);
  const int64_t k_blocks = max_blocks(params.batch.total_k, params.batch.batch);
  const int64_t blocks_of_parts = q_blocks + (params.for_backward ? 1 : 2) * k_blocks;
  const auto grid = static_cast<unsigned>(blocks_of_parts * params.heads);
  constexpr int kThreads = kLanes * kRowsAtOnce;
  if (workspace.zeroed_bytes > 0) {
    check_cuda(cudaMemsetAsync(params.workspace, 0, workspace.zeroed_bytes, stream),
               "quantize_qkv");
  }
  auto* kernel = quantize_kernel<Element, kLanes, false, false>;
  if constexpr (!Piece<Element>::kIsE4m3) {
    if (params.smooth_k) {
      const auto blocks = static_cast<unsigned>(k_blocks * params.heads);
      mean_kernel<Element, kLanes><<<blocks, kThreads, 0, stream>>>(params, workspace);
      kernel = quantize_kernel<Element, kLanes, true, false>;
    }
    if (workspace.largest) {
      largest_kernel<Element, kLanes><<<grid, kThreads, 0, stream>>>(params, workspace);
    }
    if (params.for_backward) kernel = quantize_kernel<Element, kLanes, false, true>;
  }
  kernel<<<grid, kThreads, 0, stream>>>(params, workspace);
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
