"""Index tuples for jnp that select the same elements as an index tensor of torch along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch
from torch import fx

from jtbridge.lowerings.shape._common import positions

Places = tuple[Any, ...]


def at_axis(index: jax.Array, axis: int) -> Places:
    """Return an index tuple for jnp that applies `index` along one axis."""
    return (*(slice(None),) * axis, index)


def along(index: jax.Array, axis: int, shape: Sequence[int], source: Any) -> Places:
    """Return an index tuple for jnp that selects, for each element of `index`, the element with the same coordinates.

    Only the coordinate along `axis` differs: it is the value of the element of `index`. If torch expanded `index` from
    one element for each row, as graph libraries do, the tuple selects whole rows, which XLA reads several times faster.

    Args:
        index: an index tensor with as many axes as the array that is indexed.
        axis: the axis along which `index` selects.
        shape: the shape of the array.
        source: the graph node of `index`.
    """
    whole = [i for i in _expanded_axes(source) if i != axis and index.shape[i] == shape[i]]
    others = [i for i in range(index.ndim) if i not in whole]
    if len(others) != others[-1] - others[0] + 1:  # jnp would put the axes of separated index arrays first
        whole, others = [], [*range(index.ndim)]
    narrow = index[tuple(0 if i in whole else slice(None) for i in range(index.ndim))]
    places: list[Any] = [slice(None)] * index.ndim
    for position, i in enumerate(others):
        places[i] = narrow if i == axis else positions(narrow.shape, position)
    return tuple(places)


def _expanded_axes(source: Any) -> list[int]:
    """Return the axes along which torch expanded the value of a node."""
    if not isinstance(source, fx.Node) or source.target is not torch.ops.aten.expand.default:
        return []
    before, after = source.args[0].meta["val"].shape, source.meta["val"].shape  # type: ignore[union-attr]
    added = len(after) - len(before)
    return [i for i in range(len(after)) if i < added or before[i - added] == 1]
