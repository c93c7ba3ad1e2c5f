"""`torch_call` and `torch_linear`, the primitives that the rules of every primitive bind.

Their own rules are in `_call.py` and `_linear.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jtbridge.capture import check_differentiable
from jtbridge.core.functions import TorchFunction
from jtbridge.core.primitive_rules import differentiable, tangents_by
from jtbridge.transforms import Jvp, Vjp

from ._common import bind, new_primitive

torch_call_p = new_primitive("torch_call", lambda *args, fn: (fn, args))


def torch_call(*args: Any, fn: TorchFunction, backend: str) -> list[Any]:
    """Run `fn`, a torch function of flat arrays, as part of a JAX program."""
    return bind(torch_call_p, *args, fn=fn, backend=backend)


def linear_operands(*args: Any, forward: TorchFunction, counts: tuple[int, int], **_: Any) -> Any:
    """Return the function that `torch_linear` computes, and its inputs: the operands without the residuals."""
    inputs, saved = counts
    return forward, [*args[:inputs], *args[inputs + saved :]]


torch_linear_p = new_primitive("torch_linear", linear_operands)


def differential(
    fn: TorchFunction,
    wrt: tuple[int, ...],
    args: Sequence[Any],
    tangents: Sequence[Any],
    *,
    backend: str,
    saved: Sequence[Any] = (),
    backward: TorchFunction | None = None,
) -> list[Any]:
    """Return ``Df(args) tangents`` for the differentiated inputs `wrt`: a tangent for each differentiable result.

    `saved` are the residuals of the forward, and `backward` the function that uses them; None if there is none.
    """
    outs = differentiable(fn.out_types)
    return bind(
        torch_linear_p,
        *args,
        *saved,
        *tangents,
        forward=Jvp(fn, wrt, outs),
        transpose=Vjp(fn, wrt, outs),
        backward=backward,
        counts=(len(args), len(saved)),
        backend=backend,
    )


def traced_tangents(
    fn: TorchFunction, results: Sequence[Any], args: Sequence[Any], tangents: Sequence[Any], backend: str
) -> list[Any]:
    """Return the tangents of all results: derivatives for float and complex results, symbolic zeros for the others."""

    def checked_differential(wrt: tuple[int, ...], given: list[Any]) -> Any:
        check_differentiable(fn, wrt, again=True)
        return differential(fn, wrt, args, given, backend=backend)

    return tangents_by(checked_differential, fn, results, tangents)
