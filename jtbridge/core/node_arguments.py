"""Arguments of the nodes of an FX graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


def plain_arguments(node: fx.Node, of_node: Callable[[fx.Node], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments and keyword arguments of a node, with `of_node` applied to the nodes among them.

    The containers are plain ones. The lists and dicts of FX are not pytrees: `jax.tree.leaves` treats each as a leaf.
    """
    return _with_plain_containers(node.args, of_node), _with_plain_containers(node.kwargs, of_node)


def _with_plain_containers(value: Any, of_node: Callable[[fx.Node], Any]) -> Any:
    if isinstance(value, fx.Node):
        return of_node(value)
    if isinstance(value, list | tuple):
        items = [_with_plain_containers(item, of_node) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {name: _with_plain_containers(item, of_node) for name, item in value.items()}
    return value
