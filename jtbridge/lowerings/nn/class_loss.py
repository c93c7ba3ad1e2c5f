"""Losses of class scores against class indices, and their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jtbridge.lowerings._common import opmath
from jtbridge.lowerings._registry import register_lowering

from .loss import MEAN, NONE, reduced_loss


def _target_scores(x: jax.Array, target: jax.Array, axis: int) -> jax.Array:
    """Return the scores of the target classes; NaN for a target that is not a class, for which torch raises."""
    index = jnp.expand_dims(target, axis)
    found = jnp.take_along_axis(x, jnp.clip(index, 0, max(x.shape[axis] - 1, 0)), axis)
    return jnp.squeeze(jnp.where(_is_class(index, x.shape[axis]), found, jnp.nan), axis)


def _is_class(index: jax.Array, count: int) -> jax.Array:
    return (index >= 0) & (index < count)


def _weight_of(target: jax.Array, weight: jax.Array) -> jax.Array:
    found = weight[jnp.clip(target, 0, max(weight.shape[0] - 1, 0))]
    return jnp.where(_is_class(target, weight.shape[0]), found, jnp.nan)


def _is_target(x: jax.Array, target: jax.Array, axis: int) -> jax.Array:
    classes = jnp.arange(x.shape[axis], dtype=target.dtype)
    return jnp.expand_dims(target, axis) == classes.reshape((-1,) + (1,) * (x.ndim - axis - 1))


def class_weights(x: jax.Array, target: jax.Array, weight: jax.Array | None, ignore_index: int) -> jax.Array:
    """Return the weight of each target: the weight of its class, or 0 if the target is ignored."""
    inner = opmath(x.dtype)
    each = jnp.ones(target.shape, inner) if weight is None else _weight_of(target, weight.astype(inner))
    return jnp.where(target == ignore_index, 0, each)


def _class_axis(x: jax.Array) -> int:
    return 0 if x.ndim == 1 else 1


@register_lowering("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss_forward(
    x: jax.Array, target: jax.Array, weight: jax.Array | None, reduction: int, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    each = class_weights(x, target, weight, ignore_index)
    loss = jnp.where(target == ignore_index, 0, -_target_scores(x, target, _class_axis(x)).astype(each.dtype) * each)
    if reduction == NONE and x.ndim > 1:
        return loss.astype(x.dtype), jnp.zeros((), x.dtype)
    total = jnp.sum(each)
    loss = jnp.sum(loss)
    if reduction == MEAN:
        loss = loss / total
    return loss.astype(x.dtype), total.astype(x.dtype)


@register_lowering("nll_loss_backward", "nll_loss2d_backward")
def _nll_loss_backward(
    grad: jax.Array,
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None,
    reduction: int,
    ignore_index: int,
    total_weight: jax.Array,
) -> jax.Array:
    axis = _class_axis(x)
    each = class_weights(x, target, weight, ignore_index)
    slope = -each * grad.astype(each.dtype)
    if reduction == MEAN:
        slope = slope / total_weight.astype(each.dtype)
    counts = _is_target(x, target, axis) & jnp.expand_dims(target != ignore_index, axis)
    return jnp.where(counts, jnp.expand_dims(slope, axis), 0).astype(x.dtype)


def _in_rows(*arrays: jax.Array) -> list[jax.Array]:
    """Return arrays as (sample, class). The arrays of a single sample have no batch axis, and get one."""
    rows = max(arrays[0].ndim, 1) - 1
    return [x if rows else x.reshape(1, -1) for x in arrays]


def _margins(x: jax.Array, target: jax.Array, margin: float) -> jax.Array:
    """Return `margin` plus the score of each class minus the score of the target class; 0 for the target class."""
    z = margin - _target_scores(x, target, 1)[:, None] + x
    return jnp.where(_is_target(x, target, 1), 0, z)


@register_lowering("multi_margin_loss")
def _multi_margin_loss(
    x: jax.Array,
    target: jax.Array,
    p: float = 1,
    margin: float = 1,
    weight: jax.Array | None = None,
    reduction: int = MEAN,
) -> jax.Array:
    (rows,) = _in_rows(x)
    rows = rows.astype(opmath(x.dtype))
    shape, target = target.shape, target.reshape(-1)
    z = _margins(rows, target, margin)
    z = jnp.where(z > 0, z if p == 1 else z * z, 0)  # NaN counts as no violation
    if weight is not None:
        z = z * _weight_of(target, weight.astype(z.dtype))[:, None]
    loss = jnp.sum(z, axis=1) / rows.shape[1]
    loss = jnp.where(_is_class(target, rows.shape[1]), loss, jnp.nan)
    return reduced_loss(loss.reshape(shape), reduction).astype(x.dtype)


@register_lowering("multi_margin_loss_backward")
def _multi_margin_loss_backward(
    grad: jax.Array,
    x: jax.Array,
    target: jax.Array,
    p: float,
    margin: float,
    weight: jax.Array | None = None,
    reduction: int = MEAN,
) -> jax.Array:
    (rows,) = _in_rows(x)
    rows = rows.astype(opmath(x.dtype))
    target = target.reshape(-1)
    z = _margins(rows, target, margin)
    slope = jnp.where(z > 0, 1 if p == 1 else 2 * z, 0) / (rows.shape[1] * _mean_divisor(rows, reduction))
    if weight is not None:
        slope = slope * _weight_of(target, weight.astype(z.dtype))[:, None]
    slope = jnp.where(_is_target(rows, target, 1), -jnp.sum(slope, axis=1, keepdims=True), slope)
    return (slope * grad.reshape(-1, 1).astype(slope.dtype)).reshape(x.shape).astype(x.dtype)


def _mean_divisor(rows: jax.Array, reduction: int) -> int:
    return max(rows.shape[0], 1) if reduction == MEAN else 1


def _is_listed(target: jax.Array) -> jax.Array:
    """Return a mask of the entries of the label lists that count: the entries before the first negative one."""
    return jnp.cumprod(target >= 0, axis=1, dtype=jnp.int32) == 1


def _violations(rows: jax.Array, target: jax.Array, is_target: jax.Array) -> jax.Array:
    """Return how far each non-target class violates the margin of 1 to each listed label: (sample, label, class)."""
    chosen = jnp.take_along_axis(rows, jnp.clip(target, 0, rows.shape[1] - 1), 1)
    z = 1 - chosen[:, :, None] + rows[:, None, :]
    return jnp.where(_is_listed(target)[:, :, None] & ~is_target[:, None, :] & (z > 0), z, 0)


def _marked(rows: jax.Array, target: jax.Array, marks: jax.Array) -> jax.Array:
    """Return the marks of the listed labels, added up by class."""
    index = jnp.where(_is_listed(target), target, rows.shape[1])  # an index past the end is dropped
    return jax.vmap(lambda i, mark: jnp.zeros(rows.shape[1:], rows.dtype).at[i].add(mark, mode="drop"))(index, marks)


@register_lowering("multilabel_margin_loss_forward")
def _multilabel_margin_loss_forward(x: jax.Array, target: jax.Array, reduction: int) -> tuple[jax.Array, jax.Array]:
    rows, labels = _in_rows(x, target)
    rows = rows.astype(opmath(x.dtype))
    is_target = _marked(rows, labels, jnp.ones(labels.shape, rows.dtype)) > 0
    loss = jnp.sum(_violations(rows, labels, is_target), axis=(1, 2)) / max(rows.shape[1], 1)
    is_label = (labels >= -1) & (labels < rows.shape[1])
    loss = jnp.where(jnp.all(is_label, axis=1), loss, jnp.nan)
    shape = x.shape[:-1]
    return reduced_loss(loss.reshape(shape), reduction).astype(x.dtype), is_target.reshape(target.shape).astype(x.dtype)


@register_lowering("multilabel_margin_loss_backward")
def _multilabel_margin_loss_backward(
    grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int, is_target: jax.Array
) -> jax.Array:
    rows, labels, setting_inside = _in_rows(x, target, is_target)
    rows = rows.astype(opmath(x.dtype))
    active = (_violations(rows, labels, setting_inside != 0) > 0).astype(rows.dtype)
    slope = jnp.sum(active, axis=1) - _marked(rows, labels, jnp.sum(active, axis=2))
    slope = slope / (rows.shape[1] * _mean_divisor(rows, reduction))
    return (slope * grad.reshape(-1, 1).astype(slope.dtype)).reshape(x.shape).astype(x.dtype)
