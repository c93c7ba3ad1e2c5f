"""Launch configurations of the softmax kernels, by the length of a row."""

from __future__ import annotations

import dataclasses

from jtbridge.kernels._shapes import row_block, warps

# The longest row that a program holds in registers, and the length of the pieces of a longer row, in elements.
_LONGEST, _PIECE = 16384, 4096
# The most elements that a thread holds in a candidate of tuning.
_HELD = 32


@dataclasses.dataclass(frozen=True)
class SoftmaxConfiguration:
    """The elements of a row that a program takes at a time, and its warps."""

    block: int
    warps: int


def default(n: int) -> SoftmaxConfiguration:
    """Return the configuration where nothing was tuned."""
    block = row_block(n, _LONGEST, _PIECE)
    return SoftmaxConfiguration(block, warps(block))


def candidates(n: int) -> list[SoftmaxConfiguration]:
    """Return the configurations that tuning tries: the default, and half and twice its warps."""
    taken = default(n)
    tried = [
        taken,
        *(SoftmaxConfiguration(taken.block, w) for w in (taken.warps // 2, taken.warps * 2) if 1 <= w <= 16),
    ]
    return [c for c in tried if c.block <= 32 * c.warps * _HELD]
