"""Comparison of every backend with torch itself, on the user's own inputs: :func:`jtbridge.check`."""

from __future__ import annotations

import dataclasses
import operator
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtbridge._backends import backends
from jtbridge.calls._config import config
from jtbridge.calls._wrap import Wrapped, as_wrapped
from jtbridge.calls.traced import by_rounding, difference, tolerance
from jtbridge.capture import device_closed_over
from jtbridge.core.array_types import ArrayType
from jtbridge.core.convert import to_torch
from jtbridge.core.fork import check_not_forked
from jtbridge.core.functions import Tensors, TorchFunction, TracedFunction
from jtbridge.core.host_memory import to_numpy
from jtbridge.core.messages import summary_of
from jtbridge.core.positions import of_differentiated
from jtbridge.core.primitive_rules import differentiable
from jtbridge.core.runner import describe_arguments
from jtbridge.core.signals import raise_if_from_signal
from jtbridge.errors import ArgumentError, CalledWarning, EffectsError, SequentialVmapWarning, TranslationError
from jtbridge.primitives import torch_call
from jtbridge.transforms import Jvp, Vjp, Vmap

_MODES = ("value", "vjp", "jvp", "vmap")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Comparison of one backend with torch in one mode.

    Attributes:
        backend: the name of the backend.
        mode: "value", "vjp", "jvp" or "vmap".
        difference: the largest absolute difference from torch's result, as a share of the largest magnitude of that
            result; None if no difference was computed.
        ok: whether the difference is within rounding of the dtype. For a function that draws: whether the same key
            gives the same result. True for a mode that did not run because there is nothing to differentiate, or
            because the backend cannot translate the function.
        note: why there is no difference; the error of the backend; or that a forward derivative is that of torch's
            forward mode, and not the transpose of the gradient. Else empty.
    """

    backend: str
    mode: str
    difference: float | None
    ok: bool
    note: str = ""


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """Report of :func:`check`. Printing it gives a table; ``ok`` says whether everything that ran agrees with torch."""

    function: str
    comparisons: tuple[Comparison, ...]

    @property
    def ok(self) -> bool:
        return all(each.ok for each in self.comparisons)

    def __str__(self) -> str:
        lines = [self.function, f"{'backend':<10}{'mode':<8}{'difference':<12}"]
        for each in self.comparisons:
            difference = "-" if each.difference is None else f"{each.difference:.1e}"
            verdict = each.note or ("ok" if each.ok else "DIFFERS")
            lines.append(f"{each.backend:<10}{each.mode:<8}{difference:<12}{verdict}")
        return "\n".join(lines)

    __repr__ = __str__


def check(fn: Any, *args: Any, **kwargs: Any) -> CheckReport:
    """Run a function on your own inputs with every available backend, and compare the results with torch's.

    Four results are compared, each under ``jax.jit``: the value, a vector-Jacobian product and a Jacobian-vector
    product along random directions, and two rows under ``jax.vmap``.

    Args:
        fn: a wrapped function, or a torch function. Functions with ordered effects cannot be checked.
        args, kwargs: the arguments of a call, ``rng=`` included. A function that draws gets other random numbers from
            torch, so it is not compared with torch: the same key must give the same result twice.

    Returns:
        A report to print; ``.ok`` says whether all results agree to within rounding.

    Raises:
        ArgumentError: an argument has no values.
        EffectsError: the function has ordered effects, which would happen in each of these runs.
        JtbridgeError: any error that a call would raise before it runs.

    Example:
        >>> import jax.numpy as jnp, jtbridge, torch
        >>> jtbridge.check(torch.sin, jnp.ones(3)).ok
        True
    """
    wrapped = as_wrapped(fn)
    if wrapped.ordered:
        raise EffectsError(
            f'{wrapped!r} has effects="ordered", and `check` runs a function many times, so its side effects would '
            "happen as often. Check the part without side effects by itself."
        )
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((args, kwargs))):
        raise ArgumentError("`check` runs the function, so it takes arrays, and not `jax.ShapeDtypeStruct`.")
    traced, _ = wrapped.prepared(args, dict(kwargs))
    check_not_forked(traced.name)
    found = []
    for status in backends():
        if not status.available:
            continue
        with config(backend=status.name), warnings.catch_warnings():
            warnings.simplefilter("ignore", CalledWarning)
            warnings.simplefilter("ignore", SequentialVmapWarning)
            found += _comparisons(status.name, wrapped, args, kwargs)
    return CheckReport(f"{traced.name}({describe_arguments(traced)})", tuple(found))


def _comparisons(backend: str, wrapped: Wrapped, args: tuple, kwargs: dict[str, Any]) -> list[Comparison]:
    traced, operands = wrapped.prepared(args, dict(kwargs))
    device = device_closed_over(wrapped.runs)
    found = []
    for mode in _MODES:
        case = _CASES[mode](traced, operands)
        if case is None:
            found.append(Comparison(backend, mode, None, True, "nothing to differentiate"))
            continue
        try:
            found.append(_comparison(backend, mode, traced, case, device))
        except TranslationError as error:
            found.append(Comparison(backend, mode, None, True, f"not run: {error}"))
        except Exception as error:  # noqa: BLE001  (whatever a backend raises is what the report is about)
            raise_if_from_signal(error)
            found.append(Comparison(backend, mode, None, False, _what_happened(error)))
    return found


# Finds the error of a callback in the text of XLA's error.
_OF_CALL = re.compile(r"called from a JAX program with .*, raised (.+)|^ *jtbridge\.errors\.(\w+: .+)", re.MULTILINE)


def _what_happened(error: Exception) -> str:
    """Return a summary of an error. For XLA's error about a callback, return what the callback's own error says."""
    found = _OF_CALL.search(str(error))
    return summary_of(error) if found is None else found[1] or found[2]


@dataclasses.dataclass(frozen=True)
class _CheckCase:
    inputs: list[Any]
    program: Callable[[Callable[..., Any]], Callable[..., Any]]  # traced function -> function to compare
    reference: TorchFunction  # torch's function of the same inputs


def _value_case(traced: TracedFunction, operands: list[Any]) -> _CheckCase:
    return _CheckCase(operands, lambda call: call, traced)


def _vjp_case(traced: TracedFunction, operands: list[Any]) -> _CheckCase | None:
    wrt, outs = _differentiated(traced)
    if not wrt or not outs:
        return None
    count = len(operands)
    cotangents = _random_directions([traced.out_types[o] for o in outs])

    def program(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            of_wrt = of_differentiated(call, wrt, outs, inputs[:count])
            return jax.vjp(of_wrt, *(inputs[i] for i in wrt))[1](inputs[count:])

        return run

    return _CheckCase([*operands, *cotangents], program, Vjp(traced, wrt, outs))


def _jvp_case(traced: TracedFunction, operands: list[Any]) -> _CheckCase | None:
    wrt, outs = _differentiated(traced)
    if not wrt or not outs:
        return None
    count = len(operands)
    tangents = _random_directions([traced.in_types[i] for i in wrt])

    def program(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            of_wrt = of_differentiated(call, wrt, outs, inputs[:count])
            return jax.jvp(of_wrt, [inputs[i] for i in wrt], list(inputs[count:]))[1]

        return run

    return _CheckCase([*operands, *tangents], program, Jvp(traced, wrt, outs))


def _vmap_case(traced: TracedFunction, operands: list[Any]) -> _CheckCase | None:
    """Return the case of two rows: the inputs, and the inputs with the floats halved.

    Constants and the key have no batch axis.
    """
    count = traced.first_constant
    if not count or not traced.out_types:
        return None
    rows = [
        jnp.stack([x, x * jnp.asarray(0.5, x.dtype) if type_.differentiable else x])
        for x, type_ in zip(operands[:count], traced.in_types, strict=False)
    ]
    dims = (*(0,) * count, *(None,) * (len(operands) - count))
    return _CheckCase([*rows, *operands[count:]], lambda call: jax.vmap(call, in_axes=dims), Vmap(traced, dims, 2))


_CASES: dict[str, Callable[[TracedFunction, list[Any]], _CheckCase | None]] = {
    "value": _value_case,
    "vjp": _vjp_case,
    "jvp": _jvp_case,
    "vmap": _vmap_case,
}


def _comparison(backend: str, mode: str, traced: TracedFunction, case: _CheckCase, device: str) -> Comparison:
    program = jax.jit(case.program(lambda *operands: torch_call(*operands, fn=traced, backend=backend)))
    got = list(program(*case.inputs))
    if traced.traits.effects.random_operator is not None:
        same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(got, program(*case.inputs), strict=True))
        return Comparison(backend, mode, None, same, "draws: repeats itself" if same else "draws: DOES NOT REPEAT")
    reference = case.reference
    with reference.state.applied():
        tensors = tuple(to_torch(x, copy=True).to(device) for x in case.inputs)
        run = (lambda *tensors: reference.by_loop(tensors)) if isinstance(reference, Vmap) else reference
        worst, same = _difference_from_torch(got, run, tensors)
        by_gradient = reference.by_gradient if isinstance(reference, Jvp) else run
        from_gradient, agrees = (
            _difference_from_torch(got, by_gradient, tensors) if by_gradient is not run else (worst, same)
        )
    note = "" if agrees or not same else f"torch's forward mode; its gradient differs by {from_gradient:.1e}"
    return Comparison(backend, mode, worst, same, note)


def _difference_from_torch(
    got: Sequence[jax.Array], run: Callable[..., Tensors], tensors: Tensors
) -> tuple[float, bool]:
    """Return the greatest difference from torch's results, and whether all results differ by rounding only."""
    expected = [to_numpy(tensor.detach().cpu()) for tensor in run(*tensors)]
    differences = [difference(np.asarray(a), b) for a, b in zip(got, expected, strict=True)]
    allowed = [tolerance(a.dtype) for a in got]
    if not all(map(operator.le, differences, allowed)):
        allowed = list(map(max, allowed, by_rounding(run, tensors, expected)))
    return max(differences, default=0.0), all(map(operator.le, differences, allowed))


def _differentiated(traced: TracedFunction) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return differentiable(traced.in_types[: traced.first_constant]), differentiable(traced.out_types)


def _random_directions(types: Sequence[ArrayType]) -> list[np.ndarray]:
    """Return random directions for derivatives, the same in every run."""
    generator = np.random.default_rng(0)
    found = []
    for type_ in types:
        values = generator.standard_normal(type_.shape)
        if type_.dtype.kind == "c":
            values = values + 1j * generator.standard_normal(type_.shape)
        found.append(np.asarray(values).astype(type_.dtype))
    return found
