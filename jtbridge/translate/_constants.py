"""Closed-over tensors as operands of a translated function."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import torch

from jtbridge._compat import outermost_trace, writes
from jtbridge.capture import large_constants, lift_constants, with_places_for
from jtbridge.core.array_types import array_type
from jtbridge.core.convert import to_jax
from jtbridge.core.functions import TracedFunction
from jtbridge.errors import TranslationError

from ._operators import missing_lowering_reason, share_without_lowering
from ._program import graph_of, translation_key

# The largest share of operators that torch may run inside a program. Measured on a CPU for chains of 48 operators: an
# island takes the time of five operators of a called function. For 256 floats, a program in which one operator in six
# is an island takes 1.1 to 1.2 times the time of calling the whole function. With one in twelve, it takes 0.7 to 0.8
# times that time; for 65,536 floats, 0.4 times in both cases.
_MAX_SHARE_WITHOUT_LOWERING = 1 / 8

# For each outermost trace, the closed-over tensors and their arrays, by the tensors' ids and numbers of writes.
_ARRAYS: weakref.WeakKeyDictionary[Any, dict[Any, tuple[torch.Tensor, jax.Array]]] = weakref.WeakKeyDictionary()


def with_constants(traced: TracedFunction) -> TracedFunction:
    """Return `traced` with its graph, and with the large closed-over tensors as inputs.

    If it cannot be translated, return it without islands, with the reason in its cache.
    """
    try:
        module = graph_of(traced)
    except TranslationError as error:
        return _untranslatable(traced, error)
    islands = traced.islands
    if islands == "auto":
        islands = "auto" if share_without_lowering(module) <= _MAX_SHARE_WITHOUT_LOWERING else "faster"
        if islands == "faster" and (reason := missing_lowering_reason(module)) is not None:
            return _untranslatable(
                traced,
                TranslationError(
                    f"`{traced.name}`: {reason}. More than an eighth of the operators have none, so torch runs the "
                    'whole function; with `islands="needed"` it runs these operators alone'
                ),
            )
    constants = large_constants(module)
    types = tuple(array_type(t, "a constant") for t in constants)
    first = traced.first_constant
    in_types = (*traced.in_types[:first], *types, *traced.in_types[first:])
    lifted = dataclasses.replace(
        traced,
        in_types=in_types,
        constants=constants,
        constant_arrays=constant_arrays(constants),
        graph=module,
        islands=islands,
    )
    with_places_for(module, first, constants)
    lift_constants(module, lifted)
    return lifted


def _untranslatable(traced: TracedFunction, error: TranslationError) -> TracedFunction:
    """Return `traced` without islands, also in its derivatives; its cache records why it cannot be translated."""
    traced = traced if traced.islands == "never" else dataclasses.replace(traced, islands="never")
    traced.cache.translations |= dict.fromkeys(
        [translation_key(traced, kernels) for kernels in (False, True)], error.with_traceback(None)
    )
    return traced


def constant_arrays(tensors: Sequence[torch.Tensor]) -> tuple[jax.Array, ...]:
    """Return arrays of the current values of closed-over tensors. Each tensor is copied once per trace and write."""
    trace = outermost_trace()
    known = {} if trace is None else _ARRAYS.setdefault(trace, {})
    keys = [(id(tensor), writes(tensor)) for tensor in tensors]
    for key, tensor in zip(keys, tensors, strict=True):
        if key not in known:
            with jax.ensure_compile_time_eval():
                # The tensor is stored too, because its id may be reused once it is freed.
                known[key] = tensor, to_jax(tensor if jax.default_backend() == "gpu" else tensor.cpu())
    return tuple(known[key][1] for key in keys)


def closed_over_bytes() -> int:
    """Return the size of the closed-over tensors in the program that is being traced; 0 if nothing is being traced."""
    trace = outermost_trace()
    return 0 if trace is None else sum(array.nbytes for _, array in _ARRAYS.get(trace, {}).values())
