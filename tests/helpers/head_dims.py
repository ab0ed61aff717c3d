"""The head dims for which CUDA kernels are compiled."""

from __future__ import annotations

import setup

HEAD_DIMS = tuple(map(int, setup.HEAD_DIMS))
