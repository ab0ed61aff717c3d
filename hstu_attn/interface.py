"""The public functions: `hstu_attention`, and two with the arguments of FBGEMM's package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import fp8_tensors, ops
from .bias import Bias
from .call import bias_tensors, bias_times, make_call
from .fp8_attention import attention_keeping_e4m3, attention_of_e4m3
from .fx import Proxy, record_call
from .mask import Mask
from .paged import PagedKV
from .quantization import E4M3, Quantization

__all__ = [
    "clamped_attention",
    "fbgemm_bias",
    "fbgemm_mask",
    "hstu_attention",
    "hstu_attn_qkvpacked_func",
    "hstu_attn_varlen_func",
    "with_contiguous_rows",
]


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    mask: Mask | None = None,
    bias: Bias | Tensor | None = None,
    alpha: float = 1.0,
    scaling_seqlen: int = -1,
    attn_scale: Tensor | None = None,
    paged_kv: PagedKV | None = None,
    quant_mode: int = -1,
    deterministic: bool = False,
    sm_margin: int = 0,
    quantization: Quantization | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """HSTU attention over a packed batch of sequences of different lengths.

    The pointwise aggregated attention of Zhai et al. 2024, "Actions Speak Louder than Words"
    (arXiv 2402.17152, section 3.2): for each sequence and head,

        out = (M * silu(alpha * (Q K^T + bias)) * scale) V

    with `silu(x) = x * sigmoid(x)`, the mask `M` in {0, 1}, and no softmax: a row that sees no key
    gives exactly 0. Differentiable in q, k, v and the bias, once and in reverse mode.

    Sequence `b` owns rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]` of q, and likewise of k and v.
    Its query rows are the last of its key positions, so fewer queries than keys ("delta q") means
    that the queries are the newest tokens. Rows outside every sequence, or past `seqused`, give 0
    in the output and in every gradient, whatever values they hold.

    Args:
        q: `(total_q, heads, D)`, bf16, fp16, fp32 or fp64; or float8_e4m3fn with descales, without
            gradients. A Float8Tensor of TransformerEngine or torchao has its own descale. `D` is a
            multiple of 8 up to 256. A GPU computes fp32 and fp64 by torch's functions, and fp32
            with TF32 products where `torch.backends.cuda.matmul.allow_tf32` permits them. q, k and
            v may be strided views, with the last dimension contiguous.
        k: `(total_k, heads, D)`, q's dtype.
        v: `(total_k, heads, Dv)`, q's dtype; `Dv` may differ from `D`.
        cu_seqlens_q: int32 or int64 `(batch + 1,)`: offsets of the sequences in q, from 0 up.
        max_seqlen_q: at least the longest query sequence, in tokens.
        cu_seqlens_k: offsets of the sequences in k and v; None means `cu_seqlens_q`.
        max_seqlen_k: at least the longest key sequence, and not below `max_seqlen_q`; None means
            `max_seqlen_q`.
        seqused_q: int32 or int64 `(batch,)`: valid query rows of each sequence; None means all.
        seqused_k: int32 or int64 `(batch,)`: valid keys of each sequence; None means all.
        mask: the keys that each row sees; None means all of its sequence (`Mask.full()`).
        bias: a `DenseBias`, or its tensor as such; a `RelativeBias`, computed in the kernel; or
            None. A bias tensor that requires a gradient gets one.
        alpha: factor of the biased scores, before silu. Any finite value.
        scaling_seqlen: `scale = 1 / scaling_seqlen`; -1 means `max_seqlen_q`.
        attn_scale: the scale itself instead: fp32, of one element or `(total_q,)`, one factor for
            each query row. It gets no gradient and must not require one.
        paged_kv: a paged KV cache, for inference; `PagedKV` explains the q, k and v of such a call.
        quant_mode: -1, or a mode of FP8 attention from 0 to 5: `quantization=Quantization(mode)`.
        deterministic: whether equal inputs must give bitwise equal gradients in every run.
            `torch.use_deterministic_algorithms(True)` also turns it on; a CPU is always so.
        sm_margin: streaming multiprocessors to leave free on a GPU, for overlapping communication.
        quantization: how bf16 or fp16 q, k, v and the weights are quantized to e4m3 in the forward
            (experimental); None means no quantization. The gradients are those without
            quantization, unless `Quantization.keep` or `backward` says otherwise. It needs a Hopper
            GPU; on a CPU torch's functions compute it. With `paged_kv`, pages must be of
            float8_e4m3fn and `quantization=Quantization(mode=1)`; on a GPU, there is no bias.
        q_descale, k_descale, v_descale: factors of the elements of float8_e4m3fn q, k and v, all
            needed for that dtype. fp32, of shape `()` or `(1,)`, `(batch,)`,
            `(batch, heads)`, or `(heads, total // 128 + batch)`, where rows `128 * j` to
            `128 * j + 127` of sequence `b` have column `cu_seqlens[b] // 128 + b + j`; for q also
            `(heads, total_q)`.
        out_dtype: bf16 or fp16 if q is float8_e4m3fn, for which None means bf16; else q's dtype.

    Returns:
        `(total_q, heads, Dv)`, contiguous, of `out_dtype`.

    Raises:
        ValueError: for a wrong device, dtype, shape, stride, offset or combination of arguments; it
            names the argument, the expectation and the value. Offsets, lengths and counts on a GPU
            are clamped by the kernels, and checked only with `HSTU_ATTN_CHECK=1`.
        NotImplementedError: if this build or this GPU has no kernel for the arguments.
        ImportError: if the operator library has not been built.

    Example:
        >>> cu_seqlens = torch.tensor([0, 3, 8])  # two sequences, of 3 and 5 rows
        >>> q, k, v = torch.randn(3, 8, 2, 32).unbind(0)
        >>> out = hstu_attention(q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=5,
        ...                      mask=Mask.causal(), alpha=32**-0.5)
    """
    if isinstance(q, Proxy):
        return record_call(hstu_attention, (q,), **locals())
    descales = (q_descale, k_descale, v_descale)
    if not (type(q) is type(k) is type(v) is Tensor):
        (q, k, v), descales = fp8_tensors.unwrapped((q, k, v), descales, cu_seqlens_q)
    call = make_call(
        cu_seqlens_q,
        max_seqlen_q,
        cu_seqlens_k,
        max_seqlen_k,
        seqused_q,
        seqused_k,
        mask,
        bias_times(bias),
        alpha,
        scaling_seqlen,
        attn_scale,
        quant_mode,
        deterministic,
        sm_margin,
        quantization=quantization,
        descales=descales,
        may_keep_e4m3=paged_kv is None,
    )
    pages = ops.NO_PAGES if paged_kv is None else paged_kv.arguments
    if out_dtype is not None and out_dtype != q.dtype:
        if q.dtype != E4M3:
            raise ValueError(f"out_dtype: expected {q.dtype}, the dtype of q, got {out_dtype}")
        return attention_of_e4m3(q, k, v, call, bias_tensors(bias), pages, out_dtype)
    if quantization is not None and quantization.keep == "e4m3":
        return attention_keeping_e4m3(q, k, v, call, bias_tensors(bias))
    return ops.attention(q, k, v, call, bias_tensors(bias), pages)


def clamped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Bias | Tensor | None = None,
    paged_kv: PagedKV | None = None,
    **arguments: Any,
) -> Tensor:
    """Calls `hstu_attention` for the functions with the arguments of other libraries.

    On every device it accepts the arguments that those libraries' GPU kernels accept. Here the
    following do not raise, while in `hstu_attention` they raise on a CPU and with
    `HSTU_ATTN_CHECK=1`:

    * `num_targets` below 0 or beyond the length of a sequence, for example of a sequence that was
      emptied without its count: the counts are clamped;
    * `num_contexts` below 0: it means 0;
    * more queries than keys in a sequence: the first rows, which are before the first key, see
      nothing and give 0. `max_seqlen_q` may then be above `max_seqlen_k`;
    * `max_seqlen_k` below the longest key sequence, with a paged cache and no dense bias.

    Offsets that decrease or pass the end of a tensor, `seqused` beyond a sequence, `max_seqlen_q`
    below the longest query sequence and pages that do not match the lengths still raise.

    A q, k or v whose last dimension is not contiguous is copied.

    Args:
        q, k, v: as for `hstu_attention`, in any strides.
        bias, paged_kv, arguments: the keyword arguments of `hstu_attention`.
    """
    q, k, v = with_contiguous_rows(q), with_contiguous_rows(k), with_contiguous_rows(v)
    call = make_call(times=bias_times(bias), **arguments, strict=False)
    pages = ops.NO_PAGES if paged_kv is None else paged_kv.arguments
    return ops.attention(q, k, v, call, bias_tensors(bias), pages)


def with_contiguous_rows(x: Tensor) -> Tensor:
    """Returns `x`, or a copy if the stride of its last dimension is not 1."""
    if not isinstance(x, Tensor) or x.dim() == 0 or x.stride(-1) == 1:
        return x
    return x.contiguous()


def hstu_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scaling_seqlen: int,
    num_contexts: Tensor | None = None,
    num_targets: Tensor | None = None,
    target_group_size: int | None = 1,
    window_size: tuple[int, int] = (-1, -1),
    alpha: float = 1.0,
    rab: Tensor | None = None,
    has_drab: bool = False,
    kv_cache: Tensor | None = None,
    page_offsets: Tensor | None = None,
    page_ids: Tensor | None = None,
    last_page_lens: Tensor | None = None,
    func: Tensor | None = None,
    quant_mode: int | None = -1,
) -> Tensor:
    """Calls `hstu_attention` with the name and argument order of FBGEMM's `hstu` package.

    The formula is that of `hstu_attention`, after Zhai et al. 2024 (arXiv 2402.17152, section 3.2).

    Calls that FBGEMM's GPU kernels accept work on a CPU as well. A sequence may have more queries
    than keys: its query row `r` is at position `r + keys - queries`, and rows at negative positions
    see nothing and give 0. Counts are clamped to the length of their sequence, so an emptied
    sequence may keep its old number of targets. Offsets that decrease or pass the end of a tensor
    still raise on a CPU.

    Args:
        q: `(total_q, heads, D)`. q, k and v may have any strides; one whose last dimension is not
            contiguous is copied.
        k: `(total_k, heads, D)`.
        v: `(total_k, heads, Dv)`.
        cu_seqlens_q: `(batch + 1,)` offsets of the sequences in q.
        cu_seqlens_k: `(batch + 1,)` offsets of the sequences in k and v.
        seqused_q: `(batch,)` valid query rows of each sequence, or None.
        seqused_k: `(batch,)` valid keys of each sequence, or None.
        max_seqlen_q: longest query sequence, in tokens.
        max_seqlen_k: longest key sequence, in tokens. With a paged cache and without `rab` it may
            be less.
        scaling_seqlen: the output is divided by this; -1 means `max_seqlen_q`.
        num_contexts: `(batch,)` contextual tokens of each sequence, or None. Less than 0 means 0.
            Ignored with `func`.
        num_targets: `(batch,)` candidates of each sequence, or None; clamped to the number of its
            keys, and with a paged cache also to the number of its query rows. Ignored with `func`.
        target_group_size: candidates that see each other causally; None means 1.
        window_size: `(left, right)`; `(-1, -1)` is full and `(-1, 0)` causal. With `func`,
            `(-1, 0)` makes the visible set the intersection of `func` and causal.
        alpha: factor of the biased scores, before silu.
        rab: `(batch, bias heads, max_seqlen_k, max_seqlen_k)` dense bias, or None.
        has_drab: whether `rab` gets a gradient. Without it, none is computed even if `rab` requires
            one.
        kv_cache: `(num_pages, 2, page_size, heads, D)` paged keys and values, or None.
        page_offsets: `(batch + 1,)` offsets into `page_ids`. `page_offsets`, `page_ids` and
            `last_page_lens` may be larger buffers: entries beyond this batch are not read.
        page_ids: the pages of each sequence, in order.
        last_page_lens: `(batch,)` tokens in the last page of each sequence.
        func: int32 `(1 or heads, n, >= total_q)`, odd `n`: row `i` of the packed queries sees keys
            `[0, F0) U [F1, F2) U ...`. Columns past `total_q` are not read; none are needed.
        quant_mode: a mode of FP8 attention from 0 to 5, as `Quantization.mode` in `hstu_attention`;
            -1 or None means that nothing is quantized.

    Returns:
        `(total_q, heads, Dv)` of q's dtype.

    Raises:
        ValueError: as for `hstu_attention`, except for values that are clamped; and if `has_drab`
            is set without `rab`.
        NotImplementedError: if this build or this GPU has no kernel for the arguments.
    """
    if isinstance(q, Proxy):
        return record_call(hstu_attn_varlen_func, (q,), **locals())
    paged_kv = None
    if kv_cache is not None:
        paged_kv = PagedKV(kv_cache, page_offsets, page_ids, last_page_lens)
    return clamped_attention(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        mask=fbgemm_mask(num_contexts, num_targets, target_group_size, window_size, func),
        bias=fbgemm_bias(rab, has_drab),
        alpha=alpha,
        scaling_seqlen=scaling_seqlen,
        paged_kv=paged_kv,
        quant_mode=-1 if quant_mode is None else quant_mode,
    )


def hstu_attn_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scaling_seqlen: int = -1,
    num_contexts: Tensor | None = None,
    num_targets: Tensor | None = None,
    target_group_size: int | None = 1,
    window_size: tuple[int, int] = (-1, -1),
    alpha: float = 1.0,
    rab: Tensor | None = None,
    has_drab: bool | None = False,
    func: Tensor | None = None,
) -> Tensor:
    """Calls `hstu_attn_varlen_func` with q, k and v in one tensor, as in FBGEMM's `hstu` package.

    Args:
        qkv: `(total, 3, heads, D)`, in any strides; one whose last dimension is not contiguous is
            copied. Its gradient is written packed.

    The other arguments, the result and the errors are those of `hstu_attn_varlen_func`.
    """
    if isinstance(qkv, Proxy):
        return record_call(hstu_attn_qkvpacked_func, (qkv,), **locals())
    _check_qkv(qkv)
    qkv = with_contiguous_rows(qkv)
    bias = fbgemm_bias(rab, bool(has_drab))
    call = make_call(
        cu_seqlens_q,
        max_seqlen_q,
        cu_seqlens_k,
        max_seqlen_k,
        seqused_q,
        seqused_k,
        fbgemm_mask(num_contexts, num_targets, target_group_size, window_size, func),
        alpha=alpha,
        scaling_seqlen=scaling_seqlen,
        strict=False,
    )
    return ops.attention_packed(qkv, call, bias_tensors(bias))


# ---------------------------------------------------------------------------------------------
# From FBGEMM's arguments to this library's
# ---------------------------------------------------------------------------------------------


def fbgemm_mask(
    num_contexts: Tensor | None,
    num_targets: Tensor | None,
    target_group_size: int | None,
    window_size: tuple[int, int],
    func: Tensor | None,
) -> Mask:
    window = (window_size[0], window_size[1])
    if func is None:
        group = 1 if target_group_size is None else target_group_size
        return Mask(window, num_contexts, num_targets, group)
    if window not in ((-1, -1), (-1, 0)):
        raise ValueError(f"window_size: expected (-1, -1) or (-1, 0) with func, got {window}")
    return Mask(func=func, func_causal=window == (-1, 0))


def fbgemm_bias(rab: Tensor | None, has_drab: bool) -> Tensor | None:
    if rab is None:
        if has_drab:
            raise ValueError("rab: expected a tensor with has_drab=True, got None")
        return None
    return rab if has_drab else rab.detach()


def _check_qkv(qkv: Tensor) -> None:
    if not isinstance(qkv, Tensor):
        raise ValueError(f"qkv: expected a tensor, got {type(qkv).__name__}")
    if qkv.dim() != 4 or qkv.shape[1] != 3:
        raise ValueError(f"qkv: expected shape (total, 3, heads, D), got {tuple(qkv.shape)}")
