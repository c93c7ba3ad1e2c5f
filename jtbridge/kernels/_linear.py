"""A linear function whose transpose is given: ``bind_linear(fun, transpose, residuals, tangents)``.

JAX can transpose the derivative of a function automatically. Here the transpose is a kernel instead.
``jax.custom_derivatives`` has ``linear_call`` for such a function, but ``linear_call`` cannot be batched, and
``custom_vjp`` has no forward mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir

from jtbridge.core.primitive_rules import primitive_of_several_results

from ._manual import as_varying, bind, lower_plainly

# (flat residuals, flat tangents or cotangents) -> flat results.
Function = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]

linear_p = primitive_of_several_results("kernel_linear")


@linear_p.def_impl
def _impl(*operands: Any, fun: Function, transpose: Function, count: int) -> list[Any]:
    del transpose
    return list(fun(operands[:count], operands[count:]))


@linear_p.def_abstract_eval
def _abstract(*operands: Any, fun: Function, transpose: Function, count: int) -> list[ShapedArray]:
    del transpose
    return as_varying(lambda *xs: fun(xs[:count], xs[count:]), operands)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, fun: Function, transpose: Function, count: int) -> Any:
    results = bind(linear_p, *primals, fun=fun, transpose=transpose, count=count)
    instantiated = [ad.instantiate_zeros(t) for t in tangents]
    # The function is linear in its tangents, so its derivative along them is the function itself. It need not be linear
    # in the residuals: JAX differentiates it with respect to them below.
    along = bind(linear_p, *primals[:count], *instantiated[count:], fun=fun, transpose=transpose, count=count)
    if all(type(t) is ad.Zero for t in tangents[:count]):
        return results, along
    _, turned = jax.jvp(lambda *r: list(fun(r, primals[count:])), tuple(primals[:count]), tuple(instantiated[:count]))
    return results, [ad.add_tangents(a, t) for a, t in zip(along, turned, strict=True)]


def _transpose(cotangents: Sequence[Any], *operands: Any, fun: Function, transpose: Function, count: int) -> list[Any]:
    residuals, tangents = operands[:count], operands[count:]
    if any(ad.is_undefined_primal(r) for r in residuals):
        raise NotImplementedError("a kernel's derivative can be transposed only in the tangents, not in the residuals")
    filled = [ad.instantiate_zeros(ct) for ct in cotangents]
    wanted = [ad.is_undefined_primal(t) for t in tangents]
    grads = bind(linear_p, *residuals, *filled, fun=transpose, transpose=fun, count=count)
    return [None] * count + [g if w else None for g, w in zip(grads, wanted, strict=True)]


def _batch(args: Sequence[Any], dims: Sequence[Any], *, fun: Function, transpose: Function, count: int) -> Any:
    (size,) = {x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None}
    saved = list(dims[:count])
    # Every tangent gets a batch axis, so that the transpose need not sum a cotangent over the batch.
    tangents = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(args[count:], dims[count:], strict=True)
    ]

    def batched(function: Function) -> Function:
        def run(residuals: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
            return jax.vmap(lambda r, t: list(function(r, t)), (saved, 0), 0, axis_size=size)(
                list(residuals), list(tangents)
            )

        return run

    results = bind(linear_p, *args[:count], *tangents, fun=batched(fun), transpose=batched(transpose), count=count)
    return results, [0] * len(results)


ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batch
mlir.register_lowering(linear_p, lower_plainly(_impl))


def bind_linear(fun: Function, transpose: Function, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Return ``fun(residuals, tangents)``, a function linear in the tangents.

    JAX transposes the call to ``transpose(residuals, cotangents)``.
    """
    return bind(linear_p, *residuals, *tangents, fun=fun, transpose=transpose, count=len(residuals))
