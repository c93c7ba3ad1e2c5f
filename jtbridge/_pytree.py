"""Output trees: torch's own containers become JAX pytree nodes of the same class.

JAX knows tuples, lists, dicts, None and named tuples. Hugging Face's ModelOutput and other torch pytree nodes,
and plain dataclasses, are registered with JAX the first time a wrapped function returns one, so that
``jax.jit(f)(x).last_hidden_state`` reads as it does in torch. A class that is registered already is left alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import torch

from ._compat import torch_pytree_node


class _Context:
    """What torch's pytree keeps beside the children; it may be unhashable, and JAX needs it hashable."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and self.value == other.value

    def __hash__(self) -> int:
        return hash(repr(self.value))


def _register_torch_node(cls: type, flatten: Any, unflatten: Any) -> None:
    def flatten_for_jax(node: Any) -> tuple[tuple[Any, ...], _Context]:
        children, context = flatten(node)
        return tuple(children), _Context(context)

    def unflatten_for_jax(context: _Context, children: Any) -> Any:
        return unflatten(list(children), context.value)

    jax.tree_util.register_pytree_node(cls, flatten_for_jax, unflatten_for_jax)


def _register_dataclass(cls: type) -> None:
    names = tuple(field.name for field in dataclasses.fields(cls))

    def flatten_for_jax(node: Any) -> tuple[tuple[Any, ...], None]:
        return tuple(getattr(node, name) for name in names), None

    def unflatten_for_jax(_: None, children: Any) -> Any:
        # Not cls(...): JAX also rebuilds trees around placeholders, which a __post_init__ may refuse.
        node = object.__new__(cls)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(node, name, child)
        return node

    jax.tree_util.register_pytree_node(cls, flatten_for_jax, unflatten_for_jax)


def register_node(leaf: Any) -> bool:
    """Teach JAX the class of `leaf` if it is a container that torch or dataclasses can take apart."""
    cls = type(leaf)
    if cls.__module__ in ("builtins", "torch"):
        return False
    node = torch_pytree_node(cls)
    if node is not None:
        _register_torch_node(cls, *node)
        return True
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        _register_dataclass(cls)
        return True
    return False


def flatten_output(out: Any) -> tuple[list[Any], Any]:
    """The leaves of a torch function's result and the JAX tree that puts them together again."""
    if isinstance(out, torch.Tensor):
        return [out], _LEAF
    leaves, tree = jax.tree_util.tree_flatten(out)
    while any(register_node(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)):
        leaves, tree = jax.tree_util.tree_flatten(out)
    return leaves, tree


_LEAF = jax.tree_util.tree_structure(0)
