"""Forward derivatives from the rows of a Jacobian, where torch gets NaN or fails when it differentiates a gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jtbridge.core.array_types import Tensors
from jtbridge.transforms import MAX_JACOBIAN, Vjp, have_nan

from ._graph import AutogradGraph, with_axes

_MAX_PARTS = 64  # parts of a Jacobian, of up to `MAX_JACOBIAN` elements each, that are computed to replace NaN


def product_by_rows(
    graph: AutogradGraph,
    of: Vjp,
    tangents: Sequence[torch.Tensor],
    extra_axes: Sequence[int],
    products: Sequence[torch.Tensor] | None = None,
) -> Tensors | None:
    """Return ``Df(x) @ dx`` for the graph of a run of f, computed from first derivatives only.

    The result is None if the needed rows of Df(x) have too many elements.

    Args:
        graph: the kept graph.
        of: the derivative of f, with its inputs `wrt` and outputs `outs`.
        tangents: dx, one for each of the inputs ``of.wrt``.
        extra_axes: the axes of a tangent over which the graph is not batched. They are axes of the result, too.
        products: an earlier result, whose NaN elements are computed again; the other elements become 0.
    """
    outputs = [graph.outputs[o] for o in of.outs]
    sizes = [tangents[0].shape[axis] for axis in extra_axes]
    columns = sum(graph.inputs[i].numel() for i in of.wrt)
    wanted = [_rows_of_nan(y, extra_axes) for y in products] if products is not None else [None] * len(outputs)
    rows = sum(y.numel() if found is None else len(found) for y, found in zip(outputs, wanted, strict=True))
    if columns * rows > MAX_JACOBIAN * (1 if products is None else _MAX_PARTS):
        return None
    directions = [dx.movedim(tuple(extra_axes), tuple(range(len(sizes)))) for dx in tangents]
    results = []
    for position, (y, found) in enumerate(zip(outputs, wanted, strict=True)):
        at = torch.arange(y.numel(), device=y.device) if found is None else found
        if not len(at):
            results.append(y.new_zeros(with_axes(y.shape, extra_axes, sizes)))
            continue
        parts = []
        for factor in (1, 1j) if y.is_complex() else (1,):
            blocks = [
                _block_of_products(graph, of, _unit_cotangents(outputs, position, some, factor), directions)
                for some in at.split(max(1, MAX_JACOBIAN // max(1, columns)))
            ]
            parts.append(torch.cat(blocks))
        result = torch.complex(parts[0], -parts[1]) if y.is_complex() else parts[0]
        result = result.new_zeros(y.numel(), result.shape[1]).index_copy(0, at, result).reshape((*y.shape, *sizes))
        results.append(result.movedim(tuple(range(y.dim(), result.dim())), tuple(extra_axes)))
    return tuple(results)


def _unit_cotangents(
    outputs: Sequence[torch.Tensor], position: int, at: torch.Tensor, factor: complex
) -> list[torch.Tensor]:
    """Return a batch of cotangents of all outputs: `factor` at one element of one output each, and zeros elsewhere."""
    y = outputs[position]
    units = torch.zeros(len(at), y.numel(), dtype=y.dtype, device=y.device)
    units = units.scatter(1, at[:, None], factor).reshape(-1, *y.shape)
    zeros = [other.new_zeros(()).expand(len(at), *other.shape) for other in outputs]
    return [*zeros[:position], units, *zeros[position + 1 :]]


def _block_of_products(
    graph: AutogradGraph, of: Vjp, cotangents: Sequence[torch.Tensor], directions: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the products, shaped [n, m], of the gradients for n cotangents and m directions."""
    rows = graph.pull(cotangents, of, (0,), create_graph=False)
    if have_nan(rows):  # torch has other formulas for batches, which may divide zero by zero
        each = [graph.pull(unit, of, (), create_graph=False) for unit in zip(*cotangents, strict=True)]
        rows = [torch.stack(row) for row in zip(*each, strict=True)]
    products = [torch.real(_contracted(row, dx)) for row, dx in zip(rows, directions, strict=True)]
    return sum(products[1:], products[0])


def _rows_of_nan(product: torch.Tensor, extra_axes: Sequence[int]) -> torch.Tensor:
    """Return the positions of the elements of a result that are NaN in some direction."""
    last = product.movedim(tuple(extra_axes), tuple(range(-len(extra_axes), 0)))
    nan = last.isnan()
    for _ in extra_axes:
        nan = nan.any(-1)
    return nan.flatten().nonzero()[:, 0]


def _contracted(rows: torch.Tensor, dx: torch.Tensor) -> torch.Tensor:
    """Return the products of n rows, shaped ``[n, shape...]``, and m directions, shaped ``[..., shape...]``: [n, m]."""
    count = max(1, rows[:1].numel())
    return rows.reshape(-1, count) @ dx.reshape(-1, count).mT.to(rows.dtype)
