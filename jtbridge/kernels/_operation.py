"""A differentiable function of a forward and a backward kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._linear import linear
from ._step import Step

Saved = Callable[[Sequence[jax.Array], Sequence[jax.Array]], Sequence[jax.Array]]


class Operation:
    """A function of arrays with a kernel for its result and one for its gradient, differentiable to any order.

    Reverse mode runs the backward kernel; forward mode and what lies beyond first derivatives are those of the
    references.

    Args:
        forward: ``(*inputs) -> (*results, *more)``; what is `more` is there for the backward.
        backward: ``(*saved, *cotangents) -> gradients``, one for each floating-point input.
        results: how many results there are.
        saved: ``(inputs, outputs of forward) -> saved``: what the backward needs.
    """

    def __init__(self, forward: Step, backward: Step, *, results: int, saved: Saved):
        self._forward = forward
        self._backward = backward
        self._results = results
        self._saved = saved
        self._function = jax.custom_jvp(lambda *inputs: tuple(forward(*inputs)[:results]))
        self._function.defjvp(self._jvp)

    def __call__(self, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        return self._function(*inputs)

    def _jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        count = len(primals)
        floating = [i for i, x in enumerate(primals) if jnp.issubdtype(x.dtype, jnp.floating)]
        outputs = self._forward(*primals)

        def along(residuals: Sequence[Any], moved: Sequence[Any]) -> Sequence[Any]:
            def of_floating(*xs: Any) -> tuple[Any, ...]:
                inputs = list(residuals[:count])
                for i, x in zip(floating, xs, strict=True):
                    inputs[i] = x
                return tuple(self._forward.reference(*inputs))[: self._results]

            return jax.jvp(of_floating, tuple(residuals[i] for i in floating), tuple(moved))[1]

        def pull(residuals: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
            return self._backward(*residuals[count:], *cotangents)

        residuals = [*primals, *self._saved(primals, outputs)]
        moved = linear(along, pull, residuals, [tangents[i] for i in floating])
        return tuple(outputs[: self._results]), tuple(moved)
