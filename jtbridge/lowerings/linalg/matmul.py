"""Matrix products.

Half precision is accumulated in float32 and rounded once. Integers wrap around.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import fx

from jtbridge.core.transposed import is_transposed
from jtbridge.errors import TranslationError
from jtbridge.lowerings._common import opmath, out_dtype
from jtbridge.lowerings._registry import register_lowering
from jtbridge.lowerings.linalg._thin import is_thin, times_transposed


def _exact(a: jax.Array, b: jax.Array, b_node: Any = None) -> jax.Array:
    """Return ``a @ b`` in the dtype of accumulation, before the product is rounded to half precision.

    XLA on a CPU has a fast product of row-major bfloat16 matrices, also for a contraction of the last axes of both. It
    does not use that one if the second matrix is transposed first, and takes twice as long.
    """
    dtype = jnp.promote_types(a.dtype, b.dtype)
    if is_transposed(b_node):
        weight = jnp.swapaxes(b, -1, -2)  # XLA removes this transpose together with that of the graph
        if dtype == jnp.bfloat16:
            return jnp.einsum("...ij,...kj->...ik", a, weight, preferred_element_type=opmath(dtype))
        if is_thin(a, weight):
            return times_transposed(a, weight)
    return jnp.matmul(a, b, preferred_element_type=opmath(dtype))


@register_lowering("mm", "dot", "mm.dtype", node=True)
def _mm(a: jax.Array, b: jax.Array, out: Any = None, *, node: fx.Node) -> jax.Array:
    del out  # the dtype of the result, which the node also holds
    return _exact(a, b, node.args[1]).astype(out_dtype(node))


@register_lowering("bmm", "bmm.dtype", node=True)
def _batched_product(a: jax.Array, b: jax.Array, out: Any = None, *, node: fx.Node) -> jax.Array:
    """Multiply matrices in pairs. A matrix that torch expanded along the batch axis is used once, without copies.

    ``torch.nn.functional.linear`` expands its weight if its input is not contiguous. XLA would copy the weight for each
    element of the batch.
    """
    del out
    (a, a_is_one), (b, b_is_one) = (_without_copies(x, node.args[i]) for i, x in enumerate((a, b)))
    product = _exact(a, b, node.args[1])
    product = jnp.broadcast_to(product, node.meta["val"].shape) if a_is_one and b_is_one else product
    return product.astype(out_dtype(node))


def _without_copies(x: jax.Array, source: Any) -> tuple[jax.Array, bool]:
    """Return the first matrix of a batch and True if all matrices are expanded from one; else the batch and False.

    A stride of 0 is not enough: a custom operator may declare any strides for its results.
    """
    value = source.meta["val"]
    if not (isinstance(value.shape[0], int) and value.shape[0] > 1 and value.stride(0) == 0):
        return x, False
    while source.target in _VIEWS:
        source = source.args[0]
    return (x[0], True) if source.target is torch.ops.aten.expand.default else (x, False)


_VIEWS = frozenset(
    {
        torch.ops.aten.view.default,
        torch.ops.aten.reshape.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.transpose.int,
        torch.ops.aten.permute.default,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.detach.default,
        torch.ops.aten.alias.default,
    }
)


@register_lowering("mv")
def _times_vector(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    # With the vector as the left operand, a batch axis of vectors stays first. This takes a fifth less time on a CPU
    # than transposes.
    return _exact(vector, matrix.T).astype(vector.dtype)


@register_lowering("vdot")
def _vdot(a: jax.Array, b: jax.Array) -> jax.Array:
    return _exact(jnp.conj(a), b).astype(a.dtype)


def _plus(bias: jax.Array, product: jax.Array, beta: Any, alpha: Any, dtype: np.dtype) -> jax.Array:
    """Return ``beta * bias + alpha * product``, rounded once. A `beta` of 0 ignores the bias, also if it holds NaN."""
    bias, product = bias.astype(product.dtype), product if alpha == 1 else product * jnp.asarray(alpha, product.dtype)
    if beta == 0:
        shape = jnp.broadcast_shapes(bias.shape, product.shape)
        return jnp.broadcast_to(product, shape).astype(dtype)
    return ((bias if beta == 1 else bias * jnp.asarray(beta, bias.dtype)) + product).astype(dtype)


@register_lowering("addmv", node=True)
def _add_times_vector(
    bias: jax.Array, matrix: jax.Array, vector: jax.Array, *, beta: Any = 1, alpha: Any = 1, node: fx.Node
) -> jax.Array:
    return _plus(bias, _exact(vector, matrix.T), beta, alpha, out_dtype(node))


@register_lowering("addmm", "baddbmm", node=True)
def _add_product(
    bias: jax.Array, a: jax.Array, b: jax.Array, *, beta: Any = 1, alpha: Any = 1, node: fx.Node
) -> jax.Array:
    return _plus(bias, _exact(a, b, node.args[2]), beta, alpha, out_dtype(node))


@register_lowering("addmm.dtype", "baddbmm.dtype", node=True)
def _add_product_as(
    bias: jax.Array, a: jax.Array, b: jax.Array, out: Any, *, beta: Any = 1, alpha: Any = 1, node: fx.Node
) -> jax.Array:
    del out
    return _plus(bias, _exact(a, b, node.args[2]), beta, alpha, out_dtype(node))


@register_lowering("_addmm_activation", node=True)
def _add_product_activated(
    bias: jax.Array,
    a: jax.Array,
    b: jax.Array,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    use_gelu: bool = False,
    node: fx.Node,
) -> jax.Array:
    dtype = out_dtype(node)
    sum_ = _plus(bias, _exact(a, b, node.args[2]), beta, alpha, opmath(dtype))
    return (jax.nn.gelu(sum_, approximate=True) if use_gelu else jax.nn.relu(sum_)).astype(dtype)


@register_lowering("addbmm", node=True)
def _add_sum_of_products(
    bias: jax.Array, a: jax.Array, b: jax.Array, *, beta: Any = 1, alpha: Any = 1, node: fx.Node
) -> jax.Array:
    total = jnp.einsum("bij,bjk->ik", a, b, preferred_element_type=opmath(a.dtype))
    return _plus(bias, total, beta, alpha, out_dtype(node))


@register_lowering("addr", node=True)
def _add_outer(
    bias: jax.Array, a: jax.Array, b: jax.Array, *, beta: Any = 1, alpha: Any = 1, node: fx.Node
) -> jax.Array:
    dtype = out_dtype(node)
    if dtype == np.dtype(bool):
        outer = a[:, None] & b & bool(alpha)
        return outer if beta == 0 else (bias & bool(beta)) | outer
    wide = opmath(dtype)
    return _plus(bias.astype(wide), a.astype(wide)[:, None] * b.astype(wide), beta, alpha, dtype)


@register_lowering("linear", "mkldnn_linear", node=True)
def _linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, *, node: fx.Node) -> jax.Array:
    if is_thin(x, weight):
        product = times_transposed(x, weight)
    else:
        product = jnp.einsum("...j,kj->...k", x, weight, preferred_element_type=opmath(x.dtype))
    return (product if bias is None else product + bias.astype(product.dtype)).astype(out_dtype(node))


@register_lowering("_trilinear", node=True)
def _trilinear(
    i1: jax.Array,
    i2: jax.Array,
    i3: jax.Array,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
    *,
    node: fx.Node,
) -> jax.Array:
    """Return the product of three arrays, summed over `sumdim`; each array lacks the dimensions in its `expand`."""
    del unroll_dim
    wholes = [jnp.expand_dims(x, tuple(e)) for x, e in zip((i1, i2, i3), (expand1, expand2, expand3), strict=True)]
    shape = jnp.broadcast_shapes(*(x.shape for x in wholes))
    operands: list[Any] = []
    for x in wholes:
        single = tuple(d for d, size in enumerate(x.shape) if size == 1)
        operands += [x.squeeze(single), [d for d in range(len(shape)) if d not in single]]
    present = {d for labels in operands[1::2] for d in labels}
    kept = [d for d in range(len(shape)) if d not in sumdim]
    dtype = out_dtype(node)
    found = jnp.einsum(*operands, [d for d in kept if d in present], preferred_element_type=opmath(dtype))
    # A kept dimension that no operand of the einsum has is of size 1.
    return found.astype(dtype).reshape([shape[d] for d in kept])


@register_lowering("_int_mm")
def _int_mm(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.int32)


@register_lowering("_scaled_mm", node=True)
def _scaled_mm(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    bias: jax.Array | None = None,
    scale_result: jax.Array | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    *,
    node: fx.Node,
) -> jax.Array:
    del out_dtype, use_fast_accum
    return _scaled_product(a, b, scale_a, scale_b, bias, scale_result, node)


_TENSORWISE, _ROWWISE = 0, 1


@register_lowering("_scaled_mm_v2", node=True)
def _scaled_mm_v2(
    a: jax.Array,
    b: jax.Array,
    scale_a: Sequence[jax.Array],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[jax.Array],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: jax.Array | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
    *,
    node: fx.Node,
) -> jax.Array:
    del out_dtype, use_fast_accum
    recipes = {*recipe_a, *recipe_b}
    if len(scale_a) != 1 or len(scale_b) != 1 or any(swizzle_a) or any(swizzle_b) or contraction_dim:
        raise TranslationError("_scaled_mm_v2 is translated with one unswizzled scale for each operand only")
    if not recipes <= {_TENSORWISE, _ROWWISE}:
        raise TranslationError("_scaled_mm_v2 is translated with scales for tensors or for rows only, not for blocks")
    return _scaled_product(a, b, scale_a[0], scale_b[0], bias, None, node)


def _scaled_product(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    bias: jax.Array | None,
    scale_result: jax.Array | None,
    node: fx.Node,
) -> jax.Array:
    dtype = out_dtype(node)
    rows, columns = _scale_shape(scale_a, (a.shape[0], 1)), _scale_shape(scale_b, (1, b.shape[1]))
    product = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32)) * rows * columns
    if bias is not None:
        product = product + bias.astype(jnp.float32)
    if scale_result is not None and dtype.itemsize == 1:
        product = product * scale_result
    if dtype.itemsize == 1 and not np.isinf(np.asarray(np.inf).astype(dtype).astype(np.float32)):
        largest = float(jnp.finfo(dtype).max)  # formats without infinity saturate
        product = jnp.clip(product, -largest, largest)
    return product.astype(dtype)


def _scale_shape(scale: jax.Array, rowwise: tuple[int, int]) -> jax.Array:
    """Reshape a scale, one number or one for each row or column, so that it broadcasts to a matrix product."""
    if scale.dtype != jnp.float32 or scale.size not in (1, max(rowwise)):
        raise TranslationError("a scaled product is translated with float32 scales for tensors or rows only")
    return scale.reshape((1, 1) if scale.size == 1 else rowwise)
