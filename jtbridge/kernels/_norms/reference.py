"""Normalization over the last dimension, in jnp.

Arrays begin with an axis of groups `g`: x [g, rows, n]; weight and bias [g, n], or [1, n] if all groups share them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jtbridge.kernels._shapes import accumulation_dtype, to_precision


@dataclasses.dataclass(frozen=True)
class Norm:
    """The kind of normalization: whether a mean is subtracted, its options, and which arrays it takes apart from x."""

    centered: bool
    eps: float
    offset: float
    residual: bool
    weight: bool
    bias: bool
    rounded: bool = False  # round to the dtype of x before the weight; the gradient does not depend on it

    @property
    def statistics(self) -> int:
        """The number of residuals of each row: 1 / sigma, and the mean if it is subtracted."""
        return 1 + self.centered


def forward(*arrays: jax.Array, norm: Norm) -> tuple[jax.Array, ...]:
    """Normalize, given ``x[, residual][, weight][, bias]``.

    Returns the result, then ``x + residual`` if there is a residual, then the statistics [g, rows, 1 or 2].
    """
    given = iter(arrays)
    x = next(given)
    if norm.residual:
        x = x + next(given)
    wide = x.astype(accumulation_dtype(x))
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
    """Return the gradients of the arguments of `forward`, given ``x[, weight], statistics, ct[, ct of x + residual]``.

    With ``hat = (x - mean) * rstd`` and ``m = ct * weight`` the gradient of x is ``rstd * (m - hat * mean(m * hat))``,
    less ``rstd * mean(m)`` where a mean was subtracted. `dtypes` are the dtypes of the weight and the bias.
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
    of_x = [grad.astype(x.dtype)] * (2 if norm.residual else 1)  # x and the residual have the same gradient
    return (*of_x, *(s.sum(1).astype(d) for s, d in zip(sums, dtypes, strict=True)))
