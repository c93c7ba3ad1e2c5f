"""Arguments that a torch operator writes to."""

from __future__ import annotations

import functools
from typing import Any

import jax
import torch

from jtbridge._compat import OpOverload, schema_of

# Batch norm writes to its running statistics, which its schema does not declare.
_UNDECLARED_WRITES: dict[str, tuple[int, tuple[int, ...]]] = {
    # name: (position of `training`, positions written)
    "aten::native_batch_norm": (5, (3, 4)),
    "aten::cudnn_batch_norm": (5, (3, 4)),
    "aten::miopen_batch_norm": (5, (3, 4)),
}


def written_tensors(fn: OpOverload, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that an operator writes to."""
    written = []
    for position, name in written_arguments(fn):
        value = kwargs.get(name, args[position] if position < len(args) else None)
        written += [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, torch.Tensor)]
    training, positions = _UNDECLARED_WRITES.get(schema_of(fn).name, (0, ()))
    if positions and args[training]:
        written += [args[position] for position in positions if isinstance(args[position], torch.Tensor)]
    return written


@functools.lru_cache(maxsize=4096)
def written_arguments(fn: OpOverload) -> tuple[tuple[int, str], ...]:
    """Return the position and name of each argument that an operator writes to by its schema."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema_of(fn).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
