"""A layer's steps on GPUs: how the kernels of triton_kernels.py are launched.

The functions are those of torch_steps.py, for bf16, fp16 and fp32 and rows of up to
`options.MAX_WIDTH` normalized columns. Sums and the gradients of parameters are in fp32.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..fp8_linear import Factor
from ..quantization import E4M3
from . import triton_kernels as kernels
from .options import MAX_WIDTH, GateOptions, dropout_threshold

__all__ = [
    "activation_backward",
    "gate",
    "gate_backward",
    "layer_norm",
    "layer_norm_backward",
    "quantize_rows",
    "quantized_gate",
    "quantized_layer_norm",
    "silu",
]


class Form(NamedTuple):
    """The tile of a kernel for rows of up to `elements` columns; wider rows get more warps.

    The values are the fastest on an H200 at 1024 columns: docs/kernels/layer.md.

    Attributes:
        elements: the elements of a tile.
        warps: the warps of a program.
        programs: programs per streaming multiprocessor, for a kernel that sums over rows.
        stages: pipeline stages of such a program: it computes one tile while it loads the others.
        rows_read: the number of tensors of which such a program reads a tile.
    """

    elements: int
    warps: int
    programs: int = 0
    stages: int = 0
    rows_read: int = 0


QUANTIZE_ROWS = Form(2048, 4)
LAYER_NORM = Form(2048, 2)
QUANTIZED_LAYER_NORM = Form(2048, 1)
SILU = Form(2048, 4)
GATE = Form(2048, 4)
LAYER_NORM_BACKWARD = Form(1024, 1, programs=8, stages=3, rows_read=3)
ACTIVATION_BACKWARD = Form(1024, 4, programs=12, stages=3, rows_read=2)
GATE_BACKWARD = Form(1024, 2, programs=8, stages=3, rows_read=3)
GATE_BACKWARD_AGAIN = GATE_BACKWARD._replace(programs=4)  # also writes the gate's result

MAX_WARPS = 16
# Elementwise kernels split wider rows into pieces of this many columns.
MAX_COLS = 1024
# Shared memory for the loads of a program (bytes); every GPU since Ampere has at least this much.
MAX_STAGED_BYTES = 96 * 1024


def _tile(width: int, form: Form, most_columns: int = MAX_WIDTH) -> dict[str, int]:
    """Returns the rows, columns and warps of a tile, for rows of `width` columns."""
    cols = min(max(triton.next_power_of_2(width), 16), most_columns)
    rows = max(form.elements // cols, 1)
    warps = min(max(form.warps * rows * cols // form.elements, 1), MAX_WARPS)
    return {"ROWS": rows, "COLS": cols, "num_warps": warps}


def _summing_tile(
    x: Tensor, width: int, form: Form, most_columns: int = MAX_WIDTH, parts: int = 1
) -> dict[str, int]:
    """Returns `_tile` and its stages; the kernel reads `parts - 1` tensors more than `form` has."""
    tile = _tile(width, form, most_columns)
    rows_read = form.rows_read + parts - 1
    stage = rows_read * tile["ROWS"] * tile["COLS"] * x.element_size()
    return {**tile, "STAGES": max(min(form.stages, MAX_STAGED_BYTES // stage), 1)}


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _programs(x: Tensor, tile: dict[str, int], form: Form, others: int = 1) -> int:
    """Returns the grid size along the rows of `x`; the grid's other dimension has size `others`."""
    most = max(form.programs * _multiprocessors(x.device) // others, 1)
    return max(min(-(-x.shape[0] // tile["ROWS"]), most), 1)


def _on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the device of the tensors current: Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _columns_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _empty_factor(x: Tensor, width: int) -> Factor:
    codes = torch.empty((x.shape[0], width), dtype=E4M3, device=x.device)
    return codes, torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)


def quantize_rows(x: Tensor) -> Factor:
    x = _columns_contiguous(x)
    rows, width = x.shape
    codes, descales = _empty_factor(x, width)
    tile = _tile(width, QUANTIZE_ROWS)
    if rows:
        grid = (triton.cdiv(rows, tile["ROWS"]),)
        with _on_device(x):
            kernels.quantize_rows[grid](x, codes, descales, rows, x.stride(0), WIDTH=width, **tile)
    return codes, descales


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool = True
) -> Tensor:
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _layer_norm(x, weight, bias, eps, centered, normed, (None, None))
    return normed


def quantized_layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    keep: bool,
) -> tuple[Tensor | None, Factor]:
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device) if keep else None
    factor = _empty_factor(x, x.shape[1])
    _layer_norm(x, weight, bias, eps, centered, normed, factor)
    return normed, factor


def _layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    normed: Tensor | None,
    factor: Factor | tuple[None, None],
) -> None:
    x = _columns_contiguous(x)
    rows, width = x.shape
    tile = _tile(width, LAYER_NORM if factor[0] is None else QUANTIZED_LAYER_NORM)
    if rows:
        grid = (triton.cdiv(rows, tile["ROWS"]),)
        with _on_device(x):
            kernels.layer_norm[grid](
                x,
                normed,
                weight,
                bias,
                *factor,
                rows,
                x.stride(0),
                eps,
                CENTERED=centered,
                WIDTH=width,
                **tile,
            )


def layer_norm_backward(
    dnormed: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    again: bool,
    residual_sums: bool,
    centered: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    x, residual = _columns_contiguous(x), _columns_contiguous(residual)
    rows, width = x.shape
    tile = _summing_tile(x, width, LAYER_NORM_BACKWARD)
    programs = _programs(x, tile, LAYER_NORM_BACKWARD)
    dx = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    normed = torch.empty_like(dx) if again else None
    dweight = _sums(weight is not None, x, programs, width)
    dbias = _sums(bias is not None, x, programs, width)
    added = _sums(residual_sums, x, programs, width)
    with _on_device(x):
        kernels.layer_norm_backward[(programs,)](
            dnormed.contiguous(),
            x,
            residual,
            weight,
            bias,
            dx,
            normed,
            dweight,
            dbias,
            added,
            rows,
            x.stride(0),
            residual.stride(0),
            eps,
            CENTERED=centered,
            WIDTH=width,
            **tile,
        )
    return dx, normed, _summed(dweight), _summed(dbias), _summed(added)


def silu(z: Tensor, in_place: bool) -> Tensor:
    rows, width = z.shape
    result = z if in_place else torch.empty((rows, width), dtype=z.dtype, device=z.device)
    tile = _tile(width, SILU, MAX_COLS)
    if rows:
        grid = (triton.cdiv(rows, tile["ROWS"]), triton.cdiv(width, tile["COLS"]))
        with _on_device(z):
            kernels.silu[grid](z, result, rows, z.stride(0), result.stride(0), WIDTH=width, **tile)
    return result


def activation_backward(gradient: Tensor, z: Tensor, activated: int, sums: bool) -> Tensor | None:
    if not activated and not sums:
        return None
    # Without sums, columns without an activation need no program.
    width = gradient.shape[1] if sums else activated
    tile = _summing_tile(z, width, ACTIVATION_BACKWARD, MAX_COLS)
    column_tiles = triton.cdiv(width, tile["COLS"])
    programs = _programs(gradient, tile, ACTIVATION_BACKWARD, column_tiles)
    total = _sums(sums, z, programs, width)
    with _on_device(z):
        kernels.activation_backward[(programs, column_tiles)](
            gradient,
            z,
            total,
            gradient.shape[0],
            gradient.stride(0),
            z.stride(0),
            ACTIVATED=activated,
            WIDTH=width,
            **tile,
        )
    return _summed(total)


def gate(
    attention: Tensor,
    u: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    options: GateOptions,
) -> Tensor:
    y = _empty_gate(attention, options)
    _gate(attention, u, weight, bias, seed, options, y, (None, None))
    return y


def quantized_gate(
    attention: Tensor,
    u: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    options: GateOptions,
    keep: bool,
) -> tuple[Tensor | None, Factor]:
    if options.groups > 1:  # no program holds a whole row, whose columns share a scale
        y = gate(attention, u, weight, bias, seed, options)
        return y if keep else None, quantize_rows(y)
    kept = _empty_gate(attention, options) if keep else None
    factor = _empty_factor(attention, len(options.parts) * attention.shape[1])
    _gate(attention, u, weight, bias, seed, options, kept, factor)
    return kept, factor


def _empty_gate(attention: Tensor, options: GateOptions) -> Tensor:
    rows, columns = attention.shape
    shape = (rows, len(options.parts) * columns)
    return torch.empty(shape, dtype=attention.dtype, device=attention.device)


def _gate(
    attention: Tensor,
    u: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    options: GateOptions,
    y: Tensor | None,
    factor: Factor | tuple[None, None],
) -> None:
    rows, columns = attention.shape
    tile = _tile(columns // options.groups, GATE)
    if rows:
        grid = (triton.cdiv(rows, tile["ROWS"]), options.groups)
        with _on_device(attention):
            kernels.gate[grid](
                attention,
                u,
                weight,
                bias,
                seed,
                y,
                *factor,
                rows,
                u.stride(0),
                options.eps,
                **_gate_constants(columns, seed, options),
                **tile,
            )


def gate_backward(
    dy: Tensor,
    attention: Tensor,
    u: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    options: GateOptions,
    du: Tensor,
    again: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    rows, columns = attention.shape
    width = columns // options.groups
    form = GATE_BACKWARD_AGAIN if again else GATE_BACKWARD
    tile = _summing_tile(attention, width, form, parts=len(options.parts))
    programs = _programs(attention, tile, form, options.groups)
    dattention = torch.empty_like(attention)
    y = torch.empty_like(dy) if again else None
    dweight = _sums(weight is not None, attention, programs, columns)
    dbias = _sums(bias is not None, attention, programs, columns)
    with _on_device(attention):
        kernels.gate_backward[(programs, options.groups)](
            dy,
            attention,
            u,
            weight,
            bias,
            seed,
            dattention,
            du,
            y,
            dweight,
            dbias,
            rows,
            u.stride(0),
            du.stride(0),
            options.eps,
            **_gate_constants(columns, seed, options),
            **tile,
        )
    groups = options.groups
    return dattention, y, _summed(dweight, groups), _summed(dbias, groups)


def _gate_constants(columns: int, seed: Tensor | None, options: GateOptions) -> dict[str, int]:
    places = {name: place for place, name in enumerate(options.parts)}
    return {
        "GROUPS": options.groups,
        "U_PART": places.get("u", -1),
        "X_PART": places.get("x", -1),
        "NORMED_PART": places.get("normed", -1),
        "PARTS": len(places),
        "THRESHOLD": 0 if seed is None else dropout_threshold(options.dropout),
        "CENTERED": options.centered,
        "ACTIVATES_U": options.activates_u,
        "WIDTH": columns // options.groups,
    }


def _sums(asked: bool, like: Tensor, programs: int, columns: int) -> Tensor | None:
    """Allocates the tensor where each program stores its sums."""
    if not asked:
        return None
    return torch.empty((programs, columns), dtype=torch.float32, device=like.device)


def _summed(sums: Tensor | None, groups: int = 1) -> Tensor | None:
    """Sums over the programs, and over the columns of each group if there are several."""
    if sums is None:
        return None
    total = sums.sum(dim=0)
    return total if groups == 1 else total.view(groups, -1).sum(dim=1)
