"""KuaiRand: logs of a feed of short videos with what each user did about each video shown.

Logs are `log_standard_*.csv` with a header, in one or more files whose lines belong together
(https://kuairand.com; the columns are those of "Descriptions of the fields in log_xxx.csv" in
https://github.com/chongminggao/KuaiRand, arXiv 2208.08696). Columns are found by their names, and
other columns are ignored. Fields are separated by commas, or by tabs if those of the header are.

`EventLog.columns` holds, for each event:

* `actions`: uint8, a set of bits: bit `ACTIONS.index(name)` is the column of that name.
  `unpack_actions` makes labels of them.
* `play_time_ms`, `duration_ms`: int32.
* `is_rand`, `tab`: uint8, whether the video was exposed at random, and where.

`EventLog.ratings` is `is_click`. Each line is a video that was shown, watched or not. To train a
model that predicts the next watched video, select lines: `open_event_log(..., only="long_view")`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .amazon import FIRST_MILLISECOND
from .layout import Events, MalformedLines, Reject
from .table import read_table

__all__ = ["ACTIONS", "KUAIRAND", "KuaiRandLayout", "kuairand_logs", "unpack_actions"]

ACTIONS = (
    *("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view"),
    "is_profile_enter",
)
"""The actions of a user on a video, in the order of the bits of `actions`, lowest first."""

MOST_OF = {"play_time_ms": 2**31 - 1, "duration_ms": 2**31 - 1, "is_rand": 1, "tab": 255}
"""The other columns that are kept, and the largest value of each."""


def unpack_actions(actions: Tensor) -> Tensor:
    """Returns labels for training, `(..., len(ACTIONS))` float32 of zeros and ones."""
    bits = torch.arange(len(ACTIONS), device=actions.device)
    return (actions.long().unsqueeze(-1) >> bits & 1).float()


def kuairand_logs(directory: Path) -> list[Path]:
    """Returns the standard logs in a directory, or in its subdirectory `data`.

    Raises:
        ValueError: there are no standard logs.
    """
    for place in (directory, directory / "data"):
        logs = sorted([*place.glob("log_standard_*.csv"), *place.glob("log_standard_*.csv.gz")])
        if logs:
            return logs
    raise ValueError(f"{directory}: expected KuaiRand's log_standard_*.csv, got none")


@dataclass(frozen=True)
class KuaiRandLayout:
    """The layout of the logs.

    Args:
        name: the name in the manifest of the preprocessed log.
    """

    name: str = "kuairand"

    def read(
        self, sources: Sequence[Path], malformed: MalformedLines, progress: bool
    ) -> Generator[Events, None, None]:
        """Reads the events of all files, one file after the other.

        Raises:
            ValueError: a malformed line.
        """
        names = ("user_id", "video_id", "time_ms", *ACTIONS, *MOST_OF)
        block = None
        for source in sources:
            for block in read_table(
                source, names, has_header=True, progress=progress, delimiter=None
            ):
                actions = np.zeros(len(block), np.uint8)
                for bit, name in enumerate(ACTIONS):
                    actions |= (block.natural(name, most=1) << bit).astype(np.uint8)
                columns: dict[str, NDArray[Any]] = {"actions": actions}
                for name, most in MOST_OF.items():
                    dtype = np.int32 if most > 255 else np.uint8
                    columns[name] = block.natural(name, most=most).astype(dtype)
                yield Events(
                    block.natural("user_id"),
                    block.natural("video_id"),
                    (actions >> ACTIONS.index("is_click") & 1).astype(np.float32),
                    block.natural("time_ms", least=FIRST_MILLISECOND),
                    1000,
                    columns,
                )
        if block is None:
            raise ValueError(f"{', '.join(map(str, sources))}: expected events, got none")

    def companions(self, source: Path) -> list[Path]:
        """Returns no further files."""
        return []

    def read_titles(self, source: Path, reject: Reject) -> dict[int, str]:
        """Returns no titles, because videos have none."""
        return {}


KUAIRAND = KuaiRandLayout()
