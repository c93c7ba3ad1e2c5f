"""The containers that operators return, flattened in the same way for torch and for JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of a result, in order. None has no leaves, as in JAX."""
    if isinstance(tree, (tuple, list)):
        return [leaf for child in tree for leaf in leaves(child)]
    if isinstance(tree, Mapping):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    return [] if tree is None else [tree]


def skeleton(tree: Any) -> str:
    """Return the containers of a result by class, with `*` for a leaf: ``tuple(*, list(*, *))``.

    A `torch.Size` counts as a tuple, which a trace returns for it: JAX knows no other.
    """
    if isinstance(tree, (tuple, list)):
        name = "tuple" if type(tree) is torch.Size else type(tree).__name__
        return f"{name}({', '.join(skeleton(child) for child in tree)})"
    if isinstance(tree, Mapping):
        return f"{type(tree).__name__}({', '.join(f'{key}: {skeleton(tree[key])}' for key in sorted(tree))})"
    return "None" if tree is None else "*"


def rebuilt(tree: Any, leaf: Callable[[torch.Tensor], Any]) -> Any:
    """Return the same tree with every tensor replaced."""
    if isinstance(tree, torch.Tensor):
        return leaf(tree)
    if isinstance(tree, (tuple, list)):
        children = [rebuilt(child, leaf) for child in tree]
        return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)
    if isinstance(tree, Mapping):
        return {key: rebuilt(child, leaf) for key, child in tree.items()}
    return tree
