"""Arrays that are given by strides into a tensor's memory.

A JAX array has no memory to stride through, but torch's tracing records the memory layout of the tensor that the array
stands for. The layout gives the coordinates of the element at each memory offset. If the tensor is a view of a part of
a larger tensor, the array lacks the elements at offsets that the view does not cover. Reads at such offsets are
refused, writes are dropped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import fx

from jtbridge.errors import TranslationError
from jtbridge.lowerings._common import convert, input_value
from jtbridge.lowerings._registry import register_lowering


@dataclasses.dataclass(frozen=True)
class _StridedLayout:
    """The memory layout of a tensor. `_layout` sets the length of a dimension of one element, or of stride 0, to 1."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def order(self) -> list[int]:
        """Return the dimensions in the order of their strides, largest first."""
        return sorted(range(len(self.shape)), key=lambda i: (-self.strides[i], i))

    @property
    def last(self) -> int:
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def dense(self) -> bool:
        """Return whether the elements fill a contiguous range of memory, each offset once."""
        return self.nested and self.last - self.offset + 1 == math.prod(self.shape)

    @property
    def nested(self) -> bool:
        """Return whether the stride of each dimension exceeds the reach of all dimensions with smaller strides."""
        reach = 0
        for i in reversed(self.order):
            if self.shape[i] > 1:
                if self.strides[i] <= reach:
                    return False
                reach += (self.shape[i] - 1) * self.strides[i]
        return True


def _layout(shape: Sequence[int], strides: Sequence[int], offset: int) -> _StridedLayout:
    lengths = tuple(1 if s == 0 else n for n, s in zip(shape, strides, strict=True))
    return _StridedLayout(offset, lengths, tuple(0 if n == 1 else s for n, s in zip(lengths, strides, strict=True)))


def _memory_of(x: torch.Tensor) -> _StridedLayout:
    return _layout(x.shape, x.stride(), int(x.storage_offset()))


def _without_repeats(x: jax.Array, layout: _StridedLayout) -> jax.Array:
    """Return the array without the repetitions of an expanded tensor: each repeated element once."""
    return x if x.shape == layout.shape else lax.slice(x, (0,) * x.ndim, layout.shape)


def _element_offsets(wanted: _StridedLayout, shape: Sequence[int]) -> jax.Array:
    """Return the memory offset of each element of an array with the strides of `wanted`."""
    total = jnp.full(tuple(shape), wanted.offset, np.int32 if wanted.last < 2**31 else np.int64)
    for axis, stride in enumerate(wanted.strides):
        if stride:
            total = total + lax.broadcasted_iota(total.dtype, tuple(shape), axis) * stride
    return total


def _coordinates(places: Any, held: _StridedLayout, module: Any) -> tuple[list[Any], Any]:
    """Return the coordinates of the elements of `held` at memory offsets, and a mask of the offsets that hold one."""
    rest = places - held.offset
    inside = rest >= 0
    found = [module.zeros_like(rest)] * len(held.shape)
    for i in held.order:
        if held.shape[i] > 1:
            found[i] = rest // held.strides[i]
            rest = rest - found[i] * held.strides[i]
            inside = inside & (found[i] < held.shape[i])
    return found, inside & (rest == 0)


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise TranslationError(f"strides into a tensor's memory cannot be followed here: {why}")


def _require_covered(wanted: _StridedLayout, held: _StridedLayout) -> None:
    """Refuse memory offsets at which `held` has no element. If `held` is dense, the first and last offsets decide."""
    if held.dense:
        covered = held.offset <= wanted.offset and wanted.last <= held.last
    else:
        places = np.full((1,) * len(wanted.shape), wanted.offset, np.int64)
        for axis, (n, stride) in enumerate(zip(wanted.shape, wanted.strides, strict=True)):
            steps = np.arange(n, dtype=np.int64) * stride
            places = places + steps.reshape([n if i == axis else 1 for i in range(len(wanted.shape))])
        covered = bool(_coordinates(places, held, np)[1].all())
    _require(
        covered,
        "they reach elements of the tensor that this one is a view of. Call `as_strided` on that tensor instead",
    )


def _in_memory_order(x: jax.Array, held: _StridedLayout) -> jax.Array:
    """Return the elements of a dense tensor in one dimension, in the order of memory."""
    return jnp.transpose(_without_repeats(x, held), held.order).reshape(-1)


def _inverse_permutation(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _strided_elements(x: jax.Array, wanted: _StridedLayout, held: _StridedLayout, shape: tuple[int, ...]) -> jax.Array:
    if math.prod(shape) == 0:
        return jnp.zeros(shape, x.dtype)
    _require(held.nested, "the tensor's own elements overlap in memory")
    _require_covered(wanted, held)
    if not held.dense:
        found, _ = _coordinates(_element_offsets(wanted, shape), held, jnp)
        return _without_repeats(x, held).at[tuple(found)].get(mode="promise_in_bounds", wrap_negative_indices=False)
    flat = _in_memory_order(x, held)
    if wanted.dense:
        start = wanted.offset - held.offset
        part = lax.slice_in_dim(flat, start, start + math.prod(wanted.shape))
        part = part.reshape([wanted.shape[i] for i in wanted.order])
        return jnp.broadcast_to(jnp.transpose(part, _inverse_permutation(wanted.order)), shape)
    places = _element_offsets(dataclasses.replace(wanted, offset=wanted.offset - held.offset), shape)
    return flat.at[places].get(mode="promise_in_bounds", wrap_negative_indices=False)


@register_lowering("as_strided", "as_strided_copy", node=True)
def _as_strided(
    x: jax.Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None, *, node: fx.Node
) -> jax.Array:
    held = _memory_of(input_value(node, 0))
    offset = held.offset if storage_offset is None else storage_offset
    return _strided_elements(x, _layout(size, stride, offset), held, tuple(size))


@register_lowering("as_strided_scatter", node=True)
def _as_strided_scatter(
    x: jax.Array,
    src: jax.Array,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
    *,
    node: fx.Node,
) -> jax.Array:
    held = _memory_of(input_value(node, 0))
    offset = held.offset if storage_offset is None else storage_offset
    if math.prod(size) == 0 or x.size == 0:
        return x
    _require(held.nested and x.shape == held.shape, "the tensor's own elements overlap in memory")
    # The full sizes, without `_layout`: an element that is written several times keeps the last of the values.
    places = _element_offsets(_StridedLayout(offset, tuple(size), tuple(stride)), size)
    src = jnp.broadcast_to(convert(src, np.dtype(x.dtype)), tuple(size))
    if not held.dense:
        found, inside = _coordinates(places, held, jnp)
        outside = [jnp.where(inside, c, n) for c, n in zip(found, held.shape, strict=True)]
        return x.at[tuple(outside)].set(src, mode="drop", wrap_negative_indices=False)
    flat = _in_memory_order(x, held)
    flat = flat.at[places - held.offset].set(src, mode="drop", wrap_negative_indices=False)
    return jnp.transpose(flat.reshape([held.shape[i] for i in held.order]), _inverse_permutation(held.order))


@register_lowering("resize", node=True)
def _resize(x: jax.Array, size: Sequence[int], *, memory_format: Any = None, node: fx.Node) -> jax.Array:
    """Return the elements in another shape, in the memory order of a clone of the tensor.

    New elements, which torch leaves undefined, are 0.
    """
    del memory_format
    value = input_value(node, 0)
    shape = tuple(size)
    if shape == x.shape:
        return x
    clone = _memory_of(torch.empty_strided(tuple(value.shape), value.stride(), device="meta").clone())
    flat = _in_memory_order(x, clone) if x.size else jnp.zeros(0, x.dtype)
    length = math.prod(shape)
    flat = flat[:length] if length <= flat.size else jnp.pad(flat, (0, length - flat.size))
    return flat.reshape(shape)
