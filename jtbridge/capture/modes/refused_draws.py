"""Refusal of random draws that torch accepts on fake tensors, and refuses on real ones.

``torch.randint(0, 300, (4,), dtype=torch.int8)`` and ``torch.poisson`` of integers raise in torch. JAX would draw
numbers, and convert them to the dtype. Each operator is run for one element, to see whether it raises.
"""

from __future__ import annotations

from typing import Any

import jax
import torch

from jtbridge._compat import EarlierDraws, OpOverload, drawing_from, inside_mode, outside_modes, schema_of
from jtbridge.core.array_types import SYMBOLIC_NUMBERS

from .refused_dtypes import is_for_cpu, lacks_kernel

# Operators that draw for any values of their tensors. The check uses ones.
_DRAWS = frozenset(
    {
        "bernoulli",
        "cauchy",
        "exponential",
        "geometric",
        "log_normal",
        "native_dropout",
        "normal",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "random",
        "randperm",
        "uniform",
    }
)
_LONGEST_PERMUTATION = 1 << 17  # more than the greatest number of each two-byte dtype


def check_draw(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise the exception of torch if it refuses to draw for the dtypes and numbers of an operator.

    Args:
        func: the operator. It is not checked if it draws nothing, or if its numbers depend on data.
        args: its arguments, which may be fake tensors.
        kwargs: its arguments by name.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return
    name = schema_of(func).name.removeprefix("aten::").rstrip("_")
    if func.namespace != "aten" or name not in _DRAWS or not is_for_cpu(kwargs):
        return
    if any(isinstance(leaf, SYMBOLIC_NUMBERS) for leaf in jax.tree.leaves((args, kwargs))):
        return
    with outside_modes(), torch.no_grad(), drawing_from(EarlierDraws(torch.Generator().get_state())), inside_mode():
        given = [_for_one_element(value) for value in args]
        named = {key: _for_one_element(value) for key, value in kwargs.items()}
        if name == "randperm":
            given[0] = min(given[0], _LONGEST_PERMUTATION)
        dtypes = [kwargs["dtype"]] if kwargs.get("dtype") else [x.dtype for x in given if isinstance(x, torch.Tensor)]
        try:
            func(*given, **named)
        except Exception as error:
            if not lacks_kernel(error, dtypes):
                raise


def _for_one_element(value: Any) -> Any:
    """Return an argument for a run that draws one element, from torch's default generator."""
    if isinstance(value, torch.Tensor):
        return torch.ones((1,) * value.dim(), dtype=value.dtype)
    if isinstance(value, torch.Generator):
        return None
    return [1] * len(value) if isinstance(value, list | tuple) else value
