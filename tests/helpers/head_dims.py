"""The head dims that have CUDA kernels of their own."""

from __future__ import annotations

import setup

HEAD_DIMS = tuple(map(int, setup.HEAD_DIMS))
