"""How the kernels are launched, by the length of a row."""

from __future__ import annotations

import dataclasses

from jtbridge.kernels._shapes import next_power_of_2, warps

# Forward: the lanes of a program, eight elements of a thread each, and how many pieces of a row they take at a time.
_LANES, _PIECES = 2048, 4
# Backward: elements of a program, and of a thread in what tuning tries at least.
_BLOCK, _LEAST = 4096, 8


@dataclasses.dataclass(frozen=True)
class Forward:
    """A program takes `pieces` x `lanes` elements of a row at a time."""

    pieces: int
    lanes: int
    warps: int

    @property
    def blocks(self) -> dict[str, int]:
        """As the kernel has them."""
        return {"pieces": self.pieces, "lanes": self.lanes}


@dataclasses.dataclass(frozen=True)
class Backward:
    """A program takes a block of elements of a row."""

    block: int
    warps: int

    @property
    def blocks(self) -> dict[str, int]:
        """As the kernel has them."""
        return {"block": self.block}


def default_forward(n: int) -> Forward:
    """What is taken where nothing was tuned."""
    lanes = min(next_power_of_2(n), _LANES)
    return Forward(min(next_power_of_2(-(-n // lanes)), _PIECES), lanes, warps(lanes))


def default_backward(n: int) -> Backward:
    """What is taken where nothing was tuned."""
    block = min(next_power_of_2(n), _BLOCK)
    return Backward(block, warps(block) // 2 or 1)


def candidates_forward(n: int) -> list[Forward]:
    """What tuning tries, the default first: half and twice the pieces, and the lanes with as many to a warp.

    More warps for the same lanes would share the pieces of a lane, and exchange their maxima at every step.
    """
    taken = default_forward(n)
    pieces, lanes, warps = dataclasses.astuple(taken)
    others = (
        Forward(pieces // 2, lanes, warps),
        Forward(2 * pieces, lanes, warps),
        Forward(pieces, lanes // 2, warps // 2),
        Forward(pieces, 2 * lanes, 2 * warps),
    )
    return [taken, *(c for c in others if c.pieces and c.warps and c.pieces * c.lanes <= next_power_of_2(n))]


def candidates_backward(n: int) -> list[Backward]:
    """What tuning tries, the default first: half and twice the warps, and half and twice the elements with them."""
    taken = default_backward(n)
    block, warps = dataclasses.astuple(taken)
    others = (
        Backward(block, warps // 2),
        Backward(block, 2 * warps),
        Backward(block // 2, warps // 2),
        Backward(2 * block, 2 * warps),
    )
    return [taken, *(c for c in others if c.warps and _LEAST * 32 * c.warps <= c.block <= next_power_of_2(n))]
