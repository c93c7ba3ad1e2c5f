"""Histograms: counts of elements in bins.

If the range comes from elements that are not finite, torch raises; here the counts are NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import fx

from jtbridge.lowerings._common import out_dtype, size_of
from jtbridge.lowerings._registry import register_lowering
from jtbridge.lowerings.indexing._out_of_range import invalid_value

Ends = tuple[jax.Array, jax.Array]


@register_lowering("histc", node=True)
def _histc(x: jax.Array, bins: int = 100, min: Any = 0, max: Any = 0, *, node: fx.Node) -> jax.Array:
    dtype = out_dtype(node)
    x = x.reshape(-1).astype(dtype)
    low, high = jnp.asarray(min, dtype), jnp.asarray(max, dtype)
    if min == max:
        low, high = _widened((jnp.min(x), jnp.max(x)) if x.size else (low, high), 1.0)
    place = ((x - low) * bins / (high - low)).astype(np.int64)
    place = jnp.where((x >= low) & (x <= high), jnp.clip(place, 0, bins - 1), bins)
    counts = jnp.zeros(bins, dtype).at[place].add(jnp.ones((), dtype), mode="drop")
    return jnp.where(jnp.isfinite(low) & jnp.isfinite(high), counts, jnp.asarray(invalid_value(dtype), dtype))


def _widened(ends: Ends, by: float) -> Ends:
    low, high = ends
    same = low == high
    return jnp.where(same, low - by, low), jnp.where(same, high + by, high)


@register_lowering("histogram.bin_ct")
def _histogram(
    x: jax.Array, bins: int = 100, *, range: Any = None, weight: jax.Array | None = None, density: bool = False
) -> tuple[jax.Array, jax.Array]:
    points = x.reshape(-1, 1)
    edges = _even_edges(points, [bins], range)
    return _bin_counts(points, edges, weight, density), edges[0]


@register_lowering("histogram.bins_tensor")
def _histogram_of_bins(
    x: jax.Array, bins: jax.Array, *, weight: jax.Array | None = None, density: bool = False
) -> tuple[jax.Array, jax.Array]:
    return _bin_counts(x.reshape(-1, 1), [bins], weight, density), bins


@register_lowering("_histogramdd_bin_edges")
def _bin_edges(
    x: jax.Array, bins: Sequence[int], *, range: Any = None, weight: jax.Array | None = None, density: bool = False
) -> list[jax.Array]:
    del weight, density
    return _even_edges(x.reshape(-1, x.shape[-1]), bins, range)


@register_lowering("_histogramdd_from_bin_cts")
def _histogramdd(
    x: jax.Array, bins: Sequence[int], *, range: Any = None, weight: jax.Array | None = None, density: bool = False
) -> jax.Array:
    points = x.reshape(-1, x.shape[-1])
    return _bin_counts(points, _even_edges(points, bins, range), weight, density)


@register_lowering("_histogramdd_from_bin_tensors")
def _histogramdd_of_bins(
    x: jax.Array, bins: Sequence[jax.Array], *, weight: jax.Array | None = None, density: bool = False
) -> jax.Array:
    return _bin_counts(x.reshape(-1, x.shape[-1]), bins, weight, density)


def _even_edges(points: jax.Array, bins: Sequence[int], range: Any) -> list[jax.Array]:
    """Return each dimension's edges of equal bins, from the smallest to the largest element unless a range is given."""
    edges = []
    for dim, count in enumerate(bins):
        column = points[:, dim]
        if range is not None:
            low, high = (jnp.asarray(end, points.dtype) for end in range[2 * dim : 2 * dim + 2])
        elif size_of(points):
            low, high = jnp.min(column), jnp.max(column)
            low = jnp.where(jnp.isfinite(low) & jnp.isfinite(high), low, jnp.nan)
        else:
            low, high = jnp.zeros((), points.dtype), jnp.ones((), points.dtype)
        edges.append(_spaced_edges(*_widened((low, high), 0.5), count + 1))
    return edges


def _spaced_edges(low: jax.Array, high: jax.Array, count: int) -> jax.Array:
    """Return evenly spaced numbers as `torch.linspace` computes them, in the dtype of the ends."""
    index = jax.lax.iota(low.dtype, count)
    gap = (high - low) / (count - 1)
    return jnp.where(index < count // 2, low + gap * index, high - gap * (count - 1 - index))


def _bin_counts(points: jax.Array, edges: Sequence[jax.Array], weight: jax.Array | None, density: bool) -> jax.Array:
    """Return the number, weight or density of the points in each bin.

    The last bin includes its right edge. Points outside of all bins are not counted.
    """
    shape = [len(e) - 1 for e in edges]
    flat, inside = jnp.zeros(points.shape[0], np.int64), jnp.ones(points.shape[0], bool)
    for dim, (line, size) in enumerate(zip(edges, shape, strict=True)):
        x = points[:, dim]
        inside &= (x >= line[0]) & (x <= line[-1])
        place = jnp.searchsorted(line, x, side="right") - 1
        flat = flat * size + jnp.clip(place, 0, size - 1)
    total = int(np.prod(shape))
    amounts = jnp.ones(points.shape[0], points.dtype) if weight is None else weight.reshape(-1).astype(points.dtype)
    found = jnp.zeros(total, points.dtype).at[jnp.where(inside, flat, total)].add(amounts, mode="drop").reshape(shape)
    for line in edges:
        found = jnp.where(jnp.isnan(line[0]), jnp.nan, found)
    if not density:
        return found
    found = found / jnp.sum(found)
    for dim, line in enumerate(edges):
        found = found / jnp.expand_dims(jnp.diff(line), [i for i in range(len(edges)) if i != dim])
    return found
