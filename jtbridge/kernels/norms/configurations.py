"""How the kernels are launched, by shape: rows and columns of a program, its warps, and the stages of its loop.

How many programs add up gradients of weights is fixed, for each leaves a sum behind: to add those up takes a time of
its own, of which a kernel timed alone knows nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jtbridge.kernels._shapes import next_power_of_2, row_block

# The longest row that a program holds in registers: in the backward, the row's gradients and the sums over rows too.
_LONGEST, _LONGEST_BACKWARD = 16384, 8192
# Elements that a program takes at a time: of a longer row, and of rows together where they are shorter.
_PIECE, _TILE, _TILE_BACKWARD = 4096, 1024, 2048
# Columns of a longer row that a program adds up, and how many rows it takes at a time.
_COLUMNS, _COLUMN_ROWS = 1024, 4
# Elements that the programs adding up gradients of weights hold together: what an H100 has room for, 8192 on each of
# its 132 multiprocessors. More programs would wait for their turn, and leave more sums behind.
_ROOM = 132 * 8192
# Bytes of shared memory for rows on their way to a program of 8192 elements, which has a multiprocessor for itself.
_SHARED = 96 * 1024
# Elements of a thread in what tuning tries, at least and at most, and warps of a program.
_LEAST, _MOST, _WARPS = 8, 32, 32


@dataclasses.dataclass(frozen=True)
class NormConfiguration:
    """Rows that a program takes together, elements of each, its warps, and in how many stages it loads more rows."""

    tile: int
    block: int
    warps: int
    stages: int = 1


def default_forward(rows: int, n: int) -> NormConfiguration:
    """What is taken where nothing was tuned: whole rows, or one by pieces where they are too long."""
    block = row_block(n, _LONGEST, _PIECE)
    tile = _tile(rows, block, _TILE) if n <= block else 1
    return NormConfiguration(tile, block, _warps(tile * block))


def default_sums() -> NormConfiguration:
    """Of the sums over a row that is too long for the backward, by pieces."""
    return NormConfiguration(1, _PIECE, _warps(_PIECE))


def default_backward(rows: int, n: int, loaded: int) -> NormConfiguration:
    """Of the gradients of `rows` that share weights: whole rows, or blocks of columns where those are too long.

    In `loaded` are the bytes that are loaded for each element.
    """
    block = row_block(n, _LONGEST_BACKWARD, _COLUMNS)
    tile = _tile(rows, block, _TILE_BACKWARD) if n <= block else min(next_power_of_2(rows), _COLUMN_ROWS)
    return NormConfiguration(tile, block, _warps(tile * block), _stages(loaded * tile * block))


def programs(groups: int, rows: int, n: int, summed: bool) -> int:
    """How many programs share the rows of a group: one for each tile, or, if they add up, what runs at once."""
    c = default_backward(rows, n, 1)
    room = _ROOM // (groups * math.ceil(n / c.block) * c.tile * c.block)
    return min(math.ceil(rows / c.tile), max(1, room) if summed else rows)


def candidates_forward(rows: int, n: int) -> list[NormConfiguration]:
    """What tuning tries, the default first: half and twice the warps, and with them the rows, or the piece of one."""
    taken = default_forward(rows, n)
    if n > taken.block:
        return _pieces(taken)
    tile, block, warps = taken.tile, taken.block, taken.warps
    others = (tile, block, warps // 2), (tile, block, 2 * warps), (tile // 2, block, warps // 2)
    return _fitting(taken, [*others, (2 * tile, block, 2 * warps)], rows, _LONGEST)


def candidates_sums() -> list[NormConfiguration]:
    """What tuning tries, as forward, the default first."""
    return _pieces(default_sums())


def candidates_backward(rows: int, n: int, loaded: int) -> list[NormConfiguration]:
    """What tuning tries, the default first: twice the warps, half and twice the rows and warps, and a stage less.

    Half the warps alone would take all registers of a thread.
    """
    taken = default_backward(rows, n, loaded)
    tile, block, warps, stages = dataclasses.astuple(taken)
    others = (
        (tile, block, 2 * warps, stages),
        (tile // 2, block, warps // 2, stages),
        (tile, block, warps, max(2, stages - 1)),
    )
    twice = 2 * tile, block, 2 * warps, min(stages, _stages(loaded * 2 * tile * block))
    return _fitting(taken, [*others, twice], rows, _LONGEST_BACKWARD)


def _pieces(taken: NormConfiguration) -> list[NormConfiguration]:
    block, warps = taken.block, taken.warps
    others = (1, block, warps // 2), (1, block, 2 * warps), (1, block // 2, warps // 2), (1, 2 * block, 2 * warps)
    return _fitting(taken, others, 1, _LONGEST)


def _fitting(
    taken: NormConfiguration, others: Sequence[tuple[int, ...]], rows: int, most: int
) -> list[NormConfiguration]:
    """The default, and those of the others that a program has rows, warps and registers for."""

    def fits(c: NormConfiguration) -> bool:
        elements = c.tile * c.block
        return (
            0 < c.tile <= next_power_of_2(rows)
            and 0 < c.warps <= _WARPS
            and elements <= most
            and _LEAST <= elements // (32 * c.warps) <= _MOST
        )

    return list(dict.fromkeys([taken, *filter(fits, (NormConfiguration(*each) for each in others))]))


def _warps(elements: int) -> int:
    """Warps for a program where nothing was tuned: 16 elements a thread, up to 16 warps."""
    return min(16, max(1, elements // 512))


def _tile(rows: int, block: int, most: int) -> int:
    """How many rows of a block a program takes together."""
    return min(next_power_of_2(rows), max(1, most // block), 64)


def _stages(loaded: int) -> int:
    """In how many stages rows of so many bytes are loaded."""
    return min(3, 1 + _SHARED // loaded)
