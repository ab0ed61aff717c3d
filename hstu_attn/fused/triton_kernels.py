"""The kernels of triton_steps.py; torch_steps.py has the formulas.

Each kernel reads and writes its tensors once. A kernel that only writes rows has a program for each
tile of `ROWS` rows. A kernel that also sums over rows has a few programs: each visits tiles at a
stride of the number of programs, prefetches the next tiles, and keeps its sums in registers; torch
then sums over the programs in a fixed order. `COLS` is a power of two that holds `WIDTH` columns,
and all arithmetic is in fp32.

NOTE: a row index is widened before it is multiplied by a stride, because a batch can have more than
2^31 elements.
"""

# Types in a kernel are Triton's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ..quantization import LARGEST_CODE, SMALLEST_DESCALE
from .options import PHILOX_ROUNDS

__all__ = [
    "activation_backward",
    "gate",
    "gate_backward",
    "layer_norm",
    "layer_norm_backward",
    "quantize_rows",
    "silu",
]

_PHILOX_ROUNDS = tl.constexpr(PHILOX_ROUNDS)
_LARGEST_CODE = tl.constexpr(LARGEST_CODE)
_SMALLEST_DESCALE = tl.constexpr(SMALLEST_DESCALE)

# ---------------------------------------------------------------------------------------------
# Functions that several kernels share
# ---------------------------------------------------------------------------------------------


@triton.jit
def _load(pointer, row, stride, column, inside):
    """Loads a tile in fp32; elements outside are zero."""
    places = pointer + row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, row, stride, column, inside, value):
    places = pointer + row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(places, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _parameter(pointer, group, column, WIDTH: tl.constexpr, PER_GROUP: tl.constexpr):
    """Loads a norm's weight or bias in fp32: one number for the group, or one for each column."""
    if PER_GROUP:
        return tl.load(pointer + group).to(tl.float32) + tl.zeros_like(column).to(tl.float32)
    else:
        return tl.load(pointer + column, mask=column < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _normalized(x, column, eps, CENTERED: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the normalized rows, and the factor of each row.

    With `CENTERED` rows have mean 0 and variance 1, otherwise they keep their mean and have a mean
    square of 1. Columns outside the row are zero, as in `x`.
    """
    if CENTERED:
        mean = tl.sum(x, axis=1) / WIDTH
        x = tl.where(column[None, :] < WIDTH, x - mean[:, None], 0.0)
    factor = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
    return x * factor[:, None], factor


@triton.jit
def _normalized_backward(dunit, unit, factor, CENTERED: tl.constexpr, WIDTH: tl.constexpr):
    along = tl.sum(dunit * unit, axis=1) / WIDTH
    if CENTERED:
        mean = tl.sum(dunit, axis=1) / WIDTH
        dunit -= mean[:, None]
    return factor[:, None] * (dunit - unit * along[:, None])


@triton.jit
def _store_sums(pointer, place, column, WIDTH: tl.constexpr, value):
    """Stores the sums over the rows of a program's tiles, `(ROWS, COLS)`."""
    tl.store(pointer + place + column, tl.sum(value, axis=0), mask=column < WIDTH)


# ---------------------------------------------------------------------------------------------
# e4m3
# ---------------------------------------------------------------------------------------------


@triton.jit
def _rounded(value, like):
    """Rounds to the dtype of `like`, and returns the result in fp32."""
    return value.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _magnitude(x):
    """Returns the magnitudes of finite elements, and 0 for NaN and infinity."""
    magnitude = tl.abs(x)
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@triton.jit
def _descale(largest):
    return tl.maximum(tl.div_rn(largest, tl.zeros_like(largest) + _LARGEST_CODE), _SMALLEST_DESCALE)


@triton.jit
def _to_codes(x, factor):
    """Returns `x * factor` in e4m3; NaN and infinity become NaN.

    The factor of a row leaves finite elements in e4m3's range, or so close to it that they round to
    its largest number.
    """
    return tl.where(tl.abs(x) < float("inf"), x * factor, float("nan")).to(tl.float8e4nv)


@triton.jit
def _factor(descale):
    """Returns the factors by which rows are multiplied before they are rounded to codes."""
    return tl.div_rn(tl.zeros_like(descale) + 1.0, descale)[:, None]


@triton.jit(do_not_specialize=["rows"])
def quantize_rows(
    x,
    codes,
    descales,
    rows,
    stride_x,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Computes the descales and codes of rows; reads rows of more than `COLS` columns twice."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = (row < rows)[:, None]
    column = tl.arange(0, COLS)
    inside = is_row & (column < WIDTH)[None, :]
    tile = _load(x, row, stride_x, column, inside)
    largest = tl.max(_magnitude(tile), axis=1)
    for first in tl.range(COLS, WIDTH, COLS):
        more = first + column
        tile = _load(x, row, stride_x, more, is_row & (more < WIDTH)[None, :])
        largest = tl.maximum(largest, tl.max(_magnitude(tile), axis=1))
    descale = _descale(largest)
    tl.store(descales + row, descale, mask=row < rows)
    factor = _factor(descale)
    if WIDTH <= COLS:
        _store(codes, row, WIDTH, column, inside, _to_codes(tile, factor))
    else:
        for first in tl.range(0, WIDTH, COLS):
            more = first + column
            inside = is_row & (more < WIDTH)[None, :]
            tile = _load(x, row, stride_x, more, inside)
            _store(codes, row, WIDTH, more, inside, _to_codes(tile, factor))


# ---------------------------------------------------------------------------------------------
# Layer norm
# ---------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def layer_norm(
    x,
    normed,
    weight,
    bias,
    codes,
    descales,
    rows,
    stride_x,
    eps,
    CENTERED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Stores the normalized rows, their codes and descales, or both."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    value, _ = _normalized(_load(x, row, stride_x, column, inside), column, eps, CENTERED, WIDTH)
    if weight is not None:
        value *= _parameter(weight, 0, column, WIDTH, False)[None, :]
    if bias is not None:
        value += _parameter(bias, 0, column, WIDTH, False)[None, :]
    if normed is not None:
        _store(normed, row, WIDTH, column, inside, value)
    if codes is not None:
        value = _rounded(value, x)
        descale = _descale(tl.max(_magnitude(value), axis=1))
        tl.store(descales + row, descale, mask=row < rows)
        _store(codes, row, WIDTH, column, inside, _to_codes(value, _factor(descale)))


@triton.jit(do_not_specialize=["rows"])
def layer_norm_backward(
    dnormed,
    x,
    residual,
    weight,
    bias,
    dx,
    normed,
    dweight_sums,
    dbias_sums,
    residual_sums,
    rows,
    stride_x,
    stride_residual,
    eps,
    CENTERED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.arange(0, COLS)
    if weight is not None:
        weight_row = _parameter(weight, 0, column, WIDTH, False)[None, :]
        dweight = tl.zeros([ROWS, COLS], dtype=tl.float32)
    if bias is not None:
        bias_row = _parameter(bias, 0, column, WIDTH, False)[None, :]
        dbias = tl.zeros([ROWS, COLS], dtype=tl.float32)
    if residual_sums is not None:
        added_total = tl.zeros([ROWS, COLS], dtype=tl.float32)
    begin, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for first in tl.range(begin, rows, step, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        x_tile = _load(x, row, stride_x, column, inside)
        gradient = _load(dnormed, row, WIDTH, column, inside)
        added = _load(residual, row, stride_residual, column, inside)
        if residual_sums is not None:
            added_total += added
        unit, factor = _normalized(x_tile, column, eps, CENTERED, WIDTH)
        if normed is not None:
            value = unit
            if weight is not None:
                value *= weight_row
            if bias is not None:
                value += bias_row
            _store(normed, row, WIDTH, column, inside, value)
        if bias is not None:
            dbias += gradient
        if weight is not None:
            dweight += gradient * unit
            gradient *= weight_row
        dx_tile = _normalized_backward(gradient, unit, factor, CENTERED, WIDTH) + added
        _store(dx, row, WIDTH, column, inside, dx_tile)
    place = tl.program_id(0) * WIDTH
    if weight is not None:
        _store_sums(dweight_sums, place, column, WIDTH, dweight)
    if bias is not None:
        _store_sums(dbias_sums, place, column, WIDTH, dbias)
    if residual_sums is not None:
        _store_sums(residual_sums, place, column, WIDTH, added_total)


# ---------------------------------------------------------------------------------------------
# SiLU
# ---------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def silu(
    z,
    result,
    rows,
    stride_z,
    stride_result,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    value = _load(z, row, stride_z, column, inside)
    _store(result, row, stride_result, column, inside, value * tl.sigmoid(value))


@triton.jit(do_not_specialize=["rows"])
def activation_backward(
    gradient,
    z,
    sums,
    rows,
    stride_gradient,
    stride_z,
    ACTIVATED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Turns SiLU's gradient into its input's; program `(n, m)` starts at column `m * COLS`."""
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    is_activated = tl.program_id(1) * COLS < ACTIVATED
    total = tl.zeros([ROWS, COLS], dtype=tl.float32)
    begin, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for first in tl.range(begin, rows, step, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        value = _load(gradient, row, stride_gradient, column, inside)
        if is_activated:
            written = inside & (column < ACTIVATED)[None, :]
            z_tile = _load(z, row, stride_z, column, written)
            sigmoid = tl.sigmoid(z_tile)
            derivative = sigmoid * (1 + z_tile * (1 - sigmoid))
            value = tl.where((column < ACTIVATED)[None, :], value * derivative, value)
            _store(gradient, row, stride_gradient, column, written, value)
        if sums is not None:
            total += value
    if sums is not None:
        _store_sums(sums, tl.program_id(0) * WIDTH, column, WIDTH, total)


# ---------------------------------------------------------------------------------------------
# Gate
# ---------------------------------------------------------------------------------------------


@triton.jit
def _dropout(value, seed, row, unit, THRESHOLD: tl.constexpr):
    """Returns `value` `(ROWS, COLS)` after dropout; `unit` is the part and group of its columns.

    A call of Philox gives the bits of eight consecutive columns, and a thread holds eight
    consecutive columns of a row: see `kept_elements` in torch_steps.py.
    """
    if THRESHOLD == 0:
        return value
    ROWS: tl.constexpr = value.shape[0]
    COLS: tl.constexpr = value.shape[1]
    zeros = tl.zeros([ROWS, COLS // 8], dtype=tl.int32)
    block = zeros + tl.arange(0, COLS // 8)[None, :]
    w0, w1, w2, w3 = tl.philox(
        seed, block, zeros + row[:, None], zeros + unit, zeros, n_rounds=_PHILOX_ROUNDS
    )
    # The last join is of neighbors: bits 2, 1 and 0 of a column's number, in this order.
    low = tl.join(tl.join(w0 & 0xFFFF, w2 & 0xFFFF), tl.join(w1 & 0xFFFF, w3 & 0xFFFF))
    high = tl.join(tl.join(w0 >> 16, w2 >> 16), tl.join(w1 >> 16, w3 >> 16))
    bits = tl.reshape(tl.join(low, high), [ROWS, COLS])
    SCALE: tl.constexpr = 65536 / (65536 - THRESHOLD)
    return tl.where(bits >= THRESHOLD, value * SCALE, 0.0)


@triton.jit
def _part(
    part: tl.constexpr,
    attention,
    u,
    normed,
    U_PART: tl.constexpr,
    X_PART: tl.constexpr,
    NORMED_PART: tl.constexpr,
):
    if part == U_PART:
        return u
    elif part == X_PART:
        return attention
    elif part == NORMED_PART:
        return normed
    else:
        return normed * u


@triton.jit(do_not_specialize=["rows"])
def gate(
    attention,
    u,
    weight,
    bias,
    seed,
    y,
    codes,
    descales,
    rows,
    stride_u,
    eps,
    GROUPS: tl.constexpr,
    U_PART: tl.constexpr,
    X_PART: tl.constexpr,
    NORMED_PART: tl.constexpr,
    PARTS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    CENTERED: tl.constexpr,
    ACTIVATES_U: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Stores the gate, its codes and descales, or both. Program `(n, m)` computes group `m`.

    `U_PART`, `X_PART` and `NORMED_PART` are -1 if absent. Codes need a single group, because all
    parts of a row share one scale.
    """
    group = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    place = group * WIDTH + column
    seed_value = 0
    if seed is not None:
        seed_value = tl.load(seed)
    a_tile = _load(attention, row, GROUPS * WIDTH, place, inside)
    u_tile = _load(u, row, stride_u, place, inside)
    if ACTIVATES_U:
        u_tile *= tl.sigmoid(u_tile)
    normed, _ = _normalized(a_tile, column, eps, CENTERED, WIDTH)
    if weight is not None:
        normed *= _parameter(weight, group, column, WIDTH, GROUPS > 1)[None, :]
    if bias is not None:
        normed += _parameter(bias, group, column, WIDTH, GROUPS > 1)[None, :]
    if codes is not None:
        largest = tl.zeros([ROWS], dtype=tl.float32)
        for part in tl.static_range(PARTS):
            value = _part(part, a_tile, u_tile, normed, U_PART, X_PART, NORMED_PART)
            value = _dropout(value, seed_value, row, part * GROUPS + group, THRESHOLD)
            value = _rounded(value, attention)
            largest = tl.maximum(largest, tl.max(_magnitude(value), axis=1))
        descale = _descale(largest)
        tl.store(descales + row, descale, mask=row < rows)
        factor = _factor(descale)
    for part in tl.static_range(PARTS):
        value = _part(part, a_tile, u_tile, normed, U_PART, X_PART, NORMED_PART)
        value = _dropout(value, seed_value, row, part * GROUPS + group, THRESHOLD)
        place_in_y = part * GROUPS * WIDTH + place
        stride_y = PARTS * GROUPS * WIDTH
        if y is not None:
            _store(y, row, stride_y, place_in_y, inside, value)
        if codes is not None:
            value = _to_codes(_rounded(value, attention), factor)
            _store(codes, row, stride_y, place_in_y, inside, value)


@triton.jit(do_not_specialize=["rows"])
def gate_backward(
    dy,
    attention,
    u,
    weight,
    bias,
    seed,
    dattention,
    du,
    y,
    dweight_sums,
    dbias_sums,
    rows,
    stride_u,
    stride_du,
    eps,
    GROUPS: tl.constexpr,
    U_PART: tl.constexpr,
    X_PART: tl.constexpr,
    NORMED_PART: tl.constexpr,
    PARTS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    CENTERED: tl.constexpr,
    ACTIVATES_U: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes the gradients of `gate`, part by part; the part "gated" is the last to be read."""
    group = tl.program_id(1)
    column = tl.arange(0, COLS)
    place = group * WIDTH + column
    seed_value = 0
    if seed is not None:
        seed_value = tl.load(seed)
    if weight is not None:
        weight_row = _parameter(weight, group, column, WIDTH, GROUPS > 1)[None, :]
        dweight = tl.zeros([ROWS, COLS], dtype=tl.float32)
    if bias is not None:
        bias_row = _parameter(bias, group, column, WIDTH, GROUPS > 1)[None, :]
        dbias = tl.zeros([ROWS, COLS], dtype=tl.float32)
    begin, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for first in tl.range(begin, rows, step, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        a_tile = _load(attention, row, GROUPS * WIDTH, place, inside)
        u_tile = _load(u, row, stride_u, place, inside)
        if ACTIVATES_U:
            sigmoid = tl.sigmoid(u_tile)
            derivative = sigmoid * (1 + u_tile * (1 - sigmoid))
            u_tile *= sigmoid
        unit, factor = _normalized(a_tile, column, eps, CENTERED, WIDTH)
        normed = unit
        if weight is not None:
            normed *= weight_row
        if bias is not None:
            normed += bias_row
        du_tile = tl.zeros([ROWS, COLS], dtype=tl.float32)
        da_tile = tl.zeros([ROWS, COLS], dtype=tl.float32)
        dnormed = tl.zeros([ROWS, COLS], dtype=tl.float32)
        for part in tl.static_range(PARTS):
            stride_y = PARTS * GROUPS * WIDTH
            place_in_y = part * GROUPS * WIDTH + place
            random = part * GROUPS + group
            gradient = _load(dy, row, stride_y, place_in_y, inside)
            gradient = _dropout(gradient, seed_value, row, random, THRESHOLD)
            if part == U_PART:
                du_tile += gradient
                value = u_tile
            elif part == X_PART:
                da_tile += gradient
                value = a_tile
            elif part == NORMED_PART:
                dnormed += gradient
                value = normed
            else:
                du_tile += gradient * normed
                dnormed += gradient * u_tile
                value = normed * u_tile
            if y is not None:
                value = _dropout(value, seed_value, row, random, THRESHOLD)
                _store(y, row, stride_y, place_in_y, inside, value)
        if ACTIVATES_U:
            du_tile *= derivative
        _store(du, row, stride_du, place, inside, du_tile)
        if bias is not None:
            dbias += dnormed
        if weight is not None:
            dweight += dnormed * unit
            dnormed *= weight_row
        da_tile += _normalized_backward(dnormed, unit, factor, CENTERED, WIDTH)
        _store(dattention, row, GROUPS * WIDTH, place, inside, da_tile)
    place_of_sums = (tl.program_id(0) * GROUPS + group) * WIDTH
    if weight is not None:
        _store_sums(dweight_sums, place_of_sums, column, WIDTH, dweight)
    if bias is not None:
        _store_sums(dbias_sums, place_of_sums, column, WIDTH, dbias)
