"""Comparison of a traced program with torch, for ``verify=True``, and the tolerances of :func:`jtbridge.check`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jtbridge.core.backend_names import ON_DEVICE
from jtbridge.core.convert import to_torch
from jtbridge.core.functions import TracedFunction
from jtbridge.core.host_memory import to_numpy
from jtbridge.core.nested_calls import as_xla_callback
from jtbridge.errors import JaxCallError, VerificationError

# Allowed differences, relative to the largest magnitude of a result.
_TOLERANCES = {np.dtype(np.float64): 1e-10, np.dtype(np.complex128): 1e-10, np.dtype(np.float16): 2e-2}
_SINGLE, _BFLOAT16 = 2e-4, 1e-1
_TRIALS = 4  # runs on slightly changed arguments, to find how much rounding changes the results
_MARGIN = 8  # the allowed difference, as a multiple of the largest one in these runs


def verify(traced: TracedFunction, operands: Sequence[Any], results: Sequence[Any]) -> None:
    """Add a callback to the program that compares its results with torch's own, once, when the values are known.

    JAX runs the callback with the program: under ``jit`` when the program runs, under ``vmap`` for each row and in a
    loop for each step. Only the first call compares. Under ``grad`` the values are compared, the gradient is not. A
    function that draws random numbers is not compared, because torch draws other numbers. Nor is one that calls a JAX
    function, because JAX cannot run in a callback.
    """
    if traced.cache.verified or traced.traits.effects.random_operator is not None:
        return

    def compare(operands: Sequence[Any], results: Sequence[Any]) -> None:
        if not traced.cache.verified:
            with contextlib.suppress(JaxCallError):
                _compare_with_torch(traced, [np.asarray(x) for x in operands], [np.asarray(x) for x in results])
            traced.cache.verified = True

    jax.debug.callback(as_xla_callback(compare), list(operands), list(results))


def _compare_with_torch(traced: TracedFunction, operands: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
    with traced.state.applied():
        tensors = to_torch(list(operands))
        expected = [to_numpy(tensor.detach()) for tensor in traced(*tensors)]
        differences = list(map(difference, results, expected))
        if all(found <= tolerance(got.dtype) for found, got in zip(differences, results, strict=True)):
            return
        rounding = by_rounding(traced, tensors, expected)
    for number, (found, got, rounded) in enumerate(zip(differences, results, rounding, strict=True)):
        if not found <= max(tolerance(got.dtype), rounded):
            raise VerificationError(
                f"Result {number} of `{traced.name}` differs from torch's by {found:.1e} of its largest magnitude; "
                f"{max(tolerance(got.dtype), rounded):.0e} is allowed for {got.dtype}. The function may do something "
                "else while it is traced, for example ask `torch.compiler.is_exporting()` or look for fake tensors. "
                f'Wrap it with `backend="{ON_DEVICE}"`, or make it do the same in both cases.'
            )


def difference(got: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference of two arrays, divided by the largest finite magnitude of `expected`.

    The difference is absolute if all expected values are zero. It is infinite if shapes, dtypes, integers or booleans
    differ, or if NaNs or infinities are at different positions.
    """
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    if got.dtype.kind in "biu":
        return 0.0 if np.array_equal(got, expected) else float("inf")
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    a, b = got.astype(wide), expected.astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(np.where(finite, 0, a), np.where(finite, 0, b), equal_nan=True):
        return float("inf")
    scale = np.abs(b[finite]).max(initial=0.0)
    largest = np.abs(a[finite] - b[finite]).max(initial=0.0)
    return float(largest / scale) if scale else float(largest)


def tolerance(dtype: Any) -> float:
    """Return the difference that rounding may cause in results of a dtype."""
    return _BFLOAT16 if dtype == jnp.bfloat16 else _TOLERANCES.get(np.dtype(dtype), _SINGLE)


def by_rounding(
    reference: Callable[..., Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor], expected: Sequence[np.ndarray]
) -> list[float]:
    """Return the :func:`difference` that rounding may cause in each result, which is large where terms cancel.

    The function runs a few times on arguments whose last bit is changed at random. An infinite difference, as between
    integers or where a result becomes NaN, is ignored.

    Args:
        reference: the torch function.
        tensors: its arguments.
        expected: its results for them.
    """
    generator = torch.Generator().manual_seed(0)
    largest = [0.0] * len(expected)
    for _ in range(_TRIALS):
        changed = []
        for tensor in tensors:
            if tensor.is_floating_point() or tensor.is_complex():
                steps = torch.randint(-1, 2, tensor.shape, generator=generator).to(tensor.device)
                changed.append((tensor + tensor * steps * torch.finfo(tensor.dtype).eps).to(tensor.dtype))
            else:
                changed.append(tensor)
        results = [to_numpy(tensor.detach().cpu()) for tensor in reference(*changed)]
        found = [difference(*pair) for pair in zip(results, expected, strict=True)]
        largest = [max(a, b) if np.isfinite(b) else a for a, b in zip(largest, found, strict=True)]
    return [_MARGIN * each for each in largest]
