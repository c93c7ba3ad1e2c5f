"""Launch configurations of attention: blocks, warps and pipeline stages, by kernel, head size and element size.

Without an additive mask every configuration fits the shared memory of compute capability 8.0 (163 KB) and 9.0 (227 KB).
The first configuration of an entry is the default there; for 16-bit heads of 64 and 128 it is close to the one of
PyTorch's FlexAttention on an H100. Tuning tries all configurations of an entry. The last one is the default of chips
with less memory.
"""

from __future__ import annotations

import dataclasses

from jtbridge.kernels._chip import Chip
from jtbridge.kernels._shapes import next_power_of_2


@dataclasses.dataclass(frozen=True)
class AttentionConfiguration:
    """The queries and keys that a program takes at a time, its warps, and the pipeline stages of its loop."""

    queries: int
    keys: int
    warps: int
    stages: int


def _table_entries(*numbers: tuple[int, int, int, int]) -> tuple[AttentionConfiguration, ...]:
    return tuple(AttentionConfiguration(*each) for each in numbers)


# From (head size, bytes of an element) to the configurations.
Table = dict[tuple[int, int], tuple[AttentionConfiguration, ...]]
FORWARD: Table = {
    (16, 2): _table_entries((128, 64, 4, 3), (64, 64, 4, 3)),
    (32, 2): _table_entries((128, 64, 4, 3), (64, 64, 4, 3)),
    (64, 2): _table_entries((128, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3)),
    (128, 2): _table_entries((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 32, 4, 3)),
    (256, 2): _table_entries((128, 64, 8, 2), (32, 32, 8, 1)),
    (16, 4): _table_entries((64, 64, 4, 2)),
    (32, 4): _table_entries((64, 64, 4, 2)),
    (64, 4): _table_entries((64, 32, 4, 2)),
    (128, 4): _table_entries((32, 32, 4, 2)),
    (256, 4): _table_entries((16, 16, 4, 1)),
}
# For the gradient of the queries. A program takes a block of queries.
BACKWARD_QUERY: Table = {
    (16, 2): _table_entries((128, 64, 4, 3), (64, 64, 4, 3)),
    (32, 2): _table_entries((128, 64, 4, 3), (64, 64, 4, 3)),
    (64, 2): _table_entries((128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3)),
    (128, 2): _table_entries((128, 64, 8, 3), (128, 64, 8, 2), (64, 128, 4, 2), (64, 64, 4, 2), (64, 32, 4, 3)),
    (256, 2): _table_entries((64, 32, 8, 2), (32, 32, 8, 1)),
    (16, 4): _table_entries((64, 32, 4, 2)),
    (32, 4): _table_entries((64, 32, 4, 2)),
    (64, 4): _table_entries((32, 32, 4, 2)),
    (128, 4): _table_entries((32, 32, 8, 1)),
    (256, 4): _table_entries((16, 16, 8, 1)),
}
# For the gradients of the keys and values. A program takes a block of keys.
BACKWARD_KEY_VALUE: Table = {
    (16, 2): _table_entries((64, 64, 4, 3), (64, 128, 4, 3)),
    (32, 2): _table_entries((64, 64, 4, 3), (64, 128, 8, 3)),
    (64, 2): _table_entries((64, 128, 8, 3), (64, 64, 4, 3)),
    (128, 2): _table_entries((64, 128, 8, 2), (64, 64, 8, 2), (64, 64, 4, 2), (32, 64, 4, 3)),
    (256, 2): _table_entries((32, 64, 8, 2), (32, 32, 8, 1)),
    (16, 4): _table_entries((32, 64, 4, 2)),
    (32, 4): _table_entries((32, 64, 4, 2)),
    (64, 4): _table_entries((32, 32, 4, 2)),
    (128, 4): _table_entries((32, 32, 8, 1)),
    (256, 4): _table_entries((16, 16, 8, 1)),
}
MAX_HEAD_SIZE = 256
# The shared memory that the first configuration of an entry may need. The last one needs no more than the 99 KB of
# compute capability 8.6 and 8.9.
_ENOUGH = 163 * 1024


def padded_head_size(head_size: int) -> int:
    """Return the head size that kernels work with: a power of two, and at least the 16 that tensor cores take."""
    return max(16, next_power_of_2(head_size))


def default(table: Table, entry: tuple[int, int], chip: Chip, masked: bool = False) -> AttentionConfiguration:
    """Return the default configuration on a chip.

    With an additive mask (`masked`) it has one stage less, because blocks of the mask are in the pipeline too.
    """
    taken = _of_chip(table, entry, chip)
    return dataclasses.replace(taken, stages=max(1, taken.stages - 1)) if masked else taken


def _of_chip(table: Table, entry: tuple[int, int], chip: Chip) -> AttentionConfiguration:
    if chip.shared < _ENOUGH:
        return table[entry][-1]
    if table is FORWARD and entry == (64, 2) and chip.before(90):
        return table[entry][1]  # the first configuration spills registers on these chips
    return table[entry][0]
