"""Normalization over the last dimension, in jnp.

Arrays begin with an axis of groups `g`: x [g, rows, n]; weight and bias [g, n], or [1, n] for all groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from jtbridge.kernels._shapes import accumulated, to_precision


@dataclasses.dataclass(frozen=True)
class Norm:
    """Which normalization: with or without a mean, and what it is given beside x."""

    centered: bool
    eps: float
    offset: float
    residual: bool
    weight: bool
    bias: bool
    rounded: bool = False  # to the dtype of x before the weight; the gradient is the same

    @property
    def statistics(self) -> int:
        """How many numbers of each row are kept for the backward: 1 / sigma, and the mean."""
        return 1 + self.centered


def forward(*arrays: jax.Array, norm: Norm) -> tuple[jax.Array, ...]:
    """From ``x[, residual][, weight][, bias]``: the result, ``x + residual`` if there is one, [g, rows, statistics]."""
    given = iter(arrays)
    x = next(given)
    if norm.residual:
        x = x + next(given)
    wide = x.astype(accumulated(x))
    mean = wide.mean(-1, keepdims=True) if norm.centered else jnp.zeros_like(wide[..., :1])
    rstd = jax.lax.rsqrt(jnp.square(wide - mean).mean(-1, keepdims=True) + norm.eps)
    y = (wide - mean) * rstd
    if norm.rounded:
        y = to_precision(y, x.dtype)
    if norm.weight:
        y = y * (next(given).astype(y.dtype) + norm.offset)[:, None]
    if norm.bias:
        y = y + next(given).astype(y.dtype)[:, None]
    statistics = jnp.concatenate([rstd, mean], -1)[..., : norm.statistics]
    return (y.astype(x.dtype), *([x] if norm.residual else []), statistics)


def backward(*arrays: jax.Array, norm: Norm, dtypes: Sequence[str]) -> tuple[jax.Array, ...]:
    """From ``x[, weight], statistics, ct[, ct of x + residual]``: gradients of what `forward` is given.

    With ``hat = (x - mean) * rstd`` and ``m = ct * weight`` the gradient of x is ``rstd * (m - hat * mean(m * hat))``,
    less ``rstd * mean(m)`` where a mean was taken off. In `dtypes` are those of the weight and the bias.
    """
    given = iter(arrays)
    x = next(given)
    weight = next(given) if norm.weight else None
    statistics, ct = next(given), next(given)
    wide, wide_ct = x.astype(statistics.dtype), ct.astype(statistics.dtype)
    hat = (wide - statistics[..., 1:] if norm.centered else wide) * statistics[..., :1]
    m = wide_ct if weight is None else wide_ct * (weight.astype(wide.dtype) + norm.offset)[:, None]
    grad = m - hat * (m * hat).mean(-1, keepdims=True)
    if norm.centered:
        grad = grad - m.mean(-1, keepdims=True)
    grad = grad * statistics[..., :1]
    if norm.residual:
        grad = grad + next(given).astype(wide.dtype)
    sums = [wide_ct * hat] * norm.weight + [wide_ct] * norm.bias
    return (*_of_x(grad.astype(x.dtype), norm), *(s.sum(1).astype(d) for s, d in zip(sums, dtypes, strict=True)))


def _of_x(grad: jax.Array, norm: Norm) -> Iterator[jax.Array]:
    yield grad
    if norm.residual:
        yield grad
