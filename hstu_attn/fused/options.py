"""The gate's options, and the constants, of the layer's steps in plain torch and in Triton."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MAX_WIDTH", "PHILOX_ROUNDS", "GateOptions", "dropout_threshold"]

# A program of the Triton kernels holds a whole row that is normalized in its registers.
MAX_WIDTH = 8192
# Rounds of Philox for dropout's random numbers: the fewest with which they pass BigCrush (Salmon et
# al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). With ten the gate would be bound by
# their arithmetic.
PHILOX_ROUNDS = 7


class GateOptions(NamedTuple):
    """The options of the gate of attention's output.

    Attributes:
        groups: 1 normalizes all columns of a row together; more normalizes that many groups of
            neighboring columns separately, with one weight and one bias for a group.
        eps: added to the variance.
        parts: what the result holds side by side: "u"; "x", the attention output; "normed", the
            same normalized; and last, always, "gated", the product of "normed" and "u".
        dropout: ratio of the result's elements that are dropped.
        centered: False leaves the mean in, so that the norm is RMSNorm.
        activates_u: whether "u" is SiLU of the given u, which is then not in memory.
    """

    groups: int
    eps: float
    parts: tuple[str, ...]
    dropout: float
    centered: bool = True
    activates_u: bool = False


def dropout_threshold(ratio: float) -> int:
    """Returns the threshold: an element is dropped if its 16 random bits are below it.

    The ratio in force is therefore a multiple of `2**-16`, at most `2**-17` away from the one that
    was asked for; what is kept is scaled by what is in force.
    """
    return min(round(ratio * 2**16), 2**16 - 1)
