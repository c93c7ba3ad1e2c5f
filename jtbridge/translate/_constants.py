"""Closed-over tensors as operands of a translated function."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from jtbridge._compat import outermost_trace
from jtbridge._convert import to_jax
from jtbridge._dtypes import numpy_dtype
from jtbridge._functions import ArrayType, TracedFunction
from jtbridge.capture import large_constants, lift_constants, with_places_for
from jtbridge.errors import TranslationError

from ._program import graph_of, precision

# By outermost trace: the arrays of closed-over tensors, by the tensors' ids.
_ARRAYS: weakref.WeakKeyDictionary[Any, dict[int, tuple[torch.Tensor, jax.Array]]] = weakref.WeakKeyDictionary()


def with_constants(traced: TracedFunction) -> TracedFunction:
    """`flat` with its graph, and with the large tensors that it closes over as inputs.

    If it cannot be translated it is returned as it is.
    """
    try:
        module = graph_of(traced)
    except TranslationError as error:
        traced.translations |= dict.fromkeys(
            [(traced, kernels, precision(traced)) for kernels in (False, True)], error.with_traceback(None)
        )
        return traced
    constants = large_constants(module)
    types = tuple(ArrayType(tuple(t.shape), np.dtype(numpy_dtype(t.dtype, "a constant"))) for t in constants)
    first = traced.first_constant
    in_types = (*traced.in_types[:first], *types, *traced.in_types[first:])
    lifted = dataclasses.replace(traced, in_types=in_types, constants=constants, graph=module)
    lifted.constant_arrays = constant_arrays(constants)
    with_places_for(module, first, constants)
    lift_constants(module, lifted)
    return lifted


def constant_arrays(tensors: Sequence[torch.Tensor]) -> tuple[jax.Array, ...]:
    """Closed-over tensors as arrays of their present values. Within one outermost trace each is copied once."""
    trace = outermost_trace()
    known = {} if trace is None else _ARRAYS.setdefault(trace, {})
    for tensor in tensors:
        if id(tensor) not in known:
            with jax.ensure_compile_time_eval():
                # The tensor is kept too: its id is its own for as long as it lives.
                known[id(tensor)] = tensor, to_jax(tensor if jax.default_backend() == "gpu" else tensor.cpu())
    return tuple(known[id(tensor)][1] for tensor in tensors)
