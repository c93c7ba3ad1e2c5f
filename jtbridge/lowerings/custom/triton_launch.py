"""Lowering of launches of the user's own Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from torch import fx

from jtbridge.lowerings._registry import register_lowering
from jtbridge.triton.launches import find_launch, written_values


@register_lowering("jtbridge::launch", node=True)
def _triton_launch(tensors: Sequence[jax.Array], number: int, *, node: fx.Node) -> list[jax.Array]:
    spec = find_launch(number)
    nodes = node.args[0]
    assert isinstance(nodes, Sequence)
    fresh = [i for i in spec.written if _is_unset(nodes[i])]
    return written_values(spec, tensors, fresh)


def _is_unset(node: object) -> bool:
    """Return whether a node makes a tensor without values, such as `torch.empty`."""
    target = str(node.target) if isinstance(node, fx.Node) else ""
    return target.startswith(("aten.empty", "aten.new_empty"))
