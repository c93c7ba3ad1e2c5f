"""Launch configurations of the norm kernels, by shape: rows and columns of a program, its warps, and pipeline stages.

The number of programs that add up gradients of weights is not tuned. Each program writes a partial sum, and the time of
the kernel alone does not include the time of adding up these partial sums.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jtbridge.kernels._shapes import next_power_of_2, row_block, tile_rows

# The longest row that a program holds in registers. In the backward it also holds the row's gradients and the sums over
# rows.
_LONGEST, _LONGEST_BACKWARD = 16384, 8192
# Elements that a program takes at a time: of a longer row, and of several shorter rows, forward and backward.
_PIECE, _TILE, _TILE_BACKWARD = 4096, 1024, 2048
# In the backward of longer rows, the columns of a program, and the rows that it takes at a time.
_COLUMNS, _COLUMN_ROWS = 1024, 4
# The most elements that the programs that add up gradients of weights hold together: as many as run at once on an H100,
# 8192 on each of its 132 multiprocessors. More programs would run later, and write more partial sums.
_ROOM = 132 * 8192
# Bytes of shared memory for the rows that a program of 8192 elements, alone on its multiprocessor, loads ahead.
_SHARED = 96 * 1024
# The fewest and the most elements of a thread in a candidate of tuning, and the most warps of a program.
_MIN_PER_THREAD, _MAX_PER_THREAD, _MAX_WARPS = 8, 32, 32


@dataclasses.dataclass(frozen=True)
class NormConfiguration:
    """The rows that a program takes together, the elements of each, its warps, and the stages of its loop over rows."""

    tile: int
    block: int
    warps: int
    stages: int = 1


def default_forward(rows: int, n: int) -> NormConfiguration:
    """Return the forward's default configuration: a tile of whole rows, or pieces of one row if rows are too long."""
    block = row_block(n, _LONGEST, _PIECE)
    tile = tile_rows(rows, block, _TILE) if n <= block else 1
    return NormConfiguration(tile, block, _untuned_warps(tile * block))


def default_backward(rows: int, n: int, loaded: int) -> NormConfiguration:
    """Return the backward's default configuration for `rows` rows that share weights.

    A program takes whole rows, or a block of columns where rows are too long. `loaded` is the number of bytes that are
    loaded for each element.
    """
    block = row_block(n, _LONGEST_BACKWARD, _COLUMNS)
    tile = tile_rows(rows, block, _TILE_BACKWARD) if n <= block else min(next_power_of_2(rows), _COLUMN_ROWS)
    return NormConfiguration(tile, block, _untuned_warps(tile * block), _stages(loaded * tile * block))


def programs(groups: int, rows: int, n: int, summed: bool) -> int:
    """Return how many programs share the rows of a group.

    There is one program for each tile of rows. If the programs add up gradients of weights (`summed`), there are at
    most as many as run at once.
    """
    c = default_backward(rows, n, 1)
    room = _ROOM // (groups * math.ceil(n / c.block) * c.tile * c.block)
    return min(math.ceil(rows / c.tile), max(1, room) if summed else rows)


def candidates_forward(rows: int, n: int) -> list[NormConfiguration]:
    """Return the forward's candidates for tuning, the default first.

    They have half or twice the warps, for the same number of rows, or for half or twice the rows. Where a row is read
    in pieces, the length of a piece is halved or doubled instead of the number of rows.
    """
    default = default_forward(rows, n)
    if n > default.block:
        return _pieces(default)
    tile, block, warps = default.tile, default.block, default.warps
    others = (tile, block, warps // 2), (tile, block, 2 * warps), (tile // 2, block, warps // 2)
    return _fitting_configurations(default, [*others, (2 * tile, block, 2 * warps)], rows, _LONGEST)


def candidates_sums() -> list[NormConfiguration]:
    """Return the candidates for the sums over a row in pieces, the default first."""
    return _pieces(NormConfiguration(1, _PIECE, _untuned_warps(_PIECE)))


def candidates_backward(rows: int, n: int, loaded: int) -> list[NormConfiguration]:
    """Return the launch configurations of the backward that tuning tries, the default first.

    They have twice the warps, half or twice the rows and warps, or one stage less. Half the warps for the same rows
    would take all registers of a thread.
    """
    default = default_backward(rows, n, loaded)
    tile, block, warps, stages = dataclasses.astuple(default)
    others = (
        (tile, block, 2 * warps, stages),
        (tile // 2, block, warps // 2, stages),
        (tile, block, warps, max(2, stages - 1)),
    )
    twice = 2 * tile, block, 2 * warps, min(stages, _stages(loaded * 2 * tile * block))
    return _fitting_configurations(default, [*others, twice], rows, _LONGEST_BACKWARD)


def _pieces(default: NormConfiguration) -> list[NormConfiguration]:
    block, warps = default.block, default.warps
    others = (1, block, warps // 2), (1, block, 2 * warps), (1, block // 2, warps // 2), (1, 2 * block, 2 * warps)
    return _fitting_configurations(default, others, 1, _LONGEST)


def _fitting_configurations(
    default: NormConfiguration, others: Sequence[tuple[int, ...]], rows: int, most: int
) -> list[NormConfiguration]:
    """Return the default, and the others for which there are enough rows, warps and registers."""

    def fits(c: NormConfiguration) -> bool:
        elements = c.tile * c.block
        return (
            0 < c.tile <= next_power_of_2(rows)
            and 0 < c.warps <= _MAX_WARPS
            and elements <= most
            and _MIN_PER_THREAD <= elements // (32 * c.warps) <= _MAX_PER_THREAD
        )

    return list(dict.fromkeys([default, *filter(fits, (NormConfiguration(*each) for each in others))]))


def _untuned_warps(elements: int) -> int:
    """Return the warps of a program where nothing was tuned: 16 elements per thread, up to 16 warps."""
    return min(16, max(1, elements // 512))


def _stages(loaded: int) -> int:
    """Return the number of stages in which rows of `loaded` bytes are loaded."""
    return min(3, 1 + _SHARED // loaded)
