"""The kernels of triton_hstu.py: HSTU attention over jagged sequences, forward and backward.

With `h` the first target, `c` the number of contextual tokens and `scale = 1 / scaling_seqlen`, for
each sequence and head:

    X = alpha * Q K^T,   P = M * silu(X) * scale,   O = P V
    M[i, j] = (j == i) or (j < h and (j < i or i < c))

The forward has one program for each tile of rows, the backward one for each tile of keys, which
keeps its part of dK and dV in registers and adds to an fp32 dQ in memory. Both skip empty tiles of
the mask. They visit full tiles first, which need no mask arithmetic, and then partial tiles.
Programs with the most tiles start first.

Tiles are loaded through tensor descriptors (TMA) or pointers (cp.async), whichever the tuner finds
faster; both give zeros past the end of a sequence, so rows and keys there contribute nothing.
"""

# Types in a kernel are Triton's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["backward", "forward"]

# ---------------------------------------------------------------------------------------------
# What both directions share
# ---------------------------------------------------------------------------------------------


@triton.jit
def _tanh(x, HARDWARE: tl.constexpr):
    """Computes tanh by one instruction on NVIDIA GPUs, with an error below 2^-10."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1 - 2 / (1 + tl.exp(2 * x))


@triton.jit
def _visible(row, key, contexts, history):
    return (key == row) | ((key < history) & ((key < row) | (row < contexts)))


@triton.jit
def _sequence(offsets, num_contexts, num_targets, batch):
    """Loads first packed row, length, number of contextual tokens and of those before targets."""
    begin = tl.load(offsets + batch)
    length = (tl.load(offsets + batch + 1) - begin).to(tl.int32)
    contexts = 0
    history = length
    if num_targets is not None:
        history -= tl.minimum(tl.load(num_targets + batch).to(tl.int32), length)
    if num_contexts is not None:
        contexts = tl.minimum(tl.load(num_contexts + batch).to(tl.int32), history)
    return begin.to(tl.int64), length, contexts, history


@triton.jit
def _source(
    pointer, begin, head, stride, length, DIM: tl.constexpr, TILE: tl.constexpr, TMA: tl.constexpr
):
    """Returns the rows of one sequence and head, from which `_tile` takes `TILE` at a time."""
    rows = pointer + begin * stride + head * DIM
    if TMA:
        return tl.make_tensor_descriptor(rows, [length, DIM], [stride, 1], [TILE, DIM])
    else:
        return rows


@triton.jit
def _tile(source, first, stride, length, DIM: tl.constexpr, TILE: tl.constexpr, TMA: tl.constexpr):
    """Loads rows `first` to `first + TILE`; those from `length` on are zeros."""
    if TMA:
        return source.load([first, 0])
    else:
        row = first + tl.arange(0, TILE)
        pointers = source + row[:, None] * stride + tl.arange(0, DIM)[None, :]
        return tl.load(pointers, mask=(row < length)[:, None], other=0.0)


@triton.jit
def _store(target, first, stride, length, value, DIM: tl.constexpr, TILE: tl.constexpr):
    row = first + tl.arange(0, TILE)
    pointers = target + row[:, None] * stride + tl.arange(0, DIM)[None, :]
    tl.store(pointers, value.to(target.dtype.element_ty), mask=(row < length)[:, None])


# ---------------------------------------------------------------------------------------------
# Forward
# ---------------------------------------------------------------------------------------------


@triton.jit
def _forward_step(
    accumulator,
    q,
    k_source,
    v_source,
    first_row,
    first_key,
    stride_k,
    stride_v,
    length,
    contexts,
    history,
    half_alpha,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TMA: tl.constexpr,
    HARDWARE: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    k = _tile(k_source, first_key, stride_k, length, DIM, KEYS, TMA)
    half_x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * half_alpha
    p = half_x + half_x * _tanh(half_x, HARDWARE)
    if MASKED:
        row = first_row + tl.arange(0, ROWS)
        key = first_key + tl.arange(0, KEYS)
        p = tl.where(_visible(row[:, None], key[None, :], contexts, history), p, 0.0)
    v = _tile(v_source, first_key, stride_v, length, DIM, KEYS, TMA)
    return tl.dot(p.to(v.dtype), v, accumulator, input_precision=PRECISION)


@triton.jit
def forward(
    q,
    k,
    v,
    out,
    offsets,
    num_contexts,
    num_targets,
    stride_q,
    stride_k,
    stride_v,
    stride_out,
    half_alpha,
    scale,
    length_bucket,  # only the tuner reads it
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HARDWARE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TMA: tl.constexpr,
):
    batch, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    begin, length, contexts, history = _sequence(offsets, num_contexts, num_targets, batch)
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS  # the longest rows first
    if first_row >= length:
        return

    q_rows = q + begin * stride_q + head * DIM
    k_source = _source(k, begin, head, stride_k, length, DIM, KEYS, TMA)
    v_source = _source(v, begin, head, stride_v, length, DIM, KEYS, TMA)
    q_tile = _tile(q_rows, first_row, stride_q, length, DIM, ROWS, False)
    accumulator = tl.zeros([ROWS, DIM], dtype=tl.float32)

    # Keys [0, all_see): every row of the tile sees them.
    all_see = tl.minimum(first_row + 1, history) // KEYS * KEYS
    for first_key in tl.range(0, all_see, KEYS):
        accumulator = _forward_step(
            accumulator, q_tile, k_source, v_source, first_row, first_key, stride_k, stride_v,
            length, contexts, history, half_alpha, DIM, ROWS, KEYS, TMA, HARDWARE, PRECISION, False,
        )  # fmt: skip

    # Then [all_see, some_see), and from `gap` tokens further on the targets' own keys.
    end_row = tl.minimum(first_row + ROWS, length)
    some_see = tl.minimum(end_row, history)
    if first_row < contexts:
        some_see = history
    some_see = tl.cdiv(some_see, KEYS) * KEYS
    gap = tl.maximum(first_row // KEYS * KEYS - some_see, 0)
    end = some_see
    if end_row > history:
        end = tl.maximum(end_row - gap, some_see)
    for position in tl.range(all_see, end, KEYS):
        first_key = position + tl.where(position >= some_see, gap, 0)
        accumulator = _forward_step(
            accumulator, q_tile, k_source, v_source, first_row, first_key, stride_k, stride_v,
            length, contexts, history, half_alpha, DIM, ROWS, KEYS, TMA, HARDWARE, PRECISION, True,
        )  # fmt: skip

    out_rows = out + begin * stride_out + head * DIM
    _store(out_rows, first_row, stride_out, length, accumulator * scale, DIM, ROWS)


# ---------------------------------------------------------------------------------------------
# Backward
# ---------------------------------------------------------------------------------------------


@triton.jit
def _backward_step(
    dk,
    dv,
    k,
    v,
    q_source,
    dout_source,
    dq_target,
    first_row,
    first_key,
    stride_q,
    stride_dout,
    stride_dq,
    length,
    contexts,
    history,
    half_alpha,
    dq_scale,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TMA: tl.constexpr,
    HARDWARE: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Computes one step on transposed scores, so P and dS feed dV and dK from registers."""
    q = _tile(q_source, first_row, stride_q, length, DIM, ROWS, TMA)
    dout = _tile(dout_source, first_row, stride_dout, length, DIM, ROWS, TMA)
    half_x = tl.dot(k, tl.trans(q), input_precision=PRECISION) * half_alpha
    dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
    sigmoid = 0.5 + 0.5 * _tanh(half_x, HARDWARE)
    p = 2 * half_x * sigmoid
    ds = dp * (sigmoid + p - p * sigmoid)  # dP * s * (1 + X * (1 - s))
    if MASKED:
        row = first_row + tl.arange(0, ROWS)
        key = first_key + tl.arange(0, KEYS)
        visible = _visible(row[None, :], key[:, None], contexts, history)
        p = tl.where(visible, p, 0.0)
        ds = tl.where(visible, ds, 0.0)
    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
    ds = ds.to(q.dtype)
    dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    if DIM > ROWS:  # tensor cores need the longer side first
        dq = tl.trans(tl.dot(tl.trans(k), ds, input_precision=PRECISION)) * dq_scale
    else:
        dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION) * dq_scale
    if TMA:
        dq_target.atomic_add([first_row, 0], dq)
    else:
        row = first_row + tl.arange(0, ROWS)
        pointers = dq_target + row[:, None] * stride_dq + tl.arange(0, DIM)[None, :]
        tl.atomic_add(pointers, dq, mask=(row < length)[:, None], sem="relaxed")
    return dk, dv


@triton.jit
def backward(
    q,
    k,
    v,
    dout,
    dq,
    dk,
    dv,
    offsets,
    num_contexts,
    num_targets,
    stride_q,
    stride_k,
    stride_v,
    stride_dout,
    stride_dq,
    stride_dk,
    stride_dv,
    half_alpha,
    scale,
    length_bucket,  # only the tuner reads it
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HARDWARE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TMA: tl.constexpr,
):
    batch, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    begin, length, contexts, history = _sequence(offsets, num_contexts, num_targets, batch)
    first_key = tl.program_id(1) * KEYS  # the first keys are seen by the most rows
    if first_key >= length:
        return

    k_rows = k + begin * stride_k + head * DIM
    v_rows = v + begin * stride_v + head * DIM
    k_tile = _tile(k_rows, first_key, stride_k, length, DIM, KEYS, False)
    v_tile = _tile(v_rows, first_key, stride_v, length, DIM, KEYS, False)
    q_source = _source(q, begin, head, stride_q, length, DIM, ROWS, TMA)
    dout_source = _source(dout, begin, head, stride_dout, length, DIM, ROWS, TMA)
    dq_target = _source(dq, begin, head, stride_dq, length, DIM, ROWS, TMA)
    dk_sum = tl.zeros([KEYS, DIM], dtype=tl.float32)
    dv_sum = tl.zeros([KEYS, DIM], dtype=tl.float32)
    dq_scale = 2 * half_alpha * scale

    # Rows [all_see, length): every one of them sees every key of the tile.
    diagonal = first_key // ROWS * ROWS
    end_key = first_key + KEYS
    if end_key <= history:
        all_see = tl.cdiv(end_key - 1, ROWS) * ROWS
        some_see = tl.minimum(all_see, length)
    else:
        all_see = length
        some_see = length
        if first_key >= history:  # only targets, each visible only to its own row
            some_see = tl.minimum(end_key, length)
    for first_row in tl.range(all_see, length, ROWS):
        dk_sum, dv_sum = _backward_step(
            dk_sum, dv_sum, k_tile, v_tile, q_source, dout_source, dq_target, first_row, first_key,
            stride_q, stride_dout, stride_dq, length, contexts, history, half_alpha, dq_scale,
            DIM, ROWS, KEYS, TMA, HARDWARE, PRECISION, False,
        )  # fmt: skip

    # The contextual rows before the diagonal, then [diagonal, some_see).
    context_end = 0
    if first_key < history:
        context_end = tl.minimum(tl.cdiv(contexts, ROWS) * ROWS, diagonal)
    gap = diagonal - context_end
    for position in tl.range(0, some_see - gap, ROWS):
        first_row = position + tl.where(position >= context_end, gap, 0)
        dk_sum, dv_sum = _backward_step(
            dk_sum, dv_sum, k_tile, v_tile, q_source, dout_source, dq_target, first_row, first_key,
            stride_q, stride_dout, stride_dq, length, contexts, history, half_alpha, dq_scale,
            DIM, ROWS, KEYS, TMA, HARDWARE, PRECISION, True,
        )  # fmt: skip

    dk_rows = dk + begin * stride_dk + head * DIM
    dv_rows = dv + begin * stride_dv + head * DIM
    _store(dk_rows, first_key, stride_dk, length, dk_sum * dq_scale, DIM, KEYS)
    _store(dv_rows, first_key, stride_dv, length, dv_sum * scale, DIM, KEYS)
