"""Batch normalization of each channel, by its mean and variance over the batch or by running moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from torch import fx

from jtbridge.lowerings._common import out_dtype
from jtbridge.lowerings._registry import register_lowering

from ._moments import Maybe, affine, as_computed, centred, moments, selected_gradients


def _channel_values(x: Any, ndim: int) -> Any:
    """Return one value per channel, shaped to broadcast with (sample, channel, positions...). `None` stays `None`."""
    return None if x is None else x.reshape(1, -1, *(1,) * (ndim - 2))


def _batch_axes(x: jax.Array) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


class _Normalized:
    """A batch that is normalized by its own moments or by running moments, with the moments that were used."""

    def __init__(
        self, x: jax.Array, weight: Maybe, bias: Maybe, running: tuple[Maybe, Maybe], training: bool, eps: float
    ):
        wide, w, b, *stored = as_computed(x, weight, bias, *running)
        if training:
            self.mean, self.variance = moments(wide, _batch_axes(x))
        else:
            self.mean, self.variance = (_channel_values(s, x.ndim) for s in stored)
        self._training = training
        self.rstd = lax.rsqrt(self.variance + eps)
        scaled = (wide - self.mean) * self.rstd
        self.output = affine(scaled, _channel_values(w, x.ndim), _channel_values(b, x.ndim)).astype(x.dtype)
        self._count = x.size // max(x.shape[1], 1)

    def saved(self, node: fx.Node) -> tuple[jax.Array, jax.Array]:
        """Return the mean and the reciprocal standard deviation that the backward takes.

        They are empty arrays if the batch was normalized by running moments.
        """
        if not self._training:
            return jnp.zeros((0,), out_dtype(node, 1)), jnp.zeros((0,), out_dtype(node, 2))
        return self.mean.reshape(-1).astype(out_dtype(node, 1)), self.rstd.reshape(-1).astype(out_dtype(node, 2))

    def updated(
        self, mean: jax.Array, variance: jax.Array, momentum: float, dtypes: Sequence[np.dtype]
    ) -> tuple[jax.Array, jax.Array]:
        """Return the running moments after this batch. Training mixes in the batch's mean and unbiased variance."""
        if not self._training:
            return mean.astype(dtypes[0]), variance.astype(dtypes[1])
        unbiased = self.variance * (self._count / (self._count - 1) if self._count != 1 else float("nan"))
        mixed = _running_average(mean, self.mean, momentum), _running_average(variance, unbiased, momentum)
        return mixed[0].astype(dtypes[0]), mixed[1].astype(dtypes[1])


def _running_average(running: jax.Array, new: jax.Array, momentum: float) -> jax.Array:
    (wide,) = as_computed(running)
    return momentum * new.reshape(-1) + (1 - momentum) * wide


@register_lowering("native_batch_norm", node=True)
def _native_batch_norm(
    x: jax.Array,
    weight: Maybe,
    bias: Maybe,
    running_mean: Maybe,
    running_var: Maybe,
    training: bool,
    momentum: float,
    eps: float,
    *,
    node: fx.Node,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    del momentum
    found = _Normalized(x, weight, bias, (running_mean, running_var), training, eps)
    return found.output, *found.saved(node)


@register_lowering("_native_batch_norm_legit.no_stats", node=True)
def _batch_norm_without_stats(
    x: jax.Array, weight: Maybe, bias: Maybe, training: bool, momentum: float, eps: float, *, node: fx.Node
) -> tuple[jax.Array, jax.Array, jax.Array]:
    del training, momentum  # without running moments, the moments of the batch are used
    found = _Normalized(x, weight, bias, (None, None), True, eps)
    return found.output, *found.saved(node)


@register_lowering("_native_batch_norm_legit_no_training", node=True)
def _batch_norm_of_running(
    x: jax.Array,
    weight: Maybe,
    bias: Maybe,
    running_mean: jax.Array,
    running_var: jax.Array,
    momentum: float,
    eps: float,
    *,
    node: fx.Node,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    del momentum
    found = _Normalized(x, weight, bias, (running_mean, running_var), False, eps)
    return found.output, *found.saved(node)


@register_lowering("_native_batch_norm_legit_functional", node=True)
def _batch_norm_functional(
    x: jax.Array,
    weight: Maybe,
    bias: Maybe,
    running_mean: jax.Array,
    running_var: jax.Array,
    training: bool,
    momentum: float,
    eps: float,
    *,
    node: fx.Node,
) -> tuple[jax.Array, ...]:
    found = _Normalized(x, weight, bias, (running_mean, running_var), training, eps)
    dtypes = [out_dtype(node, i) for i in (3, 4)]
    return found.output, *found.saved(node), *found.updated(running_mean, running_var, momentum, dtypes)


@register_lowering("_batch_norm_with_update_functional", node=True)
def _batch_norm_with_update(
    x: jax.Array,
    weight: Maybe,
    bias: Maybe,
    running_mean: jax.Array,
    running_var: jax.Array,
    momentum: float,
    eps: float,
    *,
    node: fx.Node,
) -> tuple[jax.Array, ...]:
    found = _Normalized(x, weight, bias, (running_mean, running_var), True, eps)
    reserve = jnp.zeros((0,), out_dtype(node, 3))
    dtypes = [out_dtype(node, i) for i in (4, 5)]
    return found.output, *found.saved(node), reserve, *found.updated(running_mean, running_var, momentum, dtypes)


@register_lowering("_batch_norm_no_update", node=True)
def _batch_norm_no_update(
    x: jax.Array,
    weight: Maybe,
    bias: Maybe,
    running_mean: Maybe,
    running_var: Maybe,
    momentum: float,
    eps: float,
    *,
    node: fx.Node,
) -> tuple[jax.Array, ...]:
    del momentum
    training = running_mean is None or running_var is None
    found = _Normalized(x, weight, bias, (running_mean, running_var), training, eps)
    return found.output, *found.saved(node), jnp.zeros((0,), out_dtype(node, 3))


@register_lowering("native_batch_norm_backward")
def _batch_norm_backward(
    grad_out: jax.Array,
    x: jax.Array,
    weight: Maybe,
    running_mean: Maybe,
    running_var: Maybe,
    save_mean: Maybe,
    save_invstd: Maybe,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Maybe, ...]:
    axes = _batch_axes(x)
    grad, wide, w = as_computed(grad_out, x, weight)
    if train:
        mean, rstd = as_computed(save_mean, save_invstd)
    else:
        mean, variance = as_computed(running_mean, running_var)
        rstd = lax.rsqrt(variance + eps)
    mean, rstd, w = (_channel_values(s, x.ndim) for s in (mean, rstd, w))
    unit = (wide - mean) * rstd
    scaled = grad if w is None else grad * w
    by_x = (centred(scaled, unit, axes) if train else scaled) * rstd
    parameter = x if weight is None else weight
    found = by_x, jnp.sum(grad * unit, axes), jnp.sum(grad, axes)
    return selected_gradients(found, (x, parameter, parameter), output_mask)


@register_lowering("batch_norm_backward")
def _batch_norm_backward_with_reserve(
    grad_out: jax.Array,
    x: jax.Array,
    weight: Maybe,
    running_mean: Maybe,
    running_var: Maybe,
    save_mean: Maybe,
    save_var: Maybe,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: jax.Array,
) -> tuple[Maybe, ...]:
    del reserve
    running, saved = (running_mean, running_var), (save_mean, save_var)
    return _batch_norm_backward(grad_out, x, weight, *running, *saved, update, eps, output_mask)
