"""Grid sampling: interpolation of planes and volumes at given positions, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jtbridge.errors import TranslationError
from jtbridge.lowerings._common import opmath
from jtbridge.lowerings._registry import register_lowering

BILINEAR, NEAREST, BICUBIC = 0, 1, 2  # torch's numbers of the interpolation modes
ZEROS, BORDER, REFLECTION = 0, 1, 2  # torch's numbers of the padding modes


def _unnormalized(place: jax.Array, size: int, align_corners: bool) -> jax.Array:
    """Convert positions in [-1, 1] to fractional element indices."""
    return (place + 1) / 2 * (size - 1) if align_corners else ((place + 1) * size - 1) / 2


def _padded_positions(place: jax.Array, size: int, padding: int, align_corners: bool) -> tuple[jax.Array, jax.Array]:
    """Map positions into the array by the padding mode. Return the mapped positions and the derivative of the map.

    As in torch, the derivative is 0 on the border itself.
    """
    slope = jnp.ones_like(place)
    if padding == ZEROS:
        return place, slope
    if padding == REFLECTION:
        place, slope = _reflected_positions(
            place, 0 if align_corners else -1, 2 * (size - 1) if align_corners else 2 * size - 1
        )
    inside = (place > 0) & (place < size - 1)
    place = jnp.where(jnp.isnan(place), 0, jnp.clip(place, 0, size - 1))
    return place, jnp.where(inside, slope, 0)


def _reflected_positions(place: jax.Array, twice_low: int, twice_high: int) -> tuple[jax.Array, jax.Array]:
    if twice_low == twice_high:
        return jnp.zeros_like(place), jnp.zeros_like(place)
    low, span = twice_low / 2, (twice_high - twice_low) / 2
    sign = jnp.where(place < low, -1, 1).astype(place.dtype)
    distance = jnp.abs(place - low)
    rest = jnp.fmod(distance, span)
    even = jnp.fmod(jnp.floor(distance / span), 2) == 0
    return jnp.where(even, rest, span - rest) + low, jnp.where(even, sign, -sign)


def _elements_at(x: jax.Array, places: Sequence[jax.Array]) -> jax.Array:
    """Return the elements at integral positions of each dimension, 0 outside of `x`: (sample, channel, *positions)."""
    sizes = x.shape[2:]
    inside: Any = True
    flat: Any = 0
    number = jnp.int32 if math.prod(sizes) < 2**31 else jnp.int64
    for place, size in zip(places, sizes, strict=True):
        inside = inside & (place >= 0) & (place <= size - 1)
        flat = flat * size + jnp.clip(place, 0, size - 1).astype(number)
    flat = jnp.where(inside, flat, 0)  # the index of a NaN position is undefined
    found = jax.vmap(lambda planes, index: planes[:, index])(x.reshape(*x.shape[:2], math.prod(sizes)), flat)
    return jnp.where(inside[:, None], found, 0)


def _weighted_sum(x: jax.Array, places: Sequence[jax.Array], shares: Sequence[jax.Array]) -> jax.Array:
    """Return the weighted sum over a few positions per dimension (the last axis of each array), with one gather."""
    rank = len(places)

    def on_own_axis(a: jax.Array, i: int) -> jax.Array:
        return a.reshape(*a.shape[:-1], *(1,) * i, a.shape[-1], *(1,) * (rank - 1 - i))

    found = _elements_at(x, [on_own_axis(place, i) for i, place in enumerate(places)])
    for share in reversed(shares):
        summed_later = (1,) * (found.ndim - share.ndim - 1)
        aligned = share.reshape(share.shape[0], 1, *share.shape[1:-1], *summed_later, share.shape[-1])
        found = jnp.sum(found * aligned, axis=-1)
    return found


def _linear_samples(x: jax.Array, places: Sequence[jax.Array]) -> jax.Array:
    lows = [jnp.floor(place) for place in places]
    ends = [jnp.stack([low, low + 1], axis=-1) for low in lows]
    shares = [jnp.stack([low + 1 - p, p - low], axis=-1) for p, low in zip(places, lows, strict=True)]
    return _weighted_sum(x, ends, shares)


def _cubic_shares(t: jax.Array) -> jax.Array:
    a = -0.75

    def far(d: jax.Array) -> jax.Array:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    def near(d: jax.Array) -> jax.Array:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    return jnp.stack([far(t + 1), near(t), near(1 - t), far(2 - t)], axis=-1)


def _cubic_samples(x: jax.Array, places: Sequence[jax.Array], padding: int, align_corners: bool) -> jax.Array:
    lows = [jnp.floor(place) for place in places]
    shares = [_cubic_shares(place - low) for place, low in zip(places, lows, strict=True)]
    taps = []
    for low, size in zip(lows, x.shape[2:], strict=True):
        around = low[..., None] + jnp.arange(-1, 3).astype(low.dtype)
        taps.append(jnp.floor(_padded_positions(around, size, padding, align_corners)[0]))
    return _weighted_sum(x, taps, shares)


def _sampling_positions(x: jax.Array, grid: jax.Array, align_corners: bool) -> list[jax.Array]:
    """Return the sampling positions for each dimension of `x`. The grid lists the last dimension of `x` first."""
    sizes = x.shape[2:]
    return [_unnormalized(grid[..., -1 - i], size, align_corners) for i, size in enumerate(sizes)]


def _sampled(x: jax.Array, places: Sequence[jax.Array], mode: int, padding: int, align_corners: bool) -> jax.Array:
    """Sample `x` at positions that `_all_padded_positions` returned.

    Bicubic sampling pads the positions of its taps itself.
    """
    if mode == BILINEAR:
        return _linear_samples(x, places)
    if mode == NEAREST:
        return _elements_at(x, [jnp.round(place) for place in places])
    if mode == BICUBIC and x.ndim == 4:
        return _cubic_samples(x, places, padding, align_corners)
    raise TranslationError(f"grid sampling of {x.ndim - 2} dimensions has no interpolation {mode}")


def _all_padded_positions(
    x: jax.Array, places: Sequence[jax.Array], mode: int, padding: int, align_corners: bool
) -> tuple[list[jax.Array], list[jax.Array]]:
    if mode == BICUBIC:
        return list(places), [jnp.ones_like(place) for place in places]
    if padding == ZEROS and x.ndim == 5:
        # In volumes, torch treats a position that is not finite as outside. In planes its result there is NaN.
        places = [jnp.where(jnp.isfinite(place), place, -2.0) for place in places]
    pairs = [_padded_positions(p, size, padding, align_corners) for p, size in zip(places, x.shape[2:], strict=True)]
    return [p for p, _ in pairs], [slope for _, slope in pairs]


@register_lowering("grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback")
def _grid_sampler(
    x: jax.Array, grid: jax.Array, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> jax.Array:
    inner = opmath(x.dtype)
    wide = x.astype(inner)
    places = _sampling_positions(x, grid.astype(inner), align_corners)
    places, _ = _all_padded_positions(x, places, interpolation_mode, padding_mode, align_corners)
    return _sampled(wide, places, interpolation_mode, padding_mode, align_corners).astype(x.dtype)


@register_lowering("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def _grid_sampler_backward(
    grad: jax.Array,
    x: jax.Array,
    grid: jax.Array,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, jax.Array]:
    inner = opmath(x.dtype)
    wide, grad = x.astype(inner), grad.astype(inner)
    places = _sampling_positions(x, grid.astype(inner), align_corners)
    places, slopes = _all_padded_positions(x, places, interpolation_mode, padding_mode, align_corners)

    def sampled(planes: jax.Array, at: list[jax.Array]) -> jax.Array:
        return _sampled(planes, at, interpolation_mode, padding_mode, align_corners)

    by_input = None
    if output_mask[0]:
        by_input = jax.vjp(lambda planes: sampled(planes, places), wide)[1](grad)[0].astype(x.dtype)
    if not output_mask[1] or interpolation_mode == NEAREST:
        return by_input, jnp.zeros(grid.shape, grid.dtype)
    (by_places,) = jax.vjp(lambda at: sampled(wide, at), places)[1](grad)
    spans = [(size - 1) / 2 if align_corners else size / 2 for size in x.shape[2:]]
    by_grid = [g * slope * span for g, slope, span in zip(by_places, slopes, spans, strict=True)]
    return by_input, jnp.stack(by_grid[::-1], axis=-1).astype(grid.dtype)
