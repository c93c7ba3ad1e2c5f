"""Launch configurations of the softmax kernels, by shape: rows and elements of a program, and its warps."""

from __future__ import annotations

import dataclasses

from jtbridge.kernels._shapes import row_block, tile_rows, warps

# The longest row that a program holds in registers, and the length of the pieces of a longer row, in elements.
_LONGEST, _PIECE = 16384, 4096
# The most elements of a tile of short rows.
_TILE = 1024
# The most elements that a thread holds in a candidate of tuning.
_HELD = 32


@dataclasses.dataclass(frozen=True)
class SoftmaxConfiguration:
    """The rows that a program takes together, the elements of a row that it takes at a time, and its warps."""

    tile: int
    block: int
    warps: int


def default(rows: int, n: int) -> SoftmaxConfiguration:
    """Return the default configuration."""
    block = row_block(n, _LONGEST, _PIECE)
    tile = tile_rows(rows, block, _TILE) if n <= block else 1
    return SoftmaxConfiguration(tile, block, warps(tile * block))


def candidates(rows: int, n: int) -> list[SoftmaxConfiguration]:
    """Return the configurations that tuning tries: the default, half and twice its warps, and one row per program."""
    first = default(rows, n)
    found = [
        first,
        *(dataclasses.replace(first, warps=w) for w in (first.warps // 2, first.warps * 2) if 1 <= w <= 16),
        SoftmaxConfiguration(1, first.block, warps(first.block)),
    ]
    return list(dict.fromkeys(c for c in found if c.tile * c.block <= 32 * c.warps * _HELD))
