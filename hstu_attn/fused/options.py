"""The gate's options, and the constants, of the layer's steps in plain torch and in Triton."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MAX_WIDTH", "PHILOX_ROUNDS", "GateOptions", "dropout_threshold"]

# A program of a Triton kernel with a norm holds all columns of the norm in registers.
MAX_WIDTH = 8192
# Rounds of Philox for dropout's random numbers: the fewest with which they pass BigCrush (Salmon et
# al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). With ten rounds the gate would be bound
# by the arithmetic of Philox.
PHILOX_ROUNDS = 7


class GateOptions(NamedTuple):
    """The options of the gate of attention's output.

    Attributes:
        groups: 1 normalizes all columns of a row together; n > 1 normalizes n groups of
            neighboring columns separately, with one weight and one bias per group.
        eps: added to the variance.
        parts: the concatenated parts of the result: "u"; "x", the attention output; "normed", the
            normalized attention output; and always last, "gated", the product of "normed" and "u".
        dropout: ratio of the result's elements that are dropped.
        centered: False does not subtract the mean: the norm is RMSNorm.
        activates_u: whether the gate applies SiLU to its argument u; "u" is then the result.
    """

    groups: int
    eps: float
    parts: tuple[str, ...]
    dropout: float
    centered: bool = True
    activates_u: bool = False


def dropout_threshold(ratio: float) -> int:
    """Returns the threshold: an element is dropped if its 16 random bits are below it.

    The effective ratio is therefore a multiple of `2**-16`, at most `2**-17` away from the
    requested ratio; kept elements are scaled according to the effective ratio.
    """
    return min(round(ratio * 2**16), 2**16 - 1)
