"""Cross entropy of a linear layer's output, one chunk of rows at a time: the scores of all rows never exist at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from jtbridge.errors import TranslationError
from jtbridge.lowerings._common import jax_dtype
from jtbridge.lowerings._registry import register_lowering

from .class_loss import class_weights


def _chunks(x: jax.Array, size: int) -> jax.Array:
    """Split rows into chunks of `size`, and fill the last chunk with zeros."""
    count = -(-x.shape[0] // size)
    padding = [(0, count * size - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, padding).reshape(count, size, *x.shape[1:])


class _Rows:
    """The scores of a chunk of rows, with the losses of the rows and the derivative of the losses."""

    def __init__(self, x: jax.Array, weight: jax.Array, bias: jax.Array | None, target: jax.Array, dtype: Any):
        scores = jnp.matmul(x, weight.T, preferred_element_type=dtype)
        self._scores = scores if bias is None else scores + bias
        self._target = target[:, None]

    def loss(self) -> jax.Array:
        chosen = jnp.take_along_axis(self._scores, self._target, axis=1)[:, 0]
        return jax.nn.logsumexp(self._scores, axis=1) - chosen

    def slope(self) -> jax.Array:
        """Return the derivative of each row's loss with respect to its scores."""
        classes = jnp.arange(self._scores.shape[1], dtype=self._target.dtype)[None, :]
        return jax.nn.softmax(self._scores, axis=1) - (classes == self._target)


@register_lowering("torch_nn::_linear_cross_entropy_batch_chunked_no_reduction")
def _chunked_losses(
    x: jax.Array,
    linear_weight: jax.Array,
    target: jax.Array,
    linear_bias: jax.Array | None,
    weight: jax.Array | None,
    ignore_index: int,
    batch_chunk_size: int,
    acc_policy: str,
    acc_dtype: torch.dtype,
) -> jax.Array:
    del acc_policy  # says where torch rounds intermediate results
    dtype = jax_dtype(acc_dtype)
    size = max(min(batch_chunk_size, x.shape[0]), 1)
    inside = jnp.where(target == ignore_index, 0, target)

    def step(_: None, rows: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        return None, _Rows(rows[0], linear_weight, linear_bias, rows[1], dtype).loss()

    losses = jax.lax.scan(step, None, (_chunks(x, size), _chunks(inside, size)))[1].reshape(-1)[: x.shape[0]]
    each = class_weights(x.astype(dtype), target, weight, ignore_index).astype(dtype)
    return (losses * each).astype(x.dtype)


@register_lowering("torch_nn::_linear_cross_entropy_batch_chunked")
def _loss_and_gradients(
    x: jax.Array,
    linear_weight: jax.Array,
    target: jax.Array,
    linear_bias: jax.Array | None,
    weight: jax.Array | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    batch_chunk_size: int,
    acc_policy: str,
    acc_dtype: torch.dtype,
    allow_retain_graph: bool,
    compute_input_grad: bool,
    compute_linear_weight_grad: bool,
    compute_linear_bias_grad: bool,
) -> tuple[jax.Array, ...]:
    """Return the loss and its gradients with respect to `x`, `linear_weight` and `linear_bias`.

    A gradient that is not requested is an empty array.
    """
    del acc_policy, allow_retain_graph
    if label_smoothing or reduction not in ("mean", "sum"):
        raise TranslationError(
            f"chunked linear cross entropy with {label_smoothing=}, {reduction=} cannot be translated"
        )
    dtype = jax_dtype(acc_dtype)
    size = max(min(batch_chunk_size, x.shape[0]), 1)
    each = class_weights(x.astype(dtype), target, weight, ignore_index).astype(dtype)
    if reduction == "mean":
        each = each / jnp.sum(each)  # NaN if all targets are ignored
    inside = jnp.where(target == ignore_index, 0, target)

    def step(sums: tuple[Any, ...], rows: tuple[jax.Array, ...]) -> tuple[tuple[Any, ...], Any]:
        some, labels, count = rows
        loss, by_weight, by_bias = sums
        found = _Rows(some, linear_weight, linear_bias, labels, dtype)
        loss = loss + jnp.sum(found.loss() * count)
        slope = found.slope() * count[:, None]
        by_input = jnp.matmul(slope, linear_weight.astype(dtype)).astype(x.dtype) if compute_input_grad else None
        if compute_linear_weight_grad:
            by_weight = by_weight + jnp.matmul(slope.T, some.astype(dtype))
        if compute_linear_bias_grad:
            by_bias = by_bias + jnp.sum(slope, axis=0)
        return (loss, by_weight, by_bias), by_input

    start = (
        jnp.asarray(jnp.nan if reduction == "mean" and x.shape[0] == 0 else 0, dtype),
        jnp.zeros(linear_weight.shape if compute_linear_weight_grad else (0, 0), dtype),
        jnp.zeros(linear_weight.shape[:1] if compute_linear_bias_grad else (0,), dtype),
    )
    (loss, by_weight, by_bias), by_input = jax.lax.scan(
        step, start, (_chunks(x, size), _chunks(inside, size), _chunks(each, size))
    )
    by_input = by_input.reshape(-1, x.shape[1])[: x.shape[0]] if compute_input_grad else jnp.zeros((0, 0), x.dtype)
    return loss.astype(x.dtype), by_input, by_weight.astype(x.dtype), by_bias.astype(x.dtype)
