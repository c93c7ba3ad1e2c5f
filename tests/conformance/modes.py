"""The five modes: for each, torch's reference and the JAX program that must give the same.

A JAX program is built from `call`, a JAX function of the sample's arrays that returns its output leaves as a list.

Complex numbers: for y = f(x) with a real loss L, torch's gradient is dL/dRe + i dL/dIm and JAX's cotangent is
the conjugate of that. So a torch cotangent is conjugated on its way into ``jax.vjp``, and a gradient on its way
out (:func:`_torch_vjp`); real numbers are not changed by it. Tangents of forward mode are the same on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import torch

from . import reference
from .convert import jax_unsupported_reason
from .exactness import widened
from .samples import NotApplicableError, Sample
from .trees import leaves, skeleton

Arrays = Sequence[Any]
Tensors = Sequence[torch.Tensor]
Call = Callable[..., list[Any]]


@dataclass(frozen=True)
class Problem:
    """One case: a torch function, a JAX program around it, the program's inputs, and the expected results."""

    function: Callable[..., Any]
    # The result of the function for one row, which gives the shapes if they depend on the data.
    example: Any
    inputs: tuple[torch.Tensor, ...]
    program: Callable[[Call], Callable[..., list[Any]]]
    expected: list[Any]
    # A function that returns torch's result for inputs like these.
    reference: Callable[[Tensors], list[Any]]
    # The containers of the output; None where the mode does not return the function's own output.
    skeleton: str | None = None

    @cached_property
    def exact(self) -> list[Any] | None:
        """Return the results in double precision, if torch has it."""
        try:
            return self.reference([widened(tensor) for tensor in self.inputs])
        except (NotApplicableError, *reference.REFUSALS):
            return None


def build(mode: str, sample: Sample) -> Problem:
    """Return the case of a sample in a mode, or raise :class:`NotApplicableError`."""
    return _MODES[mode](sample)


def _forward(sample: Sample) -> Problem:
    out = _run(sample.function, sample)

    def torchs(tensors: Tensors) -> list[Any]:
        return leaves(reference.run(sample.function, tensors))

    return Problem(sample.function, out, sample.tensors, lambda call: call, leaves(out), torchs, skeleton(out))


def _vmap(sample: Sample) -> Problem:
    if not sample.tensors:
        raise NotApplicableError("no tensor input to batch")
    _run(sample.function, sample)
    inputs, outputs = reference.rows(sample)
    if not all(isinstance(leaf, torch.Tensor) for out in outputs for leaf in leaves(out)):
        raise NotApplicableError("the output is a Python number, which has no batch axis")

    def torchs(tensors: Tensors) -> list[Any]:
        rows = zip(*(tensor.unbind() for tensor in tensors), strict=True)
        return _stacked([reference.run(sample.function, row) for row in rows])

    return Problem(
        sample.function,
        outputs[0],
        tuple(torch.stack(column) for column in zip(*inputs, strict=True)),
        jax.vmap,
        _stacked(outputs),
        torchs,
        skeleton(outputs[0]),
    )


def _stacked(outputs: Sequence[Any]) -> list[torch.Tensor]:
    return [torch.stack(column) for column in zip(*map(leaves, outputs), strict=True)]


def _random_like(tensors: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Return tangents or cotangents, from a separate generator that random operators do not advance."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor: torch.Tensor) -> torch.Tensor:
        kind = torch.complex64 if tensor.is_complex() else torch.float32
        return torch.randn(tensor.shape, dtype=kind, generator=generator).to(tensor.dtype)

    return [draw(tensor) for tensor in tensors]


def _grad(sample: Sample) -> Problem:
    function = _differentiable(sample)
    out = _run(function, sample)
    cotangents = _random_like(reference.float_outputs(out), 1)
    count = len(sample.tensors)

    def torchs(where: list[int], inputs: Tensors) -> list[torch.Tensor]:
        variables = reference.leaf_variables(inputs[:count], where)
        return reference.vjp(function, variables, where, inputs[count:])

    def inputs_at(where: list[int]) -> Tensors:
        return (*sample.tensors, *cotangents)

    return _derivative(sample, function, out, inputs_at, torchs, partial(_vjp_program, count))


def _gradgrad(sample: Sample) -> Problem:
    function = _differentiable(sample)
    out = _run(function, sample)
    cotangents = _random_like(reference.float_outputs(out), 1)
    count, total = len(sample.tensors), len(sample.tensors) + len(cotangents)

    def torchs(where: list[int], inputs: Tensors) -> list[torch.Tensor]:
        return reference.double_vjp(function, inputs[:count], where, inputs[count:total], inputs[total:])

    def inputs_at(where: list[int]) -> Tensors:
        return (*sample.tensors, *cotangents, *_random_like([sample.tensors[i] for i in where], 2))

    return _derivative(sample, function, out, inputs_at, torchs, partial(_double_vjp_program, count, len(cotangents)))


def _jvp(sample: Sample) -> Problem:
    function = _differentiable(sample)
    out = _run(function, sample)
    count = len(sample.tensors)

    def torchs(where: list[int], inputs: Tensors) -> list[torch.Tensor]:
        by_forward_mode = sample.operator not in reference.WITHOUT_FORWARD_MODE
        return reference.jvp(function, inputs[:count], where, inputs[count:], forward_mode=by_forward_mode)

    def inputs_at(where: list[int]) -> Tensors:
        return (*sample.tensors, *_random_like([sample.tensors[i] for i in where], 1))

    return _derivative(sample, function, out, inputs_at, torchs, partial(_jvp_program, count))


def _derivative(
    sample: Sample,
    function: Callable[..., Any],
    out: Any,
    inputs_at: Callable[[list[int]], Tensors],
    torchs: Callable[[list[int], Tensors], list[torch.Tensor]],
    program: Callable[..., Any],
) -> Problem:
    """Return the case of a derivative with respect to the inputs that torch can differentiate by."""
    where, expected = reference.differentiable_inputs(sample.tensors, lambda where: torchs(where, inputs_at(where)))
    inputs = tuple(inputs_at(where))
    return Problem(function, out, inputs, partial(program, where), expected, partial(torchs, where))


def _run(function: Callable[..., Any], sample: Sample) -> Any:
    out = reference.run(function, sample.tensors)
    for leaf in leaves(out):
        if isinstance(leaf, torch.Tensor) and (reason := jax_unsupported_reason(leaf)):
            raise NotApplicableError(f"an output: {reason}")
    return out


def _differentiable(sample: Sample) -> Callable[..., Any]:
    """Return the function to differentiate: the operator itself if all of its results have a derivative."""
    out = reference.run(sample.differentiable, sample.tensors)
    raw = reference.run(sample.function, sample.tensors)
    same = skeleton(out) == skeleton(raw) and len(leaves(out)) == len(leaves(raw))
    if same and all(_identical(a, b) for a, b in zip(leaves(out), leaves(raw), strict=True)):
        return sample.function
    return sample.differentiable


def _identical(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is b
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _float_leaves(call: Call, arrays: Arrays, where: Sequence[int]) -> Callable[..., list[Any]]:
    """Return a function of the arrays at `where` that returns the float outputs."""

    def function(*chosen: Any) -> list[Any]:
        filled = list(arrays)
        for i, array in zip(where, chosen, strict=True):
            filled[i] = array
        return [leaf for leaf in call(*filled) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]

    return function


def _torch_vjp(function: Callable[..., list[Any]], primals: Arrays, cotangents: Arrays) -> list[Any]:
    """Compute ``jax.vjp`` with cotangents and gradients in torch's convention."""
    _, pull_back = jax.vjp(function, *primals)
    return [jnp.conj(grad) for grad in pull_back([jnp.conj(cotangent) for cotangent in cotangents])]


def _vjp_program(count: int, where: Sequence[int], call: Call) -> Callable[..., list[Any]]:
    def program(*inputs: Any) -> list[Any]:
        arrays, cotangents = inputs[:count], inputs[count:]
        return _torch_vjp(_float_leaves(call, arrays, where), [arrays[i] for i in where], cotangents)

    return program


def _double_vjp_program(count: int, outputs: int, where: Sequence[int], call: Call) -> Callable[..., list[Any]]:
    def program(*inputs: Any) -> list[Any]:
        arrays, cotangents = inputs[:count], inputs[count : count + outputs]
        primals = [arrays[i] for i in where]

        def gradient(*both: Any) -> list[Any]:
            chosen, firsts = both[: len(where)], both[len(where) :]
            return _torch_vjp(_float_leaves(call, arrays, where), chosen, firsts)

        return _torch_vjp(gradient, [*primals, *cotangents], inputs[count + outputs :])

    return program


def _jvp_program(count: int, where: Sequence[int], call: Call) -> Callable[..., list[Any]]:
    def program(*inputs: Any) -> list[Any]:
        arrays, tangents = inputs[:count], inputs[count:]
        function = _float_leaves(call, arrays, where)
        return jax.jvp(function, [arrays[i] for i in where], list(tangents))[1]

    return program


_MODES: dict[str, Callable[[Sample], Problem]] = {
    "forward": _forward,
    "grad": _grad,
    "vmap": _vmap,
    "jvp": _jvp,
    "gradgrad": _gradgrad,
}
MODES = tuple(_MODES)
