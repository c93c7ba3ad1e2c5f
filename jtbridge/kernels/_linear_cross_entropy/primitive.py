"""The loss as a JAX primitive. Each transformation computes the loss differently.

- Without a transformation: the losses, chunk by chunk.
- The derivative of the sum of the losses: the gradients are computed with the sum, and reverse mode only multiplies
  them by the cotangent, a scalar. The logits are computed once, and are not saved for the backward.
- The derivative of each loss: the cotangents are not known in the forward, so reverse mode computes the logits again.
- A batch that shares the weight and the bias: the batch axis is folded into the tokens, and the losses are summed for
  each element of the batch. The batching rule applies before a derivative is taken, so the gradient of the weight has
  no batch axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jtbridge._compat import call_aval
from jtbridge.core.primitive_rules import batch_first, batch_size
from jtbridge.kernels import _manual
from jtbridge.kernels._eager import run_compiled
from jtbridge.kernels._linear import bind_linear

from . import chunks
from .chunks import Options

linear_cross_entropy_p = Primitive("linear_cross_entropy")


def bind(
    hidden: jax.Array, weight: jax.Array, bias: jax.Array, labels: jax.Array, *, summed: bool, options: Options
) -> jax.Array:
    """Return the losses of ``hidden[tokens, width]`` in float32, or their sum, by binding the primitive.

    Args:
        hidden: [tokens, width].
        weight: [classes, width], of the same dtype.
        bias: [classes], of the same dtype; [0] for none.
        labels: [tokens], int32 or int64.
        summed: whether the result is the sum.
        options: see :class:`Options`.
    """
    arrays = hidden, weight, bias, labels
    return _manual.bind(linear_cross_entropy_p, *arrays, summed=summed, options=options)


def _compute(*arrays: Any, summed: bool, options: Options) -> list[jax.Array]:
    hidden, weight, bias, labels = arrays
    loss = chunks.losses(hidden, weight, bias, labels, options)[0]
    return [loss.sum() if summed else loss]


@linear_cross_entropy_p.def_impl
def _impl(*arrays: Any, summed: bool, options: Options) -> jax.Array:
    return run_compiled(linear_cross_entropy_p, "linear_cross_entropy", *arrays, summed=summed, options=options)


@linear_cross_entropy_p.def_abstract_eval
def _abstract(*arrays: Any, summed: bool, options: Options) -> ShapedArray:
    del options
    return call_aval(() if summed else arrays[3].shape, jnp.dtype("float32"), arrays)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, summed: bool, options: Options) -> tuple[Any, Any]:
    wanted = [type(t) is not ad.Zero for t in tangents[:3]]
    dxs = [t for t, w in zip(tangents, wanted, strict=False) if w]
    if not dxs:
        result = bind(*primals, summed=summed, options=options)
        return result, jnp.zeros_like(result)
    rule = _jvp_of_sum if summed else _jvp_of_each
    return rule(primals, dxs, wanted, options)


def _jvp_of_sum(primals: Sequence[Any], dxs: Sequence[Any], wanted: list[bool], options: Options) -> tuple[Any, Any]:
    hidden, weight, bias, labels = primals
    dtypes = [t.dtype for t in dxs]
    result, grads = chunks.sum_and_gradients(hidden, weight, bias, labels, options, wanted)

    def along(grads: Sequence[Any], dxs: Sequence[Any]) -> list[Any]:
        parts = [jnp.vdot(g.astype(jnp.float32), t.astype(jnp.float32)) for g, t in zip(grads, dxs, strict=True)]
        return [sum(parts[1:], parts[0])]

    def pull(grads: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        (ct,) = cotangents
        return [(ct * g.astype(jnp.float32)).astype(d) for g, d in zip(grads, dtypes, strict=True)]

    return result, bind_linear(along, pull, grads, dxs)[0]


def _jvp_of_each(primals: Sequence[Any], dxs: Sequence[Any], wanted: list[bool], options: Options) -> tuple[Any, Any]:
    hidden, weight, bias, labels = primals
    dtypes = [t.dtype for t in dxs]
    result, lse = chunks.losses(hidden, weight, bias, labels, options)

    def along(residuals: Sequence[Any], dxs: Sequence[Any]) -> list[Any]:
        def of_wanted(*xs: Any) -> jax.Array:
            given = iter(xs)
            hidden, weight, bias = (next(given) if w else r for w, r in zip(wanted, residuals, strict=False))
            return chunks.losses(hidden, weight, bias, residuals[3], options)[0]

        at = tuple(r for w, r in zip(wanted, residuals, strict=False) if w)
        return [jax.jvp(of_wanted, at, tuple(dxs))[1]]

    def pull(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        hidden, weight, bias, labels, lse = residuals
        grads = chunks.loss_gradients(hidden, weight, bias, labels, lse, cotangents[0], options, wanted)
        return [g.astype(d) for g, d in zip(grads, dtypes, strict=True)]

    return result, bind_linear(along, pull, [*primals, lse], dxs)[0]


def _batch(arrays: Sequence[Any], dims: Sequence[int | None], *, summed: bool, options: Options) -> tuple[Any, Any]:
    size = batch_size(arrays, dims)
    arrays, _ = batch_first(arrays, dims)
    hidden, weight, bias, labels = arrays
    if dims[1] is None and dims[2] is None:
        hidden = hidden if dims[0] is not None else jnp.broadcast_to(hidden, (size, *hidden.shape))
        labels = labels if dims[3] is not None else jnp.broadcast_to(labels, (size, *labels.shape))
        tokens = hidden.reshape(-1, hidden.shape[-1])
        losses = bind(tokens, weight, bias, labels.reshape(-1), summed=False, options=options).reshape(labels.shape)
        return (losses.sum(-1) if summed else losses), 0

    def row(rows: Sequence[jax.Array]) -> jax.Array:
        given = iter(rows)
        one = [x if d is None else next(given) for x, d in zip(arrays, dims, strict=True)]
        return bind(one[0], one[1], one[2], one[3], summed=summed, options=options)

    return jax.lax.map(row, [x for x, d in zip(arrays, dims, strict=True) if d is not None]), 0


ad.primitive_jvps[linear_cross_entropy_p] = _jvp
batching.primitive_batchers[linear_cross_entropy_p] = _batch
mlir.register_lowering(linear_cross_entropy_p, _manual.lower_plainly(_compute))
