"""One architecture under `jit`, compared with torch."""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jtbridge
from jtbridge.errors import CalledWarning

from .row import Row

# XLA makes the same program, but LLVM does not optimise it: this halves the time to compile a program that runs once.
_QUICK = {"xla_backend_optimization_level": 0}
_FORWARD, _GRADIENT = 2e-5, 2e-4  # allowed differences, relative to the largest element


@dataclasses.dataclass(frozen=True)
class Result:
    """The comparison of one architecture with torch.

    Attributes:
        name: the name of the row.
        verdict: "translated", "called", "wrong" or "error".
        reason: why it is not "translated"; otherwise "".
        forward, gradient: the largest differences, relative to the largest element of a result, and of the gradient by
            one parameter; None if there is none, because of an error.
    """

    name: str
    verdict: str
    reason: str = ""
    forward: float | None = None
    gradient: float | None = None


def compare(name: str, row: Row) -> Result:
    """Run forward and gradient under `jit` and in torch, and compare all results and all gradients."""
    try:
        model, inputs = row.make(), row.inputs()
        expected, expected_gradients = _in_torch(model, inputs)
    except Exception as error:  # noqa: BLE001  (the row is wrong, or transformers is)
        return Result(name, "error", f"in torch: {_line(error)}")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CalledWarning)
            outs, gradients = _under_jit(model, inputs)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is the result)
        return Result(name, "error", _line(error))
    forward = max(_difference(out, value) for out, value in zip(outs, expected, strict=True))
    largest = max(float(g.abs().max()) for g in expected_gradients.values())
    by_parameter = {
        key: _difference(gradients[key], value, floor=1e-3 * largest) for key, value in expected_gradients.items()
    }
    worst = max(by_parameter, key=by_parameter.__getitem__)
    figures = {"forward": forward, "gradient": by_parameter[worst]}
    if not forward <= _FORWARD:
        return Result(name, "wrong", "the forward pass differs", **figures)
    if not by_parameter[worst] <= _GRADIENT:
        return Result(name, "wrong", f"the gradient by `{worst}` differs", **figures)
    reasons = [_short(str(w.message)) for w in caught if issubclass(w.category, CalledWarning)]
    return Result(name, "called" if reasons else "translated", " ".join(dict.fromkeys(reasons)), **figures)


def _in_torch(model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    outs = _floats(model(**inputs))
    weighted = [(out * torch.from_numpy(_weights(out.shape))).sum() for out in outs if out.requires_grad]
    sum(weighted).backward()  # type: ignore[union-attr]
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    model.zero_grad()
    return [out.detach() for out in outs], gradients


def _under_jit(model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    net = jtbridge.module(model)
    params, state = net.init()
    arrays = {name: value.numpy() for name, value in inputs.items()}

    def loss(params: Any, state: Any, arrays: Any) -> Any:
        out, _ = net(params, state, **arrays)
        outs = _floats(out)
        return sum((out * _weights(out.shape)).sum() for out in outs), outs

    program = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=_QUICK)
    (_, outs), gradients = program(params, state, arrays)
    return outs, gradients


def _floats(out: Any) -> list[Any]:
    """Return the tensors of floats that are fields of an output of transformers."""
    values = out.values() if hasattr(out, "values") else out if isinstance(out, tuple | list) else [out]
    found = []
    for value in values:
        is_float = (isinstance(value, torch.Tensor) and value.is_floating_point()) or (
            isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating)
        )
        found += [value] if is_float else []
    assert found
    return found


def _weights(shape: Any) -> np.ndarray:
    """Return weights for the elements of a result in the loss; a plain sum would hide errors that cancel."""
    size = int(np.prod(shape))
    return (np.cos(np.arange(size) * 0.7) / max(size, 1)).astype(np.float32).reshape(tuple(shape))


def _difference(actual: Any, expected: torch.Tensor, floor: float = 1e-6) -> float:
    """Return the largest difference relative to the largest element, or relative to `floor` if that is larger."""
    a, b = np.asarray(actual, np.float64), expected.detach().numpy().astype(np.float64)
    if a.shape != b.shape:
        return float("inf")
    if not b.size:
        return 0.0
    finite = np.isfinite(b)
    if not (np.array_equal(finite, np.isfinite(a)) and np.array_equal(a[~finite], b[~finite], equal_nan=True)):
        return float("inf")
    a, b = np.where(finite, a, 0), np.where(finite, b, 0)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), floor))


def _short(warning: str) -> str:
    """Return the reason in a `CalledWarning`, with file names instead of paths."""
    reason = warning.splitlines()[0].partition("cannot be traced: ")[2] or warning.splitlines()[0]
    return re.sub(r"\(/\S*/([^/\s)]+)\)", r"(\1)", reason.partition(" Choose backend=")[0]).rstrip(".")


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
