"""Products of groups of rows with one matrix for each group. The group sizes are data, as in a mixture of experts.

``offs[i]`` is the end of group ``i`` along the ragged dimension. Elements after ``offs[-1]`` belong to no group; the
results that torch leaves undefined there are zeros.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from torch import fx

from jtbridge.core.transposed import is_transposed
from jtbridge.lowerings._common import opmath, out_dtype
from jtbridge.lowerings._registry import register_lowering
from jtbridge.lowerings.linalg._thin import is_thin, times_transposed


@register_lowering("_grouped_mm", "jtbridge::grouped_mm", node=True)
def _grouped_mm(
    a: jax.Array,
    b: jax.Array,
    offs: jax.Array | None = None,
    bias: jax.Array | None = None,
    out: Any = None,
    *,
    node: fx.Node,
) -> jax.Array:
    del out  # the dtype of the result, which the node also holds
    if a.ndim == 3 and b.ndim == 3:
        product = jnp.matmul(a, b, preferred_element_type=opmath(a.dtype))
    else:
        assert offs is not None
        ends = offs.astype(jnp.int32)
        if b.ndim == 3:
            transposed = is_transposed(node.args[1])
            product = _rows_times_matrices(a, b.transpose(0, 2, 1) if transposed else b, ends, transposed=transposed)
        elif a.ndim == 3:
            product = _rows_times_matrices(b.T, a.transpose(0, 2, 1), ends).T
        else:
            product = _contraction(a.T, b, ends)
    product = product if bias is None else product + bias.astype(product.dtype)
    return product.astype(out_dtype(node))


# The functions of this section are batched by a loop, because the batching rule of `lax.ragged_dot` covers few cases.
def _rows_times_matrices(x: jax.Array, matrices: jax.Array, ends: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Return each row of ``x[row, k]`` times the matrix of its group in ``matrices[group, k, n]``.

    If `transposed`, the matrices are given as ``matrices[group, n, k]``. If they were transposed before a loop, XLA
    would copy all of them first.
    """
    by_platform = {"cpu": rows_by_blocks, "default": rows_by_ragged_dot}
    by_platform = {platform: functools.partial(rows, transposed=transposed) for platform, rows in by_platform.items()}

    @jax.custom_batching.sequential_vmap
    def run(x: jax.Array, matrices: jax.Array, ends: jax.Array) -> jax.Array:
        product = lax.platform_dependent(x, matrices, jnp.diff(ends, prepend=0), **by_platform)
        return jnp.where((jnp.arange(x.shape[0]) < ends[-1])[:, None], product, 0)

    return run(x, matrices, ends)


@jax.custom_batching.sequential_vmap
def _contraction(x: jax.Array, y: jax.Array, ends: jax.Array) -> jax.Array:
    """Return ``x[rows].T @ y[rows]`` for the rows of each group, from ``x[row, m]`` and ``y[row, n]``."""
    sizes = jnp.diff(ends, prepend=0)
    return lax.platform_dependent(x, y, sizes, cpu=contraction_by_blocks, default=contraction_by_ragged_dot)


def rows_by_ragged_dot(x: jax.Array, matrices: jax.Array, sizes: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Compute `_rows_times_matrices` by one operation of XLA."""
    matrices = matrices.transpose(0, 2, 1) if transposed else matrices
    return lax.ragged_dot(x, matrices, sizes, preferred_element_type=opmath(x.dtype))


def contraction_by_ragged_dot(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    """Compute `_contraction` by one operation of XLA."""
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return lax.ragged_dot_general(x, y, sizes, dimensions, preferred_element_type=opmath(x.dtype))


# XLA computes `ragged_dot` on a CPU by products of all rows with all matrices. A loop over blocks of rows, each of one
# group, takes a tenth of the time for 8 groups, and a fortieth for 64. The last block of a group also reads rows of the
# next group: `rows_by_blocks` overwrites their results later, and `contraction_by_blocks` replaces them by zeros.


def rows_by_blocks(x: jax.Array, matrices: jax.Array, sizes: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Compute `_rows_times_matrices` by a loop."""
    rows, groups, columns = x.shape[0], len(matrices), matrices.shape[1 if transposed else 2]
    axes = ((1,), (1 if transposed else 0,))
    block = _rows_per_block(rows, groups)
    x = jnp.pad(x, ((0, block), (0, 0)))

    def of_block(group: jax.Array, start: jax.Array, end: jax.Array, out: jax.Array) -> jax.Array:
        del end
        part, matrix = lax.dynamic_slice_in_dim(x, start, block), lax.dynamic_index_in_dim(matrices, group, 0, False)
        if transposed and is_thin(part, matrix):
            product = times_transposed(part, matrix)
        else:
            product = lax.dot_general(part, matrix, (axes, ((), ())), preferred_element_type=out.dtype)
        return lax.dynamic_update_slice_in_dim(out, product, start, 0)

    out = jnp.zeros((rows + block, columns), opmath(x.dtype))
    return _over_blocks(of_block, sizes, block, out)[:rows]


def contraction_by_blocks(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    """Compute `_contraction` by a loop."""
    rows, groups = x.shape[0], sizes.shape[0]
    block = _rows_per_block(rows, groups)
    x, y = (jnp.pad(z, ((0, block), (0, 0))) for z in (x, y))

    def of_block(group: jax.Array, start: jax.Array, end: jax.Array, out: jax.Array) -> jax.Array:
        inside = (start + jnp.arange(block) < end)[:, None]
        ours, theirs = (jnp.where(inside, lax.dynamic_slice_in_dim(z, start, block), 0) for z in (x, y))
        product = jnp.matmul(ours.T, theirs, preferred_element_type=out.dtype)
        return out.at[group].add(product)

    return _over_blocks(of_block, sizes, block, jnp.zeros((groups, x.shape[1], y.shape[1]), opmath(x.dtype)))


def _rows_per_block(rows: int, groups: int) -> int:
    """Return the number of rows of a block: the average size of a group, rounded up to a power of two from 8 to 128."""
    return min(max(1 << max(rows // max(groups, 1) - 1, 0).bit_length(), 8), 128)


def _over_blocks(of_block: Any, sizes: jax.Array, block: int, out: jax.Array) -> jax.Array:
    """Return `out` after ``out = of_block(group, start, end, out)`` for each block of each group, in order."""
    ends = jnp.cumsum(sizes)

    def of_group(group: jax.Array, out: jax.Array) -> jax.Array:
        end = ends[group]

        def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            start, out = carry
            return start + block, of_block(group, start, end, out)

        return lax.while_loop(lambda carry: carry[0] < end, step, (end - sizes[group], out))[1]

    return lax.fori_loop(0, sizes.shape[0], of_group, out)
