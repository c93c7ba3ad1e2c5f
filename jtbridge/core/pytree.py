"""Containers of torch code as JAX pytree nodes of the same class.

JAX knows tuples, lists, dicts, None and named tuples. Other containers are registered with JAX the first time a wrapped
function returns or takes one: Hugging Face's ModelOutput and other torch pytree nodes, Hugging Face's caches of keys
and values, and plain dataclasses. So ``jax.jit(f)(x).last_hidden_state`` reads as it does in torch. A class that is
registered already is left alone.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import types
from collections.abc import Iterator, Set, ValuesView
from typing import Any

import jax
import torch
from torch.nn.utils.rnn import PackedSequence

from jtbridge._compat import torch_pytree_node
from jtbridge.errors import ArgumentError

from .closures import closure_contents
from .messages import kind_of
from .signals import raise_if_from_signal
from .static import static_key, value_key


class _HashableContext:
    """Hashable wrapper of the static part of a torch pytree node, which JAX hashes and torch does not."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HashableContext) and self.value == other.value

    def __hash__(self) -> int:
        return hash(repr(self.value))


def _register_torch_node(cls: type, flatten: Any, unflatten: Any) -> None:
    def flatten_for_jax(node: Any) -> tuple[tuple[Any, ...], _HashableContext]:
        children, context = flatten(node)
        return tuple(children), _HashableContext(context)

    def unflatten_for_jax(context: _HashableContext, children: Any) -> Any:
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


def _register_packed_sequence() -> None:
    names = PackedSequence.__match_args__

    def flatten_for_jax(node: Any) -> tuple[tuple[Any, ...], None]:
        return tuple((jax.tree_util.GetAttrKey(name), child) for name, child in zip(names, node, strict=True)), None

    def unflatten_for_jax(_: None, children: Any) -> Any:
        return tuple.__new__(PackedSequence, children)  # its constructor accepts only tensors

    jax.tree_util.register_pytree_with_keys(PackedSequence, flatten_for_jax, unflatten_for_jax)


_register_packed_sequence()


@jax.tree_util.register_pytree_with_keys_class
class InOrder:
    """Pytree node for a dict, with its children in insertion order.

    JAX itself sorts the keys of a dict, and torch code may read their order. Unflattening gives a dict of the same
    type.
    """

    def __init__(self, mapping: dict[Any, Any]):
        self._mapping = mapping

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        children = [(jax.tree_util.DictKey(key), in_order(value)) for key, value in self._mapping.items()]
        keys = tuple(self._mapping)
        factory = self._mapping.default_factory if isinstance(self._mapping, collections.defaultdict) else None
        return children, (type(self._mapping), keys, tuple(map(static_key, keys)), factory)

    @classmethod
    def tree_unflatten(cls, auxiliary: Any, children: Any) -> Any:
        kind, keys, _, factory = auxiliary
        items = zip(keys, children, strict=True)
        return dict(items) if kind is dict else collections.defaultdict(factory, items)


def in_order(tree: Any) -> Any:
    """Return `tree` with an :class:`InOrder` in place of every dict that JAX would sort."""
    return jax.tree_util.tree_map(lambda leaf: InOrder(leaf) if _is_sorted(leaf) else leaf, tree, is_leaf=_is_sorted)


def _is_sorted(node: Any) -> bool:
    return type(node) in (dict, collections.defaultdict) and len(node) > 0


def leaf_paths(structure: Any) -> list[tuple[Any, ...]]:
    """Return the path of each leaf of a pytree's structure; dicts in it are in the order that `in_order` gave them.

    The names of attributes are in the paths unless a class of the tree refuses placeholders for its children.
    """
    places = [_LeafPlaceholder() for _ in range(structure.num_leaves)]
    try:
        flat = jax.tree_util.tree_flatten_with_path(in_order(structure.unflatten(places)))[0]
    except Exception as error:  # noqa: BLE001  (a user's constructor that computes with its children, or tests them)
        raise_if_from_signal(error)
        return _paths_by_position(structure, ())
    paths = [path for path, leaf in flat if isinstance(leaf, _LeafPlaceholder)]
    # If a constructor left out a child or added one, `paths` does not belong to the leaves.
    return paths if len(paths) == len(flat) == len(places) else _paths_by_position(structure, ())


class _LeafPlaceholder:
    """Placeholder of a leaf."""


def _paths_by_position(structure: Any, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    children = structure.children()
    if not children:
        return [path] if structure.num_leaves else []
    kind, static = structure.node_data()
    keys: list[Any]
    if kind in (tuple, list):
        keys = [jax.tree_util.SequenceKey(number) for number in range(len(children))]
    elif kind in (dict, InOrder):
        keys = [jax.tree_util.DictKey(key) for key in (static if kind is dict else static[1])]
    else:
        keys = [jax.tree_util.FlattenedIndexKey(number) for number in range(len(children))]
    return [
        found for key, child in zip(keys, children, strict=True) for found in _paths_by_position(child, (*path, key))
    ]


def structure_key(structure: Any) -> Any:
    """Return a hashable key of the static parts of a pytree's structure, such as keys of dicts; None if it has none.

    JAX compares these parts by ``==``, for which 1 and 1.0 are equal.
    """
    kind, static = structure.node_data() or (None, None)
    if kind is InOrder or (kind is dict and all(type(key) is str for key in static or ())):
        static = None  # JAX's comparison is exact for these
    only_leaves = structure.num_nodes <= structure.num_leaves + 1
    inside = () if only_leaves else tuple(map(structure_key, structure.children()))
    if static is None and all(key is None for key in inside):
        return None
    return value_key(static), inside


def key_order(tree: Any) -> tuple[Any, tuple[int, ...]] | None:
    """Return the structure of a tree with its dicts in insertion order; None if that is JAX's order too.

    Returns:
        The structure, and for each of its leaves the number of the leaf in JAX's own order.
    """
    ordered = in_order(tree)
    paths, structure = jax.tree_util.tree_flatten_with_path(ordered)
    numbers = {path: number for number, (path, _) in enumerate(jax.tree_util.tree_flatten_with_path(tree)[0])}
    found = tuple(numbers[path] for path, _ in paths)
    return None if found == tuple(range(len(found))) else (structure, found)


# The attribute of a cache rebuilt by JAX that names the attributes which are children. JAX may put any object in the
# place of a child, so the values do not tell which attributes are children.
_CHILDREN = "_jtbridge_children"
_STATIC = (bool, int, float, complex, str, type, type(None), torch.dtype, torch.device)


def _register_cache(cls: type) -> None:
    """Register a Hugging Face cache, or a layer of one, with numbers, flags and dtypes as its static attributes."""

    def flatten_for_jax(node: Any) -> tuple[tuple[Any, ...], _HashableContext]:
        attributes = {name: value for name, value in vars(node).items() if name != _CHILDREN}
        known = getattr(node, _CHILDREN, ())
        names = tuple(name for name in sorted(attributes) if name in known or not _is_static(attributes[name]))
        statics = {name: value for name, value in attributes.items() if name not in names}
        return tuple(attributes[name] for name in names), _HashableContext((names, statics))

    def unflatten_for_jax(context: _HashableContext, children: Any) -> Any:
        names, statics = context.value
        node = object.__new__(cls)
        vars(node).update({**statics, **dict(zip(names, children, strict=True)), _CHILDREN: names})
        return node

    jax.tree_util.register_pytree_node(cls, flatten_for_jax, unflatten_for_jax)


def _is_static(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return all(map(_is_static, value.values() if isinstance(value, dict) else value))
    return isinstance(value, _STATIC)


def register_node(leaf: Any) -> bool:
    """Register the class of `leaf` with JAX if it is a torch pytree node, a dataclass or a cache.

    The result is whether the class was registered.
    """
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
    if any(base.__module__ == "transformers.cache_utils" for base in cls.__mro__):
        _register_cache(cls)
        return True
    return False


def register_class(cls: type) -> None:
    """Register a class of transformers' caches with JAX, unless it is registered."""
    try:
        _register_cache(cls)
    except ValueError:  # it is registered
        return


def flatten_output(out: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a torch function's result, and the JAX pytree structure that rebuilds it.

    Raises:
        ArgumentError: JAX cannot sort the keys of a dict; or a leaf holds tensors and is not a container of JAX.
    """
    if isinstance(out, torch.Tensor):
        return [out], _LEAF
    try:
        leaves, tree = jax.tree_util.tree_flatten(out)
    except ValueError:
        refuse_unsortable(out, "result")
        raise
    while any(register_node(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)):
        leaves, tree = jax.tree_util.tree_flatten(out)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            _refuse_hidden_tensors(leaf)
    return leaves, tree


def _refuse_hidden_tensors(leaf: Any) -> None:
    """Raise if a leaf of a result is an iterator, or a set or a view of a dict that has tensors."""
    hides = isinstance(leaf, Iterator) and type(leaf).__module__ == "builtins"  # a file is an iterator, too
    if isinstance(leaf, Set | ValuesView):
        items = (item if isinstance(item, tuple) else (item,) for item in leaf)
        hides = any(isinstance(x, torch.Tensor) for x in itertools.chain.from_iterable(items))
    if hides:
        raise ArgumentError(
            f"A torch function returned {kind_of(leaf)}, whose tensors JAX cannot find. Return a list or a tuple: "
            "`return [*result]`."
        )


def holds_derivative(value: Any, depth: int = 4) -> bool:
    """Return whether an object that is not a pytree node holds, down to a depth, a non-leaf tensor of autograd."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad and not value.is_leaf
    if depth == 0 or isinstance(value, type | types.ModuleType | torch.nn.Module | str | bytes | int | float | None):
        return False
    parts: list[Any] = []
    if isinstance(value, dict):
        parts += dict.values(value)
    elif isinstance(value, list | tuple | set | frozenset):
        parts += value
    elif isinstance(value, types.FunctionType):
        parts += closure_contents(value)
    elif isinstance(value, functools.partial):
        parts += [*value.args, *value.keywords.values()]
    elif isinstance(value, types.MethodType):
        parts.append(value.__self__)
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(value, types.FunctionType):
        parts += attributes.values()
    return any(holds_derivative(part, depth - 1) for part in parts)


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """Return the tensors among the leaves of a tree."""
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, torch.Tensor)]


def refuse_unsortable(tree: Any, name: str) -> None:
    """Raise if a dict in a tree has keys that JAX cannot sort.

    Raises:
        ArgumentError: there is such a dict. The message calls the tree `name`.
    """
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_sorted)[0]:
        if not _is_sorted(node):
            continue
        here = f"{name}{jax.tree_util.keystr(path)}"
        try:
            sorted(node)
        except TypeError as error:
            raise ArgumentError(
                f"`{here}` is a dict with the keys {', '.join(map(repr, node))}, which JAX cannot sort. Use keys of "
                "one type, such as strings."
            ) from error
        for key, value in node.items():
            refuse_unsortable(value, f"{here}[{key!r}]")


_LEAF = jax.tree_util.tree_structure(0)
