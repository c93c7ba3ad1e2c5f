"""Arguments that a torch operator writes to, and results that are views of arguments."""

from __future__ import annotations

import functools
from typing import Any

import torch

from jtbridge._compat import OpOverload, schema_of, undeclared_writes

from .pytree import tensor_leaves

# Functions that give a NumPy array over a tensor's memory, to which code may write without an operator.
AS_NUMPY = frozenset({torch.Tensor.numpy, torch.Tensor.__array__})


def written_tensors(fn: OpOverload, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that an operator writes to."""
    written = []
    for position, name in written_arguments(fn):
        value = kwargs.get(name, args[position] if position < len(args) else None)
        written += tensor_leaves(value)
    positions = undeclared_writes(fn, args)
    return written + [args[position] for position in positions if isinstance(args[position], torch.Tensor)]


@functools.lru_cache(maxsize=4096)
def written_arguments(fn: OpOverload) -> tuple[tuple[int, str], ...]:
    """Return the position and name of each argument that an operator writes to by its schema."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema_of(fn).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def returns_view(fn: OpOverload) -> bool:
    """Return whether an operator has one result, which by its schema is a view of an argument."""
    returns = schema_of(fn).returns
    alias = returns[0].alias_info if len(returns) == 1 else None
    return alias is not None and not alias.is_write
