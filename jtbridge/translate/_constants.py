"""Closed-over tensors as operands of a translated function."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from jtbridge._convert import to_jax
from jtbridge._dtypes import numpy_dtype
from jtbridge._flat import ArrayType, FlatFunction
from jtbridge._signature import closed_over
from jtbridge._torch_state import version_of
from jtbridge.capture import large_constants, lift_constants, read_constants, with_places_for
from jtbridge.errors import TranslationError

from ._program import graph_of, precision

_ARRAYS = WeakTensorKeyDictionary()  # tensor -> (its version, the array): shared by all plans that use it


class Surroundings:
    """What a captured graph depends on besides its arguments: the tensors and modules that its function closes over.

    A function that is called reads them every time. One that was translated has read them, and is captured again when
    one of them is another object or was written to.
    """

    def __init__(self, fn: Callable[..., Any], flat: FlatFunction, constants: Sequence[torch.Tensor]):
        self._fn = fn
        self._modules = [ref for ref, _ in flat.behaviour.guards]
        self._versions = [(weakref.ref(tensor), version_of(tensor)) for tensor in constants]
        self._seen = [weakref.ref(value) for value in self._now()]

    def hold(self) -> bool:
        """Whether all of it is as it was."""
        now = self._now()
        return (
            len(now) == len(self._seen)
            and all(ref() is value for ref, value in zip(self._seen, now, strict=True))
            and all((tensor := ref()) is None or version_of(tensor) == was for ref, was in self._versions)
        )

    def _now(self) -> list[Any]:
        found: list[Any] = closed_over(self._fn)
        for ref in self._modules:
            module = ref()
            if module is not None:
                found += [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        return found


def with_constants(flat: FlatFunction, fn: Callable[..., Any]) -> FlatFunction:
    """`flat`, made of the user's `fn`, with its graph and with its large constants as inputs.

    If it cannot be translated it is returned as it is.
    """
    try:
        module = graph_of(flat)
    except TranslationError as error:
        flat.translations |= dict.fromkeys(
            [(flat, kernels, precision(flat)) for kernels in (False, True)], error.with_traceback(None)
        )
        return flat
    surroundings = Surroundings(fn, flat, read_constants(module))
    constants = large_constants(module)
    types = tuple(ArrayType(tuple(t.shape), np.dtype(numpy_dtype(t.dtype, "a constant"))) for t in constants)
    first = flat.first_constant
    in_types = (*flat.in_types[:first], *types, *flat.in_types[first:])
    lifted = dataclasses.replace(flat, in_types=in_types, constants=constants, graph=module, surroundings=surroundings)
    with_places_for(module, first, constants)
    lift_constants(module, lifted)
    return lifted


def constant_array(tensor: torch.Tensor) -> jax.Array:
    """A closed-over tensor as an array, copied once for as long as it is not written to."""
    known, state = _ARRAYS.get(tensor), version_of(tensor)
    if known is None or known[0] != state:
        with jax.ensure_compile_time_eval():
            known = (state, to_jax(tensor if jax.default_backend() == "gpu" else tensor.cpu()))
        _ARRAYS[tensor] = known
    return known[1]
