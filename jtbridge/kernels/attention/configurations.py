"""How the kernels are launched: blocks, warps and pipeline stages, by direction, head size and size of an element.

Every configuration fits the shared memory of compute capability 8.0 (163 KB) and 9.0 (227 KB). Those for 16-bit heads
of 64 and 128 are close to what PyTorch's FlexAttention takes on an H100.
"""

from __future__ import annotations

import dataclasses

from jtbridge.kernels._shapes import next_power_of_2


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A program's queries and keys at a time, its warps, and the stages that its loop is pipelined in."""

    queries: int
    keys: int
    warps: int
    stages: int


# (head size, bytes of an element)
FORWARD = {
    (16, 2): Configuration(128, 64, 4, 3),
    (32, 2): Configuration(128, 64, 4, 3),
    (64, 2): Configuration(128, 128, 4, 3),
    (128, 2): Configuration(128, 64, 8, 3),
    (256, 2): Configuration(128, 64, 8, 2),
    (16, 4): Configuration(64, 64, 4, 2),
    (32, 4): Configuration(64, 64, 4, 2),
    (64, 4): Configuration(64, 32, 4, 2),
    (128, 4): Configuration(32, 32, 4, 2),
    (256, 4): Configuration(16, 16, 4, 1),
}
# By blocks of queries, for the gradient of the queries.
BACKWARD_QUERY = {
    (16, 2): Configuration(128, 64, 4, 3),
    (32, 2): Configuration(128, 64, 4, 3),
    (64, 2): Configuration(128, 64, 8, 3),
    (128, 2): Configuration(128, 64, 8, 3),
    (256, 2): Configuration(64, 32, 8, 2),
    (16, 4): Configuration(64, 32, 4, 2),
    (32, 4): Configuration(64, 32, 4, 2),
    (64, 4): Configuration(32, 32, 4, 2),
    (128, 4): Configuration(32, 32, 8, 1),
    (256, 4): Configuration(16, 16, 8, 1),
}
# By blocks of keys, for the gradients of the keys and values.
BACKWARD_KEY_VALUE = {
    (16, 2): Configuration(64, 64, 4, 3),
    (32, 2): Configuration(64, 64, 4, 3),
    (64, 2): Configuration(64, 128, 8, 3),
    (128, 2): Configuration(64, 128, 8, 2),
    (256, 2): Configuration(32, 64, 8, 2),
    (16, 4): Configuration(32, 64, 4, 2),
    (32, 4): Configuration(32, 64, 4, 2),
    (64, 4): Configuration(32, 32, 4, 2),
    (128, 4): Configuration(32, 32, 8, 1),
    (256, 4): Configuration(16, 16, 8, 1),
}
LARGEST_HEAD = 256


def padded(head_size: int) -> int:
    """The head size that kernels work with: a power of two, and no less than tensor cores take."""
    return max(16, next_power_of_2(head_size))
