"""Packed sequences, and their conversion to lists, for the tests of `hstu_attn.jagged`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

WIDTH = 3


def to_offsets(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=dtype)


def rows_of(total: int, dtype: torch.dtype = torch.float64, width: int = WIDTH) -> Tensor:
    return torch.randn(total, width).to(dtype)


def sequences(values: Tensor, offsets: Tensor) -> list[list[Any]]:
    """Returns the rows of each sequence, as lists."""
    return [values[start:end].tolist() for start, end in pairwise(offsets.tolist())]


def assert_packed(values: Tensor, offsets: Tensor, expected: list[list[Any]]) -> None:
    """Asserts that a packed tensor holds these sequences, followed by zeros."""
    assert offsets.tolist() == to_offsets([len(rows) for rows in expected]).tolist()
    assert sequences(values, offsets) == expected
    assert not values[int(offsets[-1]) :].any()
