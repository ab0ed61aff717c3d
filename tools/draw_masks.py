"""Draws the masks of docs/masks.md into docs/img: `python -m tools.draw_masks [FOLDER]`.

Each picture is one sequence of 16 positions: a row of cells is a query, a column a key, and a
filled cell is a key that the query sees, colored by the kind of its token. Visibility is computed
by `hstu_attn.mask`, which defines the masks.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

from hstu_attn.mask import Mask, dense_mask

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Rectangle

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs/img"

POSITIONS = 16
CONTEXTS = 3
TARGETS = 4

CONTEXT, HISTORY, TARGET = range(3)
COLORS = ("#c97b2a", "#3d6ea5", "#3f8f62")  # context, history, target
EMPTY = "#f1f1ee"
LINES = "#ffffff"
TEXT = "#55554f"


@dataclass(frozen=True)
class Picture:
    """A mask and the tokens of the sequence that it is drawn for."""

    mask: Mask
    contexts: int = 0
    targets: int = 0


def _semi_local() -> Mask:
    """Returns a mask of the first two keys and the last three; candidates see all history."""
    ends = torch.tensor([0, POSITIONS])
    return Mask.semi_local(3, 2, ends, POSITIONS, num_targets=torch.tensor([TARGETS]))


def _row_spans() -> Mask:
    """Returns a mask of the first two keys and the rest of a row's block of four."""
    row = torch.arange(POSITIONS, dtype=torch.int32)
    block = row // 4 * 4
    return Mask.from_row_spans(torch.stack([0 * row, 0 * row + 2, block, row + 1], 1))


def _func() -> Mask:
    """Returns `[0, 1) U [F1, F2) U [F3, F4)`: the first key, and two stripes before the row."""
    row = torch.arange(POSITIONS, dtype=torch.int32)
    bounds = torch.stack([0 * row + 1, row - 8, row - 5, row - 2, row + 1])
    return Mask.from_func(bounds.clamp(min=0)[None])


def pictures() -> dict[str, Picture]:
    """Returns the pictures by file name, in the order of docs/masks.md."""
    contexts, targets = torch.tensor([CONTEXTS]), torch.tensor([TARGETS])
    both: dict[str, Any] = {"num_contexts": contexts, "num_targets": targets}
    return {
        "full": Picture(Mask.full()),
        "causal": Picture(Mask.causal()),
        "local": Picture(Mask.local(4, 2)),
        "context": Picture(Mask.causal(num_contexts=contexts), CONTEXTS),
        "target": Picture(Mask.causal(num_targets=targets), 0, TARGETS),
        "target-groups": Picture(Mask.causal(num_targets=targets, target_group_size=2), 0, TARGETS),
        "context-target": Picture(Mask.causal(**both), CONTEXTS, TARGETS),
        "local-context-target": Picture(Mask.local(4, **both), CONTEXTS, TARGETS),
        "min-full": Picture(
            Mask.local(3, num_targets=targets, min_full_attn_seq_len=4), 0, TARGETS
        ),
        "semi-local": Picture(_semi_local(), 0, TARGETS),
        "row-spans": Picture(_row_spans()),
        "func": Picture(_func()),
    }


def kinds(picture: Picture) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the kind of token at each position of the sequence."""
    kind = np.full(POSITIONS, HISTORY)
    kind[: picture.contexts] = CONTEXT
    kind[POSITIONS - picture.targets :] = TARGET
    return kind


def visible_keys(picture: Picture) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Returns bool `(16, 16)`: whether the query sees the key."""
    seen: np.ndarray[Any, np.dtype[np.bool_]] = dense_mask(
        picture.mask,
        POSITIONS,
        POSITIONS,
        num_contexts=picture.contexts,
        num_targets=picture.targets,
    ).numpy()
    return seen


def draw(picture: Picture, path: Path) -> None:
    """Draws one picture, 440 pixels square."""
    kind, seen = kinds(picture), visible_keys(picture)
    figure = pyplot.figure(figsize=(2.2, 2.2), dpi=200)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    for row in range(POSITIONS):
        for column in range(POSITIONS):
            color = COLORS[kind[column]] if seen[row, column] else EMPTY
            cell = Rectangle((column, row), 1, 1, facecolor=color, edgecolor=LINES)
            cell.set_linewidth(0.8)
            axes.add_patch(cell)
    for position in range(POSITIONS):
        color = COLORS[kind[position]]
        axes.add_patch(Rectangle((position + 0.04, -0.75), 0.92, 0.4, facecolor=color))
        axes.add_patch(Rectangle((-0.75, position + 0.04), 0.4, 0.92, facecolor=color))
    style: dict[str, Any] = {"color": TEXT, "linewidth": 0.9, "linestyle": (0, (2, 1.5))}
    for boundary in np.flatnonzero(np.diff(kind)) + 1:
        axes.plot([boundary, boundary], [-0.75, POSITIONS], **style)
        axes.plot([-0.75, POSITIONS], [boundary, boundary], **style)
    text: dict[str, Any] = {"color": TEXT, "fontsize": 6.5, "ha": "center", "va": "center"}
    axes.text(POSITIONS / 2, -1.35, "keys", **text)
    axes.text(-1.35, POSITIONS / 2, "queries", rotation=90, **text)
    axes.set_xlim(-1.9, POSITIONS + 0.3)
    axes.set_ylim(POSITIONS + 0.3, -1.9)
    axes.axis("off")
    figure.savefig(path, facecolor="white")
    pyplot.close(figure)


def main(folder: Path) -> None:
    """Draws all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures().items():
        draw(picture, folder / f"mask-{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
