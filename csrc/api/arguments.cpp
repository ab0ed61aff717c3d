#include "arguments.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <vector>

#include "../common/math.h"
#include "../common/not_implemented.h"
#include "../common/pages.h"

namespace hstu {
namespace {

// Returns an upper bound of the keys of a batch: all listed pages full, and every row a target.
int64_t most_keys(const PagedParams& paged, int64_t total_q) {
  return std::min<int64_t>(paged.num_page_ids * paged.page_size + total_q, INT_MAX);
}

// Windows and lengths are clamped to this, which is more than any sequence has, so that the sum of
// two of them fits an int.
constexpr int64_t kMaxLength = 1 << 30;

DType to_input_dtype(const TensorView& q) {
  if (q.dtype == ScalarType::Float8_e4m3fn) return DType::kFloat8E4M3;
  if (q.dtype == ScalarType::Float8_e5m2) {
    fail("q", "float8_e4m3fn, if its elements have 8 bits", describe_dtype(q));
  }
  return to_dtype("q", q);
}

void check_tensors(const Arguments& args, ForwardParams& params) {
  const TensorView& q = args.q;
  params.dtype = to_input_dtype(q);
  params.out_dtype = params.dtype == DType::kFloat8E4M3 ? DType::kBFloat16 : params.dtype;
  if (q.dim() != 3) fail("q", "shape (total_q, heads, head_dim)", describe_shape(q));
  if (args.v.dim() != 3) fail("v", "shape (total_k, heads, head_dim_v)", describe_shape(args.v));
  const int64_t total_q = q.size(0), heads = q.size(1), head_dim = q.size(2);
  if (heads < 1) fail("q", "at least one head", describe_shape(q));
  for (const auto& [name, tensor] : {std::pair("q", &args.q), std::pair("v", &args.v)}) {
    const int64_t d = tensor->size(2);
    if (d < 8 || d > 256 || d % 8)
      fail(name, "a head_dim that is a multiple of 8, 8 to 256", std::to_string(d));
  }
  const int64_t rows_k = args.kv_cache ? total_q : args.v.size(0);
  const char* meaning_k =
      args.kv_cache ? "(total_q, heads, head_dim)" : "(total_k, heads, head_dim)";
  params.heads = static_cast<int>(heads);
  params.q = to_packed("q", q, q, -1, heads, head_dim, "(total_q, heads, head_dim)");
  params.k = to_packed("k", args.k, q, rows_k, heads, head_dim, meaning_k);
  params.v = to_packed("v", args.v, q, rows_k, heads, -1, meaning_k);
  params.batch.total_q = total_q;
  params.batch.total_k = rows_k;  // check_pages() sets it for pages
}

void check_batch(const Arguments& args, BatchParams& batch) {
  const TensorView& q = args.q;
  batch.cu_seqlens_q = to_index_array("cu_seqlens_q", args.cu_seqlens_q, q, -1, "(batch + 1)");
  const int64_t offsets = args.cu_seqlens_q.size(0);
  if (offsets < 1) fail("cu_seqlens_q", "at least one offset", describe_shape(args.cu_seqlens_q));
  check_range("cu_seqlens_q", offsets - 1, 0, INT_MAX, "at most 2^31 - 1 sequences");
  batch.batch = static_cast<int>(offsets - 1);
  const int64_t b = batch.batch;
  batch.cu_seqlens_k = to_index_array("cu_seqlens_k", args.cu_seqlens_k, q, b + 1, "(batch + 1)");
  batch.seqused_q = to_index_array("seqused_q", args.seqused_q, q, b, "(batch)");
  batch.seqused_k = to_index_array("seqused_k", args.seqused_k, q, b, "(batch)");
  batch.num_contexts = to_index_array("num_contexts", args.num_contexts, q, b, "(batch)");
  batch.num_targets = to_index_array("num_targets", args.num_targets, q, b, "(batch)");
  check_range("max_seqlen_k", args.max_seqlen_k, 0, kMaxLength, "a length from 0 to 2^30");
  check_range("max_seqlen_q", args.max_seqlen_q, 0, kMaxLength, "a length from 0 to 2^30");
  if (args.strict && args.max_seqlen_q > args.max_seqlen_k) {
    fail("max_seqlen_q", join("at most max_seqlen_k (", args.max_seqlen_k, ")"),
         std::to_string(args.max_seqlen_q));
  }
  batch.max_seqlen_q = static_cast<int>(args.max_seqlen_q);
  batch.max_seqlen_k = static_cast<int>(args.max_seqlen_k);
}

void check_scale(const Arguments& args, ForwardParams& params) {
  if (args.scaling_seqlen < -1 || args.scaling_seqlen == 0) {
    fail("scaling_seqlen", "-1 (max_seqlen_q) or a positive length",
         std::to_string(args.scaling_seqlen));
  }
  const int64_t length = args.scaling_seqlen == -1 ? args.max_seqlen_q : args.scaling_seqlen;
  params.scale = length > 0 ? 1.0 / static_cast<double>(length) : 0.0;
  params.alpha = args.alpha;
  params.backward_e4m3 = args.backward_e4m3;
  if (!args.attn_scale) return;
  const TensorView& scale = *args.attn_scale;
  check_device("attn_scale", scale, args.q);
  check_dtype("attn_scale", scale, ScalarType::Float, "float32");
  const bool per_row = scale.dim() == 1 && scale.size(0) == args.q.size(0) && scale.size(0) != 1;
  if (!per_row && scale.numel() != 1) {
    fail("attn_scale", join("a scalar or shape (total_q) = (", args.q.size(0), ")"),
         describe_shape(scale));
  }
  if (per_row) check_last_stride("attn_scale", scale);
  if (per_row && args.backward_e4m3) {
    throw NotImplemented("attn_scale: there is no backward_e4m3 with a scale for each row");
  }
  params.attn_scale = static_cast<const float*>(scale.data);
  params.attn_scale_per_row = per_row;
}

void check_row_spans(const TensorView& spans, const Arguments& args, MaskParams& mask) {
  const int64_t total_q = args.q.size(0), heads = args.q.size(1);
  check_device("row_spans", spans, args.q);
  check_dtype("row_spans", spans, ScalarType::Int, "int32");
  const bool per_head = spans.dim() == 3;
  if (per_head) {
    check_shape("row_spans", spans, {heads, total_q, 4}, "(heads, total_q, 4)");
  } else {
    check_shape("row_spans", spans, {total_q, 4}, "(total_q, 4) or (heads, total_q, 4)");
  }
  check_last_stride("row_spans", spans);
  mask.row_spans = static_cast<const int32_t*>(spans.data);
  mask.row_spans_head_stride = per_head ? spans.stride(0) : 0;
  mask.row_spans_row_stride = spans.stride(per_head ? 1 : 0);
}

void check_func(const TensorView& func, const Arguments& args, MaskParams& mask) {
  const int64_t total_q = args.q.size(0), heads = args.q.size(1);
  check_device("func", func, args.q);
  check_dtype("func", func, ScalarType::Int, "int32");
  const bool good = func.dim() == 3 && (func.size(0) == 1 || func.size(0) == heads) &&
                    func.size(1) % 2 == 1 && func.size(2) >= total_q;
  if (!good) {
    fail("func",
         join("shape (1 or heads = ", heads, ", an odd n, at least total_q = ", total_q, ")"),
         describe_shape(func));
  }
  check_range("func", func.size(1), 1, kMaxLength, "an odd n below 2^30");
  check_last_stride("func", func);
  mask.func = static_cast<const int32_t*>(func.data);
  mask.func_length = static_cast<int>(func.size(1));
  mask.func_head_stride = func.size(0) == 1 ? 0 : func.stride(0);
  mask.func_entry_stride = func.stride(1);
  mask.func_causal = args.window_right == 0;
}

// hstu_attn.Mask checks which masks have a meaning. Numbers are clamped here, so that the
// arithmetic of common/mask.h cannot overflow or divide by 0 if the operator is called without it.
void check_mask(const Arguments& args, MaskParams& mask) {
  if (args.row_spans) return check_row_spans(*args.row_spans, args, mask);
  if (args.func) return check_func(*args.func, args, mask);
  const auto clamped = [](int64_t value, int64_t low) {
    return static_cast<int>(std::clamp(value, low, kMaxLength));
  };
  mask.window_left = clamped(args.window_left, -1);
  mask.window_right = clamped(args.window_right, -1);
  mask.target_group_size = clamped(args.target_group_size, 1);
  mask.min_full_attn_seq_len = clamped(args.min_full_attn_seq_len, 0);
}

BiasTable to_table(const char* name, const TensorView& weight, const Arguments& args) {
  check_device(name, weight, args.q);
  const DType dtype = bias_dtype(name, weight, args.q);
  const int64_t heads = args.q.size(1);
  const bool good = weight.dim() == 2 && weight.size(0) >= 1 && heads % weight.size(0) == 0 &&
                    weight.size(1) >= 1 && weight.size(1) <= kMaxLength;
  if (!good) {
    fail(name, join("shape (a divisor of heads = ", heads, ", at least 1)"),
         describe_shape(weight));
  }
  check_last_stride(name, weight);
  return {weight.data, dtype, static_cast<int>(weight.size(0)), static_cast<int>(weight.size(1)),
          weight.stride(0)};
}

const int64_t* to_times(const char* name, const TensorView& tensor, const Arguments& args,
                        int64_t size, const char* meaning) {
  check_device(name, tensor, args.q);
  check_dtype(name, tensor, ScalarType::Long, "int64");
  check_shape(name, tensor, {size}, meaning);
  check_last_stride(name, tensor);
  return static_cast<const int64_t*>(tensor.data);
}

void check_bias(const Arguments& args, ForwardParams& params) {
  const int64_t heads = args.q.size(1);
  if (args.rab) {
    const TensorView& rab = *args.rab;
    check_device("rab", rab, args.q);
    const DType dtype = bias_dtype("rab", rab, args.q);
    check_shape("rab", rab, {params.batch.batch, -1, args.max_seqlen_k, args.max_seqlen_k},
                "(batch, rab_heads, max_seqlen_k, max_seqlen_k)");
    if (rab.size(1) < 1 || heads % rab.size(1)) {
      fail("rab", join("a number of heads that divides ", heads), describe_shape(rab));
    }
    check_last_stride("rab", rab);
    if (args.pos_weight) fail("pos_weight", "None with rab", "a tensor");
    if (args.ts_weight) fail("ts_weight", "None with rab", "a tensor");
    params.rab = to_dense_bias(rab, dtype);
  }
  RelativeBias& bias = params.relative_bias;
  if (args.pos_weight) {
    bias.position = to_table("pos_weight", *args.pos_weight, args);
    if (bias.position.size % 2 == 0) {
      fail("pos_weight", "an odd last size, 2 * R - 1", describe_shape(*args.pos_weight));
    }
  }
  if (!args.ts_weight) return;
  bias.time = to_table("ts_weight", *args.ts_weight, args);
  if (!args.timestamps) fail("timestamps", "a tensor with ts_weight", "None");
  if (!args.ts_thresholds) fail("ts_thresholds", "a tensor with ts_weight", "None");
  const int64_t times = args.kv_cache ? -1 : args.k.size(0);
  bias.timestamps = to_times("timestamps", *args.timestamps, args, times, "(total_k)");
  bias.thresholds = to_times("ts_thresholds", *args.ts_thresholds, args, -1, "(thresholds)");
  bias.num_thresholds = static_cast<int>(args.ts_thresholds->size(0));
  if (args.row_timestamps) {
    bias.row_timestamps =
        to_times("row_timestamps", *args.row_timestamps, args, args.q.size(0), "(total_q)");
  }
}

// Checks that the cache has the dtype of q and no scales, or is e4m3 and has scales.
void check_cache_dtype(const TensorView& cache, const OptionalView& scales, const TensorView& q,
                       const char* whose, PagedParams& paged) {
  if (cache.dtype != ScalarType::Float8_e4m3fn) {
    if (cache.dtype != q.dtype) {
      fail("kv_cache", join("the dtype of ", whose, " (", describe_dtype(q), ") or float8_e4m3fn"),
           describe_dtype(cache));
    }
    if (scales) fail("kv_scales", "None with a kv_cache that is not float8_e4m3fn", "a tensor");
    return;
  }
  if (!scales) fail("kv_scales", "a tensor with a float8_e4m3fn kv_cache", "None");
  check_device("kv_scales", *scales, q, whose);
  check_dtype("kv_scales", *scales, ScalarType::Float, "float32");
  check_shape("kv_scales", *scales, {cache.size(0), 2, cache.size(2), cache.size(3)},
              "(num_pages, 2, page_size, heads)");
  check_last_stride("kv_scales", *scales);
  paged.scales = static_cast<const float*>(scales->data);
  paged.scale_page_stride = scales->stride(0);
  paged.scale_kv_stride = scales->stride(1);
  paged.scale_slot_stride = scales->stride(2);
}

// Checks a paged cache, for the attention and for append_paged_kv. It has to match the tensor `q`,
// whose name is `whose`.
void check_pages(const TensorView& cache, const OptionalView& scales, const TensorView& offsets,
                 const TensorView& ids, const TensorView& q, const char* whose, BatchParams& batch,
                 PagedParams& paged) {
  check_device("kv_cache", cache, q, whose);
  check_shape("kv_cache", cache, {-1, 2, -1, q.size(1), q.size(2)},
              "(num_pages, 2, page_size, heads, head_dim)");
  check_last_stride("kv_cache", cache);
  if (cache.size(0) < 1) fail("kv_cache", "at least one page", describe_shape(cache));
  const int64_t size = cache.size(2);
  if (size != kSmallestPage && size != 32 && size != 64 && size != 128 && size != 256) {
    fail("kv_cache", "a page size of 16, 32, 64, 128 or 256", std::to_string(size));
  }
  check_cache_dtype(cache, scales, q, whose, paged);
  paged.kv_cache = cache.data;
  paged.num_pages = cache.size(0);
  paged.page_size = static_cast<int>(size);
  paged.page_size_log2 = std::countr_zero(static_cast<unsigned>(size));
  paged.page_stride = cache.stride(0);
  paged.kv_stride = cache.stride(1);
  paged.slot_stride = cache.stride(2);
  paged.head_stride = cache.stride(3);
  paged.page_offsets =
      to_index_prefix("page_offsets", offsets, q, batch.batch + 1, "(batch + 1)", whose);
  paged.page_ids = to_index_array("page_ids", ids, q, -1, "(pages of the batch)", whose);
  paged.num_page_ids = ids.size(0);
  batch.total_k = most_keys(paged, batch.total_q);
  batch.paged = true;
}

void check_paged(const Arguments& args, ForwardParams& params) {
  for (const auto& [name, given] : {std::pair("page_offsets", args.page_offsets.has_value()),
                                    std::pair("page_ids", args.page_ids.has_value()),
                                    std::pair("last_page_lens", args.last_page_lens.has_value())}) {
    if (args.kv_cache && !given) fail(name, "a tensor with kv_cache", "None");
    if (!args.kv_cache && given) fail(name, "None without kv_cache", "a tensor");
  }
  if (!args.kv_cache) {
    if (args.kv_scales) fail("kv_scales", "None without kv_cache", "a tensor");
    return;
  }
  check_pages(*args.kv_cache, args.kv_scales, *args.page_offsets, *args.page_ids, args.q, "q",
              params.batch, params.paged);
  params.paged.last_page_lens = to_index_prefix("last_page_lens", *args.last_page_lens, args.q,
                                                params.batch.batch, "(batch)");
  if (params.relative_bias.timestamps) {  // kernels read no key past total_k
    params.batch.total_k = std::min(params.batch.total_k, args.timestamps->size(0));
  }
  if (args.v.size(2) != args.q.size(2)) {
    fail("v", join("the head_dim of q with kv_cache (", args.q.size(2), ")"),
         describe_shape(args.v));
  }
}

}  // namespace

void to_params(const Arguments& args, ForwardParams& params) {
  check_tensors(args, params);
  check_batch(args, params.batch);
  check_scale(args, params);
  check_mask(args, params.mask);
  check_bias(args, params);
  check_paged(args, params);
  check_quantization(args, params);
  check_range("sm_margin", args.sm_margin, 0, INT_MAX, "at least 0");
}

void to_params(const Arguments& args, const Fp8Arguments& fp8, ForwardParams& params) {
  check_fp8_tensors(args, fp8, params);
  check_batch(args, params.batch);
  check_scale(args, params);
  check_mask(args, params.mask);
  check_bias(args, params);
  check_range("sm_margin", args.sm_margin, 0, INT_MAX, "at least 0");
}

void to_params(const AppendArguments& args, AppendParams& params) {
  const TensorView& k = args.k;
  params.dtype = to_dtype("k", k);
  params.element_bytes = params.dtype == DType::kFloat64   ? 8
                         : params.dtype == DType::kFloat32 ? 4
                                                           : 2;
  if (k.dim() != 3) fail("k", "shape (total_q, heads, head_dim)", describe_shape(k));
  const int64_t total_q = k.size(0), heads = k.size(1), head_dim = k.size(2);
  check_range("k", heads, 1, INT_MAX, "at least one head");
  check_range("k", head_dim, 1, INT_MAX, "a head_dim of at least 1");
  check_last_stride("k", k);
  params.k = {k.data, k.stride(0), k.stride(1), static_cast<int>(head_dim)};
  const TensorView& v = args.v;
  check_device("v", v, k, "k");
  check_dtype("v", v, k, "k");
  check_shape("v", v, {total_q, heads, head_dim}, "of k");
  check_last_stride("v", v);
  params.v = {v.data, v.stride(0), v.stride(1), static_cast<int>(head_dim)};
  params.heads = static_cast<int>(heads);

  BatchParams& batch = params.batch;
  batch.total_q = total_q;
  batch.cu_seqlens_q = to_index_array("cu_seqlens_q", args.cu_seqlens_q, k, -1, "(batch + 1)", "k");
  const int64_t b = args.cu_seqlens_q.size(0) - 1;
  check_range("cu_seqlens_q", b, 0, INT_MAX, "1 to 2^31 offsets");
  batch.batch = static_cast<int>(b);
  batch.cu_seqlens_k =
      to_index_array("cu_seqlens_k", args.cu_seqlens_k, k, b + 1, "(batch + 1)", "k");
  batch.num_targets = to_index_array("num_targets", args.num_targets, k, b, "(batch)", "k");

  check_pages(args.kv_cache, args.kv_scales, args.page_offsets, args.page_ids, k, "k", batch,
              params.paged);
  if (params.paged.scales) {
    check_range("k", head_dim, 1, 256, "a head_dim of at most 256 with kv_scales");
  }
}

// ------------------------------------------------------------------------------------------ values

namespace {

void check_offsets(const char* name, const IndexArray& offsets, int batch, int64_t total,
                   const char* total_name) {
  int64_t previous = 0;
  for (int b = 0; b <= batch; ++b) {
    const int64_t offset = offsets[b];
    if (offset < previous) {
      fail(name, "non-negative, non-decreasing offsets", join(offset, " at index ", b));
    }
    if (offset > total) {
      fail(name, join("offsets up to ", total_name, " (", total, ")"),
           join(offset, " at index ", b));
    }
    previous = offset;
  }
}

void check_lengths(const BatchParams& batch, const Arguments& args, int b) {
  const int64_t room_q = batch.cu_seqlens_q[b + 1] - batch.cu_seqlens_q[b];
  const int64_t room_k = batch.cu_seqlens_k[b + 1] - batch.cu_seqlens_k[b];
  const auto at = [b] { return join(" in sequence ", b); };
  const auto used = [&](const char* name, const IndexArray& array, int64_t room) {
    if (!array) return room;
    if (array[b] < 0 || array[b] > room) {
      fail(name, join("a length from 0 to ", room, at()), std::to_string(array[b]));
    }
    return array[b];
  };
  const int64_t q = used("seqused_q", batch.seqused_q, room_q);
  const int64_t k = used("seqused_k", batch.seqused_k, room_k);
  if (q > args.max_seqlen_q) {
    fail("max_seqlen_q", join("at least the longest query length, ", q, at()),
         std::to_string(args.max_seqlen_q));
  }
  // NOTE: with rab, max_seqlen_k is its size, so that longer keys are never allowed.
  const bool any_k = !args.strict && batch.paged && !args.rab;
  if (k > args.max_seqlen_k && !any_k) {
    fail("max_seqlen_k", join("at least the longest key length, ", k, at()),
         std::to_string(args.max_seqlen_k));
  }
  if (!args.strict) return;
  if (q > k) {
    fail("cu_seqlens_q", join("no more queries than keys (", k, ")", at()), join(q, " queries"));
  }
  const int64_t contexts = batch.num_contexts ? batch.num_contexts[b] : 0;
  if (contexts < 0) fail("num_contexts", join("at least 0", at()), std::to_string(contexts));
  const int64_t targets = batch.num_targets ? batch.num_targets[b] : 0;
  if (targets < 0 || targets > k) {
    fail("num_targets", join("a count from 0 to the key length (", k, ")", at()),
         std::to_string(targets));
  }
  if (batch.paged && targets > q) {
    fail("num_targets", join("at most the query length (", q, ") with kv_cache", at()),
         std::to_string(targets));
  }
}

void check_page_values(const ForwardParams& params, int b, int64_t cached) {
  const PagedParams& paged = params.paged;
  const auto at = [b] { return join(" in sequence ", b); };
  const int64_t first = paged.page_offsets[b];
  const int64_t count = paged.page_offsets[b + 1] - first;
  const int64_t expected = ceil_div(cached, paged.page_size);
  if (count != expected) {
    fail("page_offsets", join(expected, " pages for ", cached, " cached keys", at()),
         std::to_string(count));
  }
  const int64_t last = cached == 0 ? 0 : (cached - 1) % paged.page_size + 1;
  if (paged.last_page_lens[b] != last) {
    fail("last_page_lens", join(last, at()), std::to_string(paged.last_page_lens[b]));
  }
  for (int64_t n = first; n < first + count; ++n) {
    if (paged.page_ids[n] < 0 || paged.page_ids[n] >= paged.num_pages) {
      fail("page_ids", join("ids from 0 to ", paged.num_pages - 1),
           join(paged.page_ids[n], " at index ", n));
    }
  }
}

}  // namespace

void check_values(const ForwardParams& params, const Arguments& args) {
  const BatchParams& batch = params.batch;
  if (batch.paged && params.relative_bias.timestamps &&
      args.timestamps->size(0) < batch.cu_seqlens_k[batch.batch]) {
    fail("timestamps", join("a time for each of ", batch.cu_seqlens_k[batch.batch], " keys"),
         describe_shape(*args.timestamps));
  }
  check_offsets("cu_seqlens_q", batch.cu_seqlens_q, batch.batch, batch.total_q, "total_q");
  check_offsets("cu_seqlens_k", batch.cu_seqlens_k, batch.batch, batch.total_k,
                batch.paged ? "the keys of all pages and rows" : "total_k");
  if (batch.paged) {
    check_offsets("page_offsets", params.paged.page_offsets, batch.batch, args.page_ids->size(0),
                  "the number of page_ids");
  }
  for (int b = 0; b < batch.batch; ++b) {
    check_lengths(batch, args, b);
    if (!batch.paged) continue;
    const Sequence sequence = load_sequence(batch, b);
    // A sequence without queries or without cached keys reads no page.
    const bool reads_pages = sequence.q_len > 0 && sequence.history_end > 0;
    if (args.strict || reads_pages) check_page_values(params, b, sequence.history_end);
  }
  const RelativeBias& bias = params.relative_bias;
  for (int n = 0; n < bias.num_thresholds; ++n) {
    if (bias.thresholds[n] < (n ? bias.thresholds[n - 1] : 0)) {
      fail("ts_thresholds", "non-negative, non-decreasing values",
           join(bias.thresholds[n], " at index ", n));
    }
  }
}

void check_values(const AppendParams& params) {
  const BatchParams& batch = params.batch;
  const PagedParams& paged = params.paged;
  check_offsets("cu_seqlens_q", batch.cu_seqlens_q, batch.batch, batch.total_q, "the rows of k");
  check_offsets("cu_seqlens_k", batch.cu_seqlens_k, batch.batch, batch.total_k,
                "the keys of all pages and rows");
  check_offsets("page_offsets", paged.page_offsets, batch.batch, paged.num_page_ids,
                "the number of page_ids");
  std::vector<char> is_written(paged.num_pages);
  for (int b = 0; b < batch.batch; ++b) {
    const auto at = [b] { return join(" in sequence ", b); };
    const int64_t rows = batch.cu_seqlens_q[b + 1] - batch.cu_seqlens_q[b];
    const int64_t keys = batch.cu_seqlens_k[b + 1] - batch.cu_seqlens_k[b];
    const int64_t targets = batch.num_targets ? batch.num_targets[b] : 0;
    if (rows > keys) {
      fail("cu_seqlens_q", join("no more rows than keys (", keys, ")", at()), join(rows, " rows"));
    }
    if (targets < 0 || targets > rows) {
      fail("num_targets", join("a count from 0 to the rows (", rows, ")", at()),
           std::to_string(targets));
    }
    const int64_t first = paged.page_offsets[b];
    const int64_t count = paged.page_offsets[b + 1] - first;
    if (count * paged.page_size < keys - targets) {
      fail("page_offsets", join("pages for ", keys - targets, " keys", at()),
           join(count, " of ", paged.page_size));
    }
    for (int64_t n = (keys - rows) / paged.page_size;
         n * paged.page_size < keys - targets && rows > targets; ++n) {
      const int64_t page = paged.page_ids[first + n];
      if (page < 0 || page >= paged.num_pages) {
        fail("page_ids", join("ids from 0 to ", paged.num_pages - 1),
             join(page, " at index ", first + n));
      }
      if (is_written[page]) {
        fail("page_ids", "each page that is written once",
             join(page, " again at index ", first + n));
      }
      is_written[page] = 1;
    }
  }
}

void check_values(const QuantizeParams& params) {
  const BatchParams& batch = params.batch;
  check_offsets("cu_seqlens_q", batch.cu_seqlens_q, batch.batch, batch.total_q, "total_q");
  check_offsets("cu_seqlens_k", batch.cu_seqlens_k, batch.batch, batch.total_k, "total_k");
}

}  // namespace hstu
