"""The fast path of the most frequent call: a few small arrays in, one small array out, no transformation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

from jtbridge._compat import ArrayImpl, array_on_device, is_transforming
from jtbridge.core.debug import wanted_checks
from jtbridge.triton import intercepted_launches

from ._arrays import MAX_COPIED_BYTES
from ._common import results_to_jax
from ._function import EagerFunction
from ._graph import refuse_other_graphs

# NumPy's codes of the dtypes that need no conversion, whether or not x64 is on: bool, float32, float16, complex64, and
# 8 and 16 bit integers. Other dtypes may change their width, or have no NumPy dtype.
_SAME = frozenset("?fFebBhH")
_RESULTS = frozenset(
    {torch.bool, torch.float32, torch.float16, torch.complex64, torch.int8, torch.uint8, torch.int16, torch.int32}
)


@functools.lru_cache(maxsize=1)
def only_device() -> jax.Device | None:  # type: ignore[valid-type]
    """Return the CPU device of a process that has no other device, else None."""
    devices = jax.devices()
    return devices[0] if len(devices) == 1 and devices[0].platform == "cpu" else None


def small_tensors(args: tuple[Any, ...]) -> list[torch.Tensor] | None:
    """Return copies of the arguments of a call as tensors; None if the fast path does not support an argument."""
    device = only_device()
    if device is None or is_transforming():
        return None
    tensors = []
    for x in args:
        if type(x) is not ArrayImpl:
            return None
        memory = np.asarray(x)
        if memory.dtype.char not in _SAME or memory.nbytes > MAX_COPIED_BYTES:
            return None
        tensors.append(torch.from_numpy(memory.copy()))
    return tensors


def small_array(out: Any, args: tuple[Any, ...]) -> jax.Array | None:
    """Return a result as an array; None if the fast path does not support it."""
    if type(out) is not torch.Tensor or out.dtype not in _RESULTS or wanted_checks():
        return None
    device = only_device()
    if device is None or out.numel() * out.itemsize > MAX_COPIED_BYTES or out.layout is not torch.strided:
        return None
    values = out.detach() if out.requires_grad else out
    try:
        memory = values.numpy().copy()
    except (RuntimeError, TypeError):  # lazily conjugated or negated, or on another device
        return None
    return array_on_device(memory, device, committed=any(x.committed for x in args))


def call_directly(fn: Callable[..., Any], name: str, args: tuple[Any, ...]) -> Any:
    """Run `fn` on arrays if the fast path supports the arguments; else return NotImplemented without running it."""
    tensors = small_tensors(args)
    if tensors is None:
        return NotImplemented
    with intercepted_launches():
        out = fn(*tensors)
    if isinstance(out, torch.Tensor) and out.requires_grad:
        refuse_other_graphs(name, [out], None)
    array = small_array(out, args)
    if array is not None:
        return array
    function = EagerFunction(name, fn)
    tensors = list(function.flatten(out))
    del out
    return function.unflatten(results_to_jax(tensors, list(args), function))
