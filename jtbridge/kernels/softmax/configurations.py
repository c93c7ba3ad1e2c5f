"""How the kernels are launched, by the length of a row."""

from __future__ import annotations

import dataclasses

from jtbridge.kernels._shapes import row_block, warps

# The longest row that a program holds in registers, and the pieces of a longer one, in elements.
_LONGEST, _PIECE = 16384, 4096
# How many numbers a thread holds at most.
_HELD = 32


@dataclasses.dataclass(frozen=True)
class SoftmaxConfiguration:
    """Elements of a row that a program takes at a time, and its warps."""

    block: int
    warps: int


def default(n: int) -> SoftmaxConfiguration:
    """What is taken where nothing was tuned."""
    block = row_block(n, _LONGEST, _PIECE)
    return SoftmaxConfiguration(block, warps(block))


def candidates(n: int) -> list[SoftmaxConfiguration]:
    """What tuning tries: half and twice the warps."""
    taken = default(n)
    tried = [
        taken,
        *(SoftmaxConfiguration(taken.block, w) for w in (taken.warps // 2, taken.warps * 2) if 1 <= w <= 16),
    ]
    return [c for c in tried if c.block <= 32 * c.warps * _HELD]
