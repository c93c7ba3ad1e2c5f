"""The loss and its gradients, a chunk of tokens at a time: a matrix product, then the cross-entropy kernels.

XLA computes the matrix products (cuBLAS on a GPU). A chunk is large enough for them to run at full speed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jtbridge._compat import unify_varying_axes
from jtbridge.kernels._cross_entropy.op import rows_backward, rows_forward


@dataclasses.dataclass(frozen=True)
class Options:
    """The static options of the loss."""

    smoothing: float
    ignore_index: int
    chunk: int  # tokens
    accumulator: Any  # the dtype in which gradients of the weight and the bias are summed over chunks


def losses(
    hidden: jax.Array, weight: jax.Array, bias: jax.Array, labels: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Return the loss and log-sum-exp of each token of ``hidden[tokens, width]``, one chunk of logits at a time."""
    forward = rows_forward(options.ignore_index, options.smoothing)

    def one(_: Any, chunk: Sequence[jax.Array]) -> tuple[Any, Sequence[jax.Array]]:
        some_hidden, some_labels = chunk
        return [], forward(_logits(some_hidden, weight, bias), some_labels)

    loss, lse = _scan(one, [], [hidden, labels], [0, options.ignore_index], options.chunk)[1]
    return loss, lse


def sum_and_gradients(
    hidden: jax.Array, weight: jax.Array, bias: jax.Array, labels: jax.Array, options: Options, wanted: Sequence[bool]
) -> tuple[jax.Array, list[jax.Array]]:
    """Return the sum of the losses, and the `wanted` gradients of the sum, of `hidden`, `weight` and `bias`.

    The logits of a chunk are computed once, for the loss and the gradients. This takes three matrix products in total,
    as many as with all logits stored.
    """
    forward = rows_forward(options.ignore_index, options.smoothing)
    backward = rows_backward(options.ignore_index, options.smoothing)

    def one(sums: Any, chunk: Sequence[jax.Array]) -> tuple[Any, Sequence[jax.Array]]:
        some_hidden, some_labels = chunk
        logits = _logits(some_hidden, weight, bias)
        loss, lse = forward(logits, some_labels)
        (slope,) = backward(logits, some_labels, lse, jnp.ones_like(loss))
        return _chunk_gradients(sums, slope, some_hidden, weight, wanted, [loss])

    start = _zero_sums(weight, bias, wanted, options)
    sums, (loss, *of_hidden) = _scan(one, start, [hidden, labels], [0, options.ignore_index], options.chunk)
    return loss.sum(), [*of_hidden, *sums]


def loss_gradients(
    hidden: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    labels: jax.Array,
    lse: jax.Array,
    ct: jax.Array,
    options: Options,
    wanted: Sequence[bool],
) -> list[jax.Array]:
    """Return the gradients that are `wanted`, given a cotangent of each token's loss. Computes the logits again."""
    backward = rows_backward(options.ignore_index, options.smoothing)

    def one(sums: Any, chunk: Sequence[jax.Array]) -> tuple[Any, Sequence[jax.Array]]:
        some_hidden, some_labels, some_lse, some_ct = chunk
        (slope,) = backward(_logits(some_hidden, weight, bias), some_labels, some_lse, some_ct)
        return _chunk_gradients(sums, slope, some_hidden, weight, wanted, [])

    start = _zero_sums(weight, bias, wanted, options)
    fill = [0, options.ignore_index, 0, 0]
    sums, of_hidden = _scan(one, start, [hidden, labels, lse, ct], fill, options.chunk)
    return [*of_hidden, *sums]


def _logits(hidden: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    return hidden @ weight.T + bias if bias.size else hidden @ weight.T


def _zero_sums(weight: jax.Array, bias: jax.Array, wanted: Sequence[bool], options: Options) -> list[jax.Array]:
    arrays = [x for x, w in zip((weight, bias), wanted[1:], strict=True) if w]
    return [jnp.zeros(x.shape, options.accumulator) for x in arrays]


def _chunk_gradients(
    sums: Sequence[jax.Array],
    slope: jax.Array,
    hidden: jax.Array,
    weight: jax.Array,
    wanted: Sequence[bool],
    outputs: Sequence[jax.Array],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Compute the gradients of the arguments from `slope`, the gradient of a chunk's logits.

    Returns the sums with the chunk's gradients of weight and bias added, and the outputs with the gradient of `hidden`
    appended.
    """
    of_hidden, of_weight, of_bias = wanted
    before, after = iter(sums), []
    if of_weight:
        total = next(before)
        # One matrix product that accumulates into the sum.
        product = jax.lax.dot_general(slope, hidden, (((0,), (0,)), ((), ())), preferred_element_type=total.dtype)
        after.append(total + product)
    if of_bias:
        total = next(before)
        after.append(total + slope.sum(0, dtype=jnp.float32).astype(total.dtype))
    return after, [*outputs, *([slope @ weight] if of_hidden else [])]


def _scan(
    one: Callable[[Any, Sequence[jax.Array]], tuple[Any, Sequence[jax.Array]]],
    start: Sequence[jax.Array],
    arrays: Sequence[jax.Array],
    fill: Sequence[int],
    chunk: int,
) -> tuple[Any, list[jax.Array]]:
    """Run ``lax.scan`` over chunks of tokens, and join the outputs of all tokens.

    `fill` holds for each array the value that pads the last chunk.
    """
    tokens = arrays[0].shape[0]
    count = -(-tokens // chunk)

    def cut(x: jax.Array, value: int) -> jax.Array:
        if count * chunk != tokens:
            x = jnp.pad(x, [(0, count * chunk - tokens)] + [(0, 0)] * (x.ndim - 1), constant_values=value)
        return x.reshape(count, chunk, *x.shape[1:])

    # Derivatives of the scan compute the logits again too, instead of saving them.
    one = jax.checkpoint(one, prevent_cse=False)  # type: ignore[assignment]
    # Inside `shard_map`, the sums vary over the mesh axes over which the tokens vary.
    begin = [unify_varying_axes([x, arrays[0]])[0] for x in start]
    last, outputs = jax.lax.scan(one, begin, [cut(x, value) for x, value in zip(arrays, fill, strict=True)])
    return last, [y.reshape(count * chunk, *y.shape[2:])[:tokens] for y in outputs]
