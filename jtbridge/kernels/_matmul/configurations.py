"""Launch configurations of the matmul kernel: blocks, warps and pipeline stages, by shape.

Every configuration fits the shared memory of compute capability 8.0 (163 KB) and 9.0 (227 KB), for elements of the kind
under which it is listed.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jtbridge.kernels._chip import Chip

Kind = Literal["half", "tf32", "ieee"]

# The approximate number of multiprocessors of a chip: an A100 has 108, an H100 has 132.
_MULTIPROCESSORS = 108


@dataclasses.dataclass(frozen=True)
class MatmulConfiguration:
    """Launch parameters: a program computes `block_m` x `block_n` results, `block_k` terms of the sum at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# From the largest blocks to the smallest: large blocks read the least, small blocks make the most programs.
CONFIGURATIONS: dict[Kind, tuple[MatmulConfiguration, ...]] = {
    "half": (
        MatmulConfiguration(128, 256, 64, num_warps=8, num_stages=3),
        MatmulConfiguration(128, 128, 64, num_warps=8, num_stages=4),
        MatmulConfiguration(128, 64, 64, num_warps=4, num_stages=4),
        MatmulConfiguration(64, 64, 64, num_warps=4, num_stages=5),
        MatmulConfiguration(32, 64, 128, num_warps=4, num_stages=4),
        MatmulConfiguration(16, 64, 128, num_warps=4, num_stages=5),
        MatmulConfiguration(16, 32, 128, num_warps=4, num_stages=6),
    ),
    "tf32": (
        MatmulConfiguration(128, 128, 32, num_warps=8, num_stages=4),
        MatmulConfiguration(64, 64, 32, num_warps=4, num_stages=4),
        MatmulConfiguration(16, 64, 64, num_warps=4, num_stages=4),
    ),
    # Without tensor cores: each thread holds an 8 x 8 or smaller part of the result in registers.
    "ieee": (
        MatmulConfiguration(128, 64, 16, num_warps=4, num_stages=3),
        MatmulConfiguration(64, 64, 16, num_warps=4, num_stages=3),
        MatmulConfiguration(32, 32, 32, num_warps=4, num_stages=3),
        MatmulConfiguration(16, 32, 32, num_warps=2, num_stages=3),
    ),
}


def shared_memory_bytes(configuration: MatmulConfiguration, kind: Kind) -> int:
    """Return the bytes of shared memory of a program: its blocks in the pipeline, or its result if that is larger."""
    size = 2 if kind == "half" else 4
    sides = configuration.block_m + configuration.block_n
    return size * max(
        sides * configuration.block_k * configuration.num_stages, configuration.block_m * configuration.block_n
    )


def default(kind: Kind, m: int, n: int, chip: Chip) -> MatmulConfiguration:
    """Return the default configuration on a chip, among those that fit its shared memory.

    It is the one of `candidates` with the largest blocks that make at least one program for each multiprocessor. If
    none of them does, it is the one that makes the most programs.
    """
    every = [c for c in CONFIGURATIONS[kind] if shared_memory_bytes(c, kind) <= chip.shared] or [
        CONFIGURATIONS[kind][-1]
    ]
    fitting = [c for c in candidates(kind, m, n) if c in every] or [every[-1]]

    def programs(c: MatmulConfiguration) -> int:
        return -(-m // c.block_m) * -(-n // c.block_n)

    return next((c for c in fitting if programs(c) >= _MULTIPROCESSORS), max(fitting, key=programs))


def candidates(kind: Kind, m: int, n: int) -> list[MatmulConfiguration]:
    """Return the configurations that tuning tries.

    Their blocks are less than twice as high and wide as the result, or have the least height or width.
    """
    fitting = [c for c in CONFIGURATIONS[kind] if c.block_m < max(2 * m, 17) and c.block_n < max(2 * n, 33)]
    return fitting or [CONFIGURATIONS[kind][-1]]
