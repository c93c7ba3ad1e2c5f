"""A test of whether a node of a graph is a transposed view of a matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_KEEPS_MATRICES = frozenset(
    {
        _aten.view.default,
        _aten.reshape.default,
        _aten._unsafe_view.default,
        _aten.expand.default,
        _aten.clone.default,
        _aten.detach.default,
        _aten.alias.default,
    }
)


def is_transposed(node: Any) -> bool:
    """Return whether the value of a node is the transpose of a matrix, or of a batch of matrices, as a view."""
    while isinstance(node, fx.Node) and node.target in _KEEPS_MATRICES:
        source = node.args[0]
        if not isinstance(source, fx.Node) or _shape(source)[-2:] != _shape(node)[-2:]:
            return False
        node = source
    if not isinstance(node, fx.Node):
        return False
    match node.target:
        case _aten.t.default:
            source, dims = node.args[0], [-2, -1]
        case _aten.transpose.int:
            source, *dims = node.args
        case _aten.permute.default:
            source, order = node.args
            return len(order) > 1 and order[-2] % len(order) == len(order) - 1  # type: ignore[arg-type, index, operator]
        case _:
            return False
    ndim = len(_shape(source))  # these operators take vectors too
    return ndim > 1 and {dim % ndim for dim in dims} == {ndim - 2, ndim - 1}  # type: ignore[operator]


def _shape(node: Any) -> Any:
    # JAX's symbolic sizes can be compared; torch's raise.
    return node.meta["jax_shapes"][0] if "jax_shapes" in node.meta else node.meta["val"].shape
