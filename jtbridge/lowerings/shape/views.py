"""Views and copies: the same elements in another shape, order or number of repetitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from torch import fx

from jtbridge.lowerings._common import axes_of, axis_of, convert, out_dtype, out_shape
from jtbridge.lowerings._registry import register_lowering


@register_lowering("view", "reshape", "_unsafe_view", "view_copy", "_reshape_copy", node=True)
def _view(x: jax.Array, size: Sequence[int], *, node: fx.Node) -> jax.Array:
    del size  # may contain -1
    return jnp.reshape(x, out_shape(node))


@register_lowering("_reshape_alias", "_reshape_alias_copy")
def _reshape_alias(x: jax.Array, size: Sequence[int], stride: Sequence[int]) -> jax.Array:
    del stride
    return jnp.reshape(x, tuple(size))


@register_lowering("alias", "alias_copy", "clone", "detach", "detach_copy", "lift", "lift_fresh", "lift_fresh_copy")
def _identity(x: jax.Array, *, memory_format: Any = None) -> jax.Array:
    del memory_format
    return x


@register_lowering("copy")
def _copy(x: jax.Array, src: jax.Array, non_blocking: bool = False) -> jax.Array:
    del non_blocking
    return jnp.broadcast_to(convert(src, np.dtype(x.dtype)), x.shape)


@register_lowering("t", "t_copy")
def _t(x: jax.Array) -> jax.Array:
    return jnp.transpose(x)


@register_lowering("transpose.int", "transpose_copy.int")
def _transpose_dims(x: jax.Array, dim0: int, dim1: int) -> jax.Array:
    return jnp.swapaxes(x, axis_of(dim0, x.ndim), axis_of(dim1, x.ndim)) if x.ndim else x


@register_lowering("permute", "permute_copy")
def _permute(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    return jnp.transpose(x, [axis_of(d, x.ndim) for d in dims])


@register_lowering("expand", "expand_copy")
def _expand(x: jax.Array, size: Sequence[int], *, implicit: bool = False) -> jax.Array:
    del implicit
    missing = len(size) - x.ndim
    shape = tuple(x.shape[i - missing] if length == -1 else length for i, length in enumerate(size))
    return jnp.broadcast_to(x, shape)


@register_lowering("squeeze", "squeeze_copy")
def _squeeze(x: jax.Array) -> jax.Array:
    return lax.squeeze(x, [i for i, n in enumerate(x.shape) if n == 1])


@register_lowering("squeeze.dim", "squeeze.dims", "squeeze_copy.dim", "squeeze_copy.dims")
def _squeeze_dims(x: jax.Array, dim: int | Sequence[int]) -> jax.Array:
    dims = (dim,) if isinstance(dim, int) else dim  # an empty list means no dimension, not all
    axes = {axis_of(d, x.ndim) for d in dims}
    return lax.squeeze(x, [i for i, n in enumerate(x.shape) if n == 1 and i in axes])


@register_lowering("unsqueeze", "unsqueeze_copy")
def _unsqueeze(x: jax.Array, dim: int) -> jax.Array:
    return lax.expand_dims(x, (axis_of(dim, x.ndim + 1),))


@register_lowering("split.Tensor", "split_copy.Tensor", "unsafe_split.Tensor")
def _split(x: jax.Array, split_size: int, dim: int = 0) -> tuple[jax.Array, ...]:
    axis = axis_of(dim, x.ndim)
    length = x.shape[axis]
    if split_size == 0:
        return (x,)
    starts = range(0, max(length, 1), split_size)
    return tuple(lax.slice_in_dim(x, s, min(s + split_size, length), axis=axis) for s in starts)


@register_lowering("split_with_sizes", "split_with_sizes_copy", "unsafe_split_with_sizes")
def _split_with_sizes(x: jax.Array, split_sizes: Sequence[int], dim: int = 0) -> tuple[jax.Array, ...]:
    return tuple(lax.split(x, list(split_sizes), axis=axis_of(dim, x.ndim)))


@register_lowering("unbind.int", "unbind_copy.int")
def _unbind(x: jax.Array, dim: int = 0) -> tuple[jax.Array, ...]:
    axis = axis_of(dim, x.ndim)
    return tuple(lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis]))


@register_lowering("cat", node=True)
def _cat(tensors: Sequence[jax.Array], dim: int = 0, *, node: fx.Node) -> jax.Array:
    dtype = out_dtype(node)
    if len(out_shape(node)) != 1:  # torch ignores empty 1-d tensors among tensors of other shapes
        tensors = [x for x in tensors if x.shape != (0,)]
    return lax.concatenate([convert(x, dtype) for x in tensors], axis_of(dim, len(out_shape(node))))


@register_lowering("stack", "_stack", node=True)
def _stack(tensors: Sequence[jax.Array], dim: int = 0, *, node: fx.Node) -> jax.Array:
    dtype = out_dtype(node)
    axis = axis_of(dim, len(out_shape(node)))
    return lax.concatenate([lax.expand_dims(convert(x, dtype), (axis,)) for x in tensors], axis)


@register_lowering("_chunk_cat", node=True)
def _chunk_cat(tensors: Sequence[jax.Array], dim: int, num_chunks: int, *, node: fx.Node) -> jax.Array:
    """Split each tensor into `num_chunks` chunks along `dim`, and join the flattened chunks of the same index.

    Zeros fill the last chunks.
    """
    axis = axis_of(dim, tensors[0].ndim)
    rows = []
    for x in tensors:
        missing = -x.shape[axis] % num_chunks
        filled = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])
        length = filled.shape[axis] // num_chunks * math.prod(x.shape[axis + 1 :])
        rows.append(filled.reshape(*x.shape[:axis], num_chunks, length))
    return lax.concatenate(rows, axis + 1).astype(out_dtype(node))


@register_lowering("block_diag", node=True)
def _block_diag(tensors: Sequence[jax.Array], *, node: fx.Node) -> jax.Array:
    dtype = out_dtype(node)
    blocks = [jnp.atleast_2d(convert(x, dtype)) for x in tensors]
    width, before, rows = out_shape(node)[1], 0, []
    for block in blocks:
        rows.append(jnp.pad(block, ((0, 0), (before, width - before - block.shape[1]))))
        before += block.shape[1]
    return lax.concatenate(rows, 0)


@register_lowering("repeat")
def _tile(x: jax.Array, repeats: Sequence[int]) -> jax.Array:
    return jnp.tile(x, tuple(repeats))


@register_lowering("roll")
def _roll(x: jax.Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> jax.Array:
    if x.size == 0:
        return x
    if len(dims) == 0:
        return jnp.roll(x.reshape(-1), shifts[0]).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):  # a dimension may occur twice
        x = jnp.roll(x, shift, axis_of(dim, x.ndim)) if x.ndim else x
    return x


@register_lowering("flip")
def _flip(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    return lax.rev(x, axes_of(dims, x.ndim)) if dims else x


@register_lowering("rot90")
def _rot90(x: jax.Array, k: int = 1, dims: Sequence[int] = (0, 1)) -> jax.Array:
    first, second = axes_of(dims, x.ndim)
    return jnp.rot90(x, k, (first, second))


@register_lowering("pixel_shuffle", node=True)
def _pixel_shuffle(x: jax.Array, upscale_factor: int, *, node: fx.Node) -> jax.Array:
    *batch, c, h, w = x.shape
    r, n = upscale_factor, len(batch)
    split = x.reshape(*batch, c // r**2, r, r, h, w)
    return split.transpose(*range(n), n, n + 3, n + 1, n + 4, n + 2).reshape(out_shape(node))


@register_lowering("pixel_unshuffle", node=True)
def _pixel_unshuffle(x: jax.Array, downscale_factor: int, *, node: fx.Node) -> jax.Array:
    *batch, c, h, w = x.shape
    r, n = downscale_factor, len(batch)
    split = x.reshape(*batch, c, h // r, r, w // r, r)
    return split.transpose(*range(n), n, n + 2, n + 4, n + 1, n + 3).reshape(out_shape(node))


@register_lowering("channel_shuffle", "native_channel_shuffle")
def _channel_shuffle(x: jax.Array, groups: int) -> jax.Array:
    batch, channels, *rest = x.shape
    split = x.reshape(batch, groups, channels // groups, *rest)
    return jnp.swapaxes(split, 1, 2).reshape(x.shape)


@register_lowering("sym_size.int")
def _sym_size(x: jax.Array, dim: int) -> int:
    return x.shape[dim]


@register_lowering("sym_numel")
def _sym_numel(x: jax.Array) -> int:
    return math.prod(x.shape)
