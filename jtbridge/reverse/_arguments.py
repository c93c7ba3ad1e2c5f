"""The arguments of a call of a JAX function by torch code, split into tensors and static values."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.core
import numpy as np
import torch

from jtbridge._compat import weakly_typed
from jtbridge.core.array_types import is_dense, kind_of_layout
from jtbridge.core.convert import to_torch
from jtbridge.core.definitions import module_of, slot_names
from jtbridge.core.dtypes import canonical_dtype, has_torch_dtype, numpy_dtype, torch_dtype
from jtbridge.core.messages import kind_of
from jtbridge.core.pytree import refuse_unsortable, structure_key
from jtbridge.core.static import static_key
from jtbridge.errors import ArgumentError

from ._tensors import readable

TENSOR = "tensor"  # marks the place of a tensor among the leaves
WEAK = "weak"  # marks the place of a weakly typed JAX array, such as one made from a Python number


@dataclasses.dataclass(frozen=True)
class RandomKeyMarker:
    """Marks the place of a random key of JAX, whose bits are a tensor in torch."""

    implementation: str


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a call without the values of its tensors. Equal ones share a compiled function."""

    tree: Any
    keys: tuple[Hashable, ...]  # `TENSOR`, `WEAK`, a `RandomKeyMarker`, or a key of the static leaf's value
    statics: tuple[Any, ...] = dataclasses.field(compare=False)
    tree_key: Any  # differs for trees whose static parts are equal but not the same, such as 1 and True

    def rebuild(self, arrays: tuple[Any, ...]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments with arrays in the places of tensors."""
        leaves, rest = list(self.statics), iter(arrays)
        for i, key in enumerate(self.keys):
            if key is TENSOR:
                leaves[i] = next(rest)
            elif key is WEAK:
                leaves[i] = weakly_typed(next(rest))
            elif isinstance(key, RandomKeyMarker):
                leaves[i] = jax.random.wrap_key_data(next(rest), impl=key.implementation)
        return self.tree.unflatten(leaves)


def split_arguments(name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], Arguments]:
    """Split the arguments of a call into tensors and static values.

    Several results of a torch operator, such as those of ``x.max(0)``, reach JAX as a named tuple.

    Raises:
        ArgumentError: a leaf is a tensor that JAX cannot have, a JAX tracer, neither a tensor nor hashable, or an
            object with a tensor in an attribute; or JAX cannot sort the keys of a dict.
        DTypeError: JAX does not have the dtype of a tensor.
    """
    try:
        leaves, tree = jax.tree.flatten((args, kwargs))
    except ValueError:
        for given, value in (*enumerate(args), *kwargs.items()):
            refuse_unsortable(value, f"argument {given}" if isinstance(given, int) else given)
        raise
    if any(_has_several_results(leaf) for leaf in leaves):
        args, kwargs = jax.tree.map(_with_named_tuple, (args, kwargs))
        leaves, tree = jax.tree.flatten((args, kwargs))
    tensors: list[torch.Tensor] = []
    keys: list[Hashable] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            keys.append(TENSOR)
            tensors.append(leaf)
        elif isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            _refuse_tracer(leaf, lambda p=position: _named(name, args, kwargs, p))
            keys.append(RandomKeyMarker(str(jax.random.key_impl(leaf))))
            tensors.append(to_torch(jax.random.key_data(leaf)))
        elif isinstance(leaf, jax.Array | np.ndarray | np.generic):
            named = lambda p=position: _named(name, args, kwargs, p)  # noqa: E731
            _refuse_tracer(leaf, named)
            keys.append(WEAK if isinstance(leaf, jax.Array) and leaf.weak_type else TENSOR)
            tensors.append(_array_to_tensor(leaf, named))
        else:
            leaf = leaves[position] = _concrete_number(leaf)
            keys.append(_static(leaf, lambda p=position: _named(name, args, kwargs, p)))
            continue
        leaves[position] = None
        tensors[-1] = _usable(tensors[-1], lambda p=position: _named(name, args, kwargs, p))
    return tensors, Arguments(tree, tuple(keys), tuple(leaves), structure_key(tree))


def _array_to_tensor(leaf: Any, named: Callable[[], str]) -> torch.Tensor:
    """Return an array, or a number of NumPy, as a tensor."""
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ArgumentError(f"{named()} is an array that was deleted, or donated to a program. Pass one that exists.")
    if not has_torch_dtype(leaf.dtype):
        torch_dtype(leaf.dtype, named())  # raises
    return to_torch(np.asarray(leaf) if isinstance(leaf, np.generic) else leaf)


def _usable(tensor: torch.Tensor, named: Callable[[], str]) -> torch.Tensor:
    """Return a tensor in the dtype that JAX has for it: while x64 is off, 64-bit types become 32-bit ones."""
    if not is_dense(tensor):
        kind, dense = kind_of_layout(tensor)
        raise ArgumentError(f"{named()} {kind}, which JAX does not have. Pass {dense}.")
    tensor = readable(tensor)
    dtype = _CANONICAL.get((tensor.dtype, jax.config.jax_enable_x64))  # type: ignore[attr-defined]
    if dtype is None:
        dtype = torch_dtype(canonical_dtype(numpy_dtype(tensor.dtype, named())), named())
        _CANONICAL[tensor.dtype, jax.config.jax_enable_x64] = dtype  # type: ignore[attr-defined]
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


_CANONICAL: dict[tuple[torch.dtype, bool], torch.dtype] = {}  # at most two entries for each dtype


def _refuse_tracer(leaf: Any, named: Callable[[], str]) -> None:
    if isinstance(leaf, jax.core.Tracer):
        raise ArgumentError(
            f"{named()} is a JAX tracer, but this is a torch function. In JAX code call the JAX function itself."
        )


def _has_several_results(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and type(leaf).__module__ == "torch.return_types"


def _with_named_tuple(leaf: Any) -> Any:
    return _named_tuple_type(type(leaf))(*leaf) if _has_several_results(leaf) else leaf


@functools.cache
def _named_tuple_type(kind: Any) -> Any:
    return collections.namedtuple(kind.__name__, kind.__match_args__)


def _concrete_number(leaf: Any) -> Any:
    """Return a symbolic number of torch.compile as a Python number; the graph is then valid only for this number."""
    if isinstance(leaf, torch.SymBool):
        return bool(leaf)
    if isinstance(leaf, torch.SymInt):
        return int(leaf)
    if isinstance(leaf, torch.SymFloat):
        return float(leaf)
    return leaf


def _static(leaf: Any, named: Callable[[], str]) -> Hashable:
    if hasattr(type(leaf), "__torch_function__"):
        raise ArgumentError(
            f"{named()} is {kind_of(leaf)}, which stands for a tensor only in torch functions. Pass the tensor. "
            "In torch.fx.symbolic_trace, call the function in a function that `torch.fx.wrap` names."
        )
    if type(leaf) not in _PLAIN and (place := _place_of_tensor(leaf)) is not None:
        raise ArgumentError(
            f"{named()} is {kind_of(leaf)} with a tensor in `{place}`, whose values would be read only when "
            f"JAX traces the function. Make `{type(leaf).__name__}` a pytree, such as by "
            "`jax.tree_util.register_dataclass`, or pass the tensor as a separate argument."
        )
    try:
        return static_key(leaf)
    except TypeError:
        raise ArgumentError(
            f"{named()} is {kind_of(leaf)}, which is neither a tensor nor hashable. Pass tensors in tuples, "
            "lists, dicts or other pytrees, and static values as hashable ones; or close over it."
        ) from None


_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.Size, torch.dtype, torch.device})


_MAX_PARTS = 1000  # of a static object that are searched for a tensor in each call


def _place_of_tensor(leaf: Any) -> str | None:
    """Return where an object holds a tensor, such as `.weights["w"]`; None if it holds none.

    What functions close over is not searched.
    """
    parts = collections.deque([("", leaf)])
    seen = {id(leaf): leaf}
    while parts and len(seen) < _MAX_PARTS:
        place, part = parts.popleft()
        if isinstance(part, torch.Tensor):
            return place
        for step, value in _items_and_attributes(part):
            if type(value) not in _PLAIN and id(value) not in seen:
                seen[id(value)] = value
                parts.append((place + step, value))
    return None


def _items_and_attributes(obj: Any) -> list[tuple[str, Any]]:
    """Return the items of a container, and the attributes of an object, with names for messages."""
    if isinstance(obj, type | types.FunctionType | types.ModuleType) or module_of(type(obj)).startswith("jtbridge."):
        return []
    items: list[tuple[str, Any]] = []
    if isinstance(obj, dict):
        items = [(f"[{key!r}]", value) for key, value in obj.items()]
    elif isinstance(obj, tuple | list | set | frozenset):
        items = [(f"[{i}]", value) for i, value in enumerate(obj)]
    elif isinstance(obj, functools.partial):
        items = [(".func", obj.func), (".args", obj.args), (".keywords", obj.keywords)]
    elif isinstance(obj, torch.nn.Module):
        items = [(f".{name}", tensor) for name, tensor in (*obj.named_parameters(), *obj.named_buffers())]
    elif isinstance(obj, types.MethodType):
        items = [(".__self__", obj.__self__)]
    names = [*getattr(obj, "__dict__", ()), *slot_names(type(obj).__mro__)]
    return [*items, *[(f".{name}", getattr(obj, name, None)) for name in names]]


def _named(name: str, args: tuple, kwargs: dict[str, Any], position: int) -> str:
    path = jax.tree_util.tree_flatten_with_path((args, kwargs))[0][position][0]
    kind, first, *rest = path
    root = f"argument {first.idx}" if kind.idx == 0 else str(first.key)
    return f"Argument `{root}{jax.tree_util.keystr(tuple(rest))}` of `{name}`"
