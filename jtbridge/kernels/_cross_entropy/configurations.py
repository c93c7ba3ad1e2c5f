"""Launch configurations of the cross-entropy kernels, by the length of a row."""

from __future__ import annotations

import dataclasses

from jtbridge.kernels._shapes import next_power_of_2, warps

# Forward: the lanes of a program, eight for each thread, and the pieces of a row that a program takes at a time.
_LANES, _PIECES = 2048, 4
# Backward: the elements that a program takes at a time, and the fewest elements per thread that tuning tries.
_BLOCK, _MIN_PER_THREAD = 4096, 8


@dataclasses.dataclass(frozen=True)
class ForwardConfiguration:
    """A configuration of the forward: a program takes `pieces` x `lanes` elements of a row at a time."""

    pieces: int
    lanes: int
    warps: int

    @property
    def blocks(self) -> dict[str, int]:
        """Return the kernel's size constants by name."""
        return {"pieces": self.pieces, "lanes": self.lanes}


@dataclasses.dataclass(frozen=True)
class BackwardConfiguration:
    """A configuration of the backward: a program takes a block of elements of a row."""

    block: int
    warps: int

    @property
    def blocks(self) -> dict[str, int]:
        """Return the kernel's size constants by name."""
        return {"block": self.block}


def default_forward(n: int) -> ForwardConfiguration:
    """Return the default configuration of the forward."""
    lanes = min(next_power_of_2(n), _LANES)
    return ForwardConfiguration(min(next_power_of_2(-(-n // lanes)), _PIECES), lanes, warps(lanes))


def default_backward(n: int) -> BackwardConfiguration:
    """Return the default configuration of the backward."""
    block = min(next_power_of_2(n), _BLOCK)
    return BackwardConfiguration(block, warps(block) // 2 or 1)


def candidates_forward(n: int) -> list[ForwardConfiguration]:
    """Return the forward configurations that tuning tries, the default first.

    They have half or twice the pieces, or half or twice the lanes with the same number of lanes per warp. With more
    warps for the same lanes, several threads would share the pieces of a lane and exchange their maxima at every step.
    """
    default = default_forward(n)
    pieces, lanes, warps = dataclasses.astuple(default)
    others = (
        ForwardConfiguration(pieces // 2, lanes, warps),
        ForwardConfiguration(2 * pieces, lanes, warps),
        ForwardConfiguration(pieces, lanes // 2, warps // 2),
        ForwardConfiguration(pieces, 2 * lanes, 2 * warps),
    )
    return [default, *(c for c in others if c.pieces and c.warps and c.pieces * c.lanes <= next_power_of_2(n))]


def candidates_backward(n: int) -> list[BackwardConfiguration]:
    """Return the backward configurations that tuning tries, the default first.

    They have half or twice the warps, for the same block, or for half or twice the block.
    """
    default = default_backward(n)
    block, warps = dataclasses.astuple(default)
    others = (
        BackwardConfiguration(block, warps // 2),
        BackwardConfiguration(block, 2 * warps),
        BackwardConfiguration(block // 2, warps // 2),
        BackwardConfiguration(2 * block, 2 * warps),
    )
    return [
        default,
        *(c for c in others if c.warps and _MIN_PER_THREAD * 32 * c.warps <= c.block <= next_power_of_2(n)),
    ]
