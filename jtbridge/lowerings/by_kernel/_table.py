"""The table of what operators are by kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jtbridge.lowerings._registry import Lowering

Maybe = jax.Array | None

_BY_KERNEL: dict[str, Lowering] = {}


def find_by_kernel(operator: Any) -> Lowering | None:
    """What computes an operator by a kernel, if anything does."""
    return _BY_KERNEL.get(operator.name())


def by_kernel(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what computes some operators, named as for `lowers`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            _BY_KERNEL[name if "::" in name else f"aten::{name}"] = Lowering(function, node=True)
        return function

    return register
