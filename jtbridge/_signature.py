"""From the arguments of a call to flat arrays and a hashable signature of everything else."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ._convert import to_jax
from ._pytree import register_node
from .capture import Unusable
from .errors import ArgumentError, DTypeError

ARRAY = object()  # stands where an array was among the leaves of a signature


@dataclasses.dataclass(frozen=True)
class Signature:
    """The arguments of a call without the values of its arrays. Equal signatures share a plan."""

    tree: Any
    keys: tuple[Any, ...]  # hashable stand-ins for the static leaves, `ARRAY` for arrays
    types: tuple[tuple[tuple[int, ...], np.dtype], ...]
    statics: tuple[Any, ...] = dataclasses.field(compare=False)  # the static leaves themselves


def flatten_arguments(name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[list[jax.Array], Signature]:
    """Split arguments into arrays (traced) and everything else (static).

    Raises:
        ArgumentError: a leaf is neither an array nor hashable.
    """
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
    while any(_is_container(leaf) and register_node(leaf) for leaf in leaves):
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
    arrays: list[jax.Array] = []
    keys: list[Any] = []
    statics: list[Any] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array | np.ndarray | np.generic | torch.Tensor):
            arrays.append(_as_array(leaf, lambda p=position: _leaf_name(name, args, kwargs, p)))
            keys.append(ARRAY)
            statics.append(ARRAY)
        else:
            keys.append(_static_key(leaf, lambda p=position: _leaf_name(name, args, kwargs, p)))
            statics.append(leaf)
    types = tuple((tuple(x.shape), x.dtype) for x in arrays)
    return arrays, Signature(tree, tuple(keys), types, tuple(statics))


def rebuild_call(fn: Callable, signature: Signature) -> Callable[..., Any]:
    """`fn` as a function of the arrays of its signature alone."""
    positions = [i for i, key in enumerate(signature.keys) if key is ARRAY]
    if signature.tree == jax.tree_util.tree_structure(((0,) * len(positions), {})):
        return fn  # plain positional arrays
    statics, tree = signature.statics, signature.tree

    def call(*tensors: torch.Tensor) -> Any:
        leaves = list(statics)
        for position, tensor in zip(positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = tree.unflatten(leaves)
        return fn(*args, **kwargs)

    return call


def argument_names(fn: Callable, signature: Signature) -> tuple[str, ...]:
    """A name for each array argument, such as ``x`` or ``params['w']``."""
    leaves = [i if key is ARRAY else None for i, key in enumerate(signature.keys)]
    args, kwargs = signature.tree.unflatten([_Place(i) for i in range(len(leaves))])
    parameters = _parameter_names(fn)
    paths = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
    return tuple(_path_name(path, parameters) for path, place in paths if leaves[place.position] is not None)


def closed_over_modules(fn: Callable) -> list[torch.nn.Module]:
    """The modules that a function is, is a method of, or names in its closure or globals."""
    return [value for value in closed_over(fn) if isinstance(value, torch.nn.Module)]


def device_closed_over(fn: Callable) -> str:
    """The type of the devices that the tensors lie on which a function closes over; "cpu" if there are none."""
    tensors = [t for x in closed_over(fn) for t in ([x] if isinstance(x, torch.Tensor) else x.parameters())]
    return "cuda" if any(tensor.is_cuda for tensor in tensors if not isinstance(tensor, Unusable)) else "cpu"


def closed_over(fn: Callable) -> list[torch.nn.Module | torch.Tensor]:
    """The modules and tensors that a function is, is a method of, or names in its closure or globals."""
    code = getattr(fn, "__code__", None)
    scope = getattr(fn, "__globals__", {})
    found = [fn, getattr(fn, "__self__", None)]
    found += [scope.get(name) for name in (code.co_names if code is not None else ())]
    for cell in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a cell that is not filled yet
            found.append(cell.cell_contents)
    return [value for value in found if isinstance(value, torch.nn.Module | torch.Tensor)]


@dataclasses.dataclass(frozen=True)
class _Place:
    position: int


def _path_name(path: Sequence[Any], parameters: Sequence[str]) -> str:
    _, first, *rest = path
    if isinstance(first, jax.tree_util.SequenceKey):
        root = parameters[first.idx] if first.idx < len(parameters) else f"argument {first.idx}"
    else:
        root = str(first.key)
    return f"{root}{jax.tree_util.keystr(tuple(rest))}"


def _parameter_names(fn: Callable) -> list[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # built-in torch functions have no signature
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _leaf_name(name: str, args: tuple, kwargs: dict[str, Any], position: int) -> str:
    path = jax.tree_util.tree_flatten_with_path((args, kwargs))[0][position][0]
    return f"argument `{_path_name(path, [])}` of `{name}`"


def _as_array(leaf: Any, describe: Callable[[], str]) -> jax.Array:
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, torch.Tensor):
        return to_jax(leaf)
    if leaf.dtype.kind in "OUSMm" or leaf.dtype.names is not None:
        raise ArgumentError(
            f"{describe()} is a NumPy array of dtype `{leaf.dtype}`, which is not a number. "
            "Pass numbers, or close over it instead of passing it."
        )
    if not leaf.dtype.isnative:
        raise DTypeError(
            f"{describe()} is a NumPy array of dtype `{leaf.dtype!r}`, in a foreign byte order that neither JAX nor "
            "torch has. Convert it with `x.astype(x.dtype.newbyteorder('='))`."
        )
    return jnp.asarray(leaf)


def _is_container(leaf: Any) -> bool:
    """Whether a leaf is a dataclass or a torch container that holds arrays, or that could not be hashed."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | torch.Tensor | torch.nn.Module | type):
        return False
    if not dataclasses.is_dataclass(leaf):
        return True  # register_node looks whether torch knows it
    values = jax.tree_util.tree_leaves([getattr(leaf, f.name, None) for f in dataclasses.fields(leaf)])
    holds_arrays = any(isinstance(v, jax.Array | np.ndarray | torch.Tensor) for v in values)
    return holds_arrays or type(leaf).__hash__ is None


def _static_key(leaf: Any, describe: Callable[[], str]) -> Any:
    """A hashable key that tells 1, 1.0 and True, and 0.0 and -0.0, apart."""
    if isinstance(leaf, float | complex):
        return type(leaf), repr(leaf)
    if isinstance(leaf, slice):
        return slice, tuple(_static_key(part, describe) for part in (leaf.start, leaf.stop, leaf.step))
    try:
        hash(leaf)
    except TypeError:
        raise ArgumentError(
            f"{describe()} is a {type(leaf).__name__}, which is neither an array nor hashable. Pass arrays in tuples, "
            "lists, dicts or other pytrees, and static values as hashable ones; or close over it."
        ) from None
    return type(leaf), leaf
