"""Forward derivatives from the rows of a Jacobian, for gradients that torch differentiates to NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jtbridge.core.array_types import Tensors
from jtbridge.transforms import LARGEST_JACOBIAN, Vjp, have_nan

from ._graph import AutogradGraph


def product_by_rows(
    graph: AutogradGraph, of: Vjp, tangents: Sequence[torch.Tensor], extra_axes: Sequence[int]
) -> Tensors | None:
    """Return ``Df(x) @ dx`` for the graph of a run of f, from first derivatives alone; None if Df(x) is too large.

    Args:
        graph: the kept graph.
        of: the derivative of f, with its inputs `wrt` and outputs `outs`.
        tangents: dx, one for each of the inputs ``of.wrt``.
        extra_axes: the axes of a tangent over which the graph is not batched; those of the result are the last ones.
    """
    outputs = [graph.outputs[o] for o in of.outs]
    sizes = [tangents[0].shape[axis] for axis in extra_axes]
    columns = sum(graph.inputs[i].numel() for i in of.wrt)
    if columns * sum(y.numel() for y in outputs) > LARGEST_JACOBIAN:
        return None
    directions = [dx.movedim(tuple(extra_axes), tuple(range(len(sizes)))) for dx in tangents]
    results = []
    for position, y in enumerate(outputs):
        parts = []
        for factor in (1, 1j) if y.is_complex() else (1,):
            units = factor * torch.eye(y.numel(), dtype=y.dtype, device=y.device).reshape(-1, *y.shape)
            zeros = [other.new_zeros(()).expand(len(units), *other.shape) for other in outputs]
            cotangents = [*zeros[:position], units, *zeros[position + 1 :]]
            rows = graph.pull(cotangents, of, (0,), create_graph=False)
            if have_nan(rows):  # torch has other formulas for batches, which may divide zero by zero
                each = [graph.pull(unit, of, (), create_graph=False) for unit in zip(*cotangents, strict=True)]
                rows = [torch.stack(row) for row in zip(*each, strict=True)]
            parts.append(sum(torch.real(_contracted(row, dx)) for row, dx in zip(rows, directions, strict=True)))
        result = torch.complex(parts[0], -parts[1]) if y.is_complex() else parts[0]
        result = result.reshape((*y.shape, *sizes))
        results.append(result.movedim(tuple(range(y.dim(), result.dim())), tuple(extra_axes)))
    return tuple(results)


def _contracted(rows: torch.Tensor, dx: torch.Tensor) -> torch.Tensor:
    """Return the products of n rows, shaped ``[n, shape...]``, and m directions, shaped ``[..., shape...]``: [n, m]."""
    count = max(1, rows[:1].numel())
    return rows.reshape(-1, count) @ dx.reshape(-1, count).mT.to(rows.dtype)
