"""Split of the arguments of a call into flat arrays and a hashable signature of everything else."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jtbridge._compat import Context, current_context, innermost
from jtbridge.errors import ArgumentError, DTypeError

from .convert import tensor_to_jax
from .messages import kind_of
from .positions import replaced
from .pytree import in_order, leaf_paths, register_node, structure_key
from .static import static_key

ARRAY = object()  # marks the place of an array among the leaves of a signature


class Fixed:
    """Placeholder, among the arguments of a call, for a value that the function gets from its ``functools.partial``."""

    def __init__(self, value: Any):
        self._value = value

    def __repr__(self) -> str:
        return repr(self._value)

    def objects_of_the_user(self) -> list[tuple[str, Any]]:
        """Return the value, for a walk over the state that the function reaches."""
        return [("", self._value)]


@dataclasses.dataclass(frozen=True)
class Signature:
    """The arguments of a call without the values of its arrays. Equal signatures share a traced function."""

    tree: Any
    keys: tuple[Any, ...]  # a hashable key for each static leaf, `ARRAY` for each array
    types: tuple[tuple[tuple[int, ...], np.dtype], ...]  # the shape and dtype of each array
    statics: tuple[Any, ...] = dataclasses.field(compare=False)  # the static leaves themselves, `ARRAY` for each array
    tree_key: Any  # differs for trees whose static parts are equal but not the same, such as 1 and True


def flatten_arguments(
    fn: Callable, name: str, args: tuple, kwargs: dict[str, Any]
) -> tuple[list[jax.Array], Signature]:
    """Split the arguments of a function into arrays (traced) and everything else (static).

    Raises:
        ArgumentError: a leaf is neither an array nor hashable.
    """
    args, kwargs, leaves, tree = flattened_arguments(args, kwargs)
    arrays: list[jax.Array] = []
    keys: list[Any] = []
    statics: list[Any] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array | np.ndarray | np.generic | torch.Tensor) or _is_number_of_jax(leaf):
            arrays.append(_leaf_as_array(leaf, lambda p=position: _leaf_name(fn, name, args, kwargs, p)))
            keys.append(ARRAY)
            statics.append(ARRAY)
        elif isinstance(leaf, Fixed):  # state of the function
            keys.append(Fixed)
            statics.append(leaf)
        else:
            keys.append(_static_leaf_key(leaf, lambda p=position: _leaf_name(fn, name, args, kwargs, p)))
            statics.append(leaf)
    types = tuple((tuple(x.shape), x.dtype) for x in arrays)
    return arrays, Signature(tree, tuple(keys), types, tuple(statics), structure_key(tree))


def flattened_arguments(args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any, list[Any], Any]:
    """Return the arguments with their dicts in insertion order, their leaves, and their pytree.

    Containers of torch and of other libraries are registered with JAX.
    """
    found = _flattened(args, kwargs)
    while any(_is_container(leaf) and register_node(leaf) for leaf in found[2]):
        found = _flattened(args, kwargs)
    return found


def _flattened(args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any, list[Any], Any]:
    args, kwargs = in_order((args, kwargs))
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
    return args, kwargs, leaves, tree


def rebuild_call(fn: Callable, signature: Signature) -> Callable[..., Any]:
    """Return `fn` as a function of the array arguments of its signature only."""
    positions = [i for i, key in enumerate(signature.keys) if key is ARRAY]
    if signature.tree == jax.tree_util.tree_structure(((0,) * len(positions), {})):
        return fn  # plain positional arrays
    statics, tree = signature.statics, signature.tree

    def call(*tensors: torch.Tensor) -> Any:
        args, kwargs = tree.unflatten(replaced(statics, positions, tensors))
        return fn(*args, **kwargs)

    return call


def argument_names(fn: Callable, signature: Signature) -> tuple[str, ...]:
    """Return a name for each array argument, such as ``x`` or ``params['w']``."""
    parameters = parameter_names(fn)
    paths = zip(leaf_paths(signature.tree), signature.keys, strict=True)
    return tuple(_path_name(path, parameters) for path, key in paths if key is ARRAY)


def static_arguments(fn: Callable, signature: Signature) -> list[tuple[str, Any]]:
    """Return the static arguments, each with its name."""
    parameters = parameter_names(fn)
    paths = zip(leaf_paths(signature.tree), signature.statics, strict=True)
    return [(_path_name(path, parameters), value) for path, value in paths if value is not ARRAY]


def static_name(fn: Callable, signature: Signature, position: int) -> str:
    """Return a name for the argument leaf at a position."""
    return _path_name(leaf_paths(signature.tree)[position], parameter_names(fn))


def _path_name(path: Sequence[Any], parameters: Sequence[str]) -> str:
    _, first, *rest = path
    if isinstance(first, jax.tree_util.SequenceKey):
        root = parameters[first.idx] if first.idx < len(parameters) else f"argument {first.idx}"
    else:
        root = str(first.key)
    return f"{root}{jax.tree_util.keystr(tuple(rest))}"


def parameters_of(fn: Callable) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a callable by name; None if it has no signature, as torch's built-in functions."""
    try:
        return inspect.signature(fn).parameters
    except Exception:  # noqa: BLE001  (Python compares the callable and reads its attributes, by code of the user)
        return None


def parameter_names(fn: Callable) -> list[str]:
    """Return the names of the positional parameters of a function."""
    parameters = (parameters_of(fn) or {}).values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _leaf_name(fn: Callable, name: str, args: tuple, kwargs: dict[str, Any], position: int) -> str:
    path = jax.tree_util.tree_flatten_with_path((args, kwargs))[0][position][0]
    return f"argument `{_path_name(path, parameter_names(fn))}` of `{name}`"


def _leaf_as_array(leaf: Any, describe: Callable[[], str]) -> jax.Array:
    if isinstance(leaf, jax.Array):
        return leaf
    if current_context() is Context.EAGER:
        return _converted_leaf(leaf, describe)
    with jax.ensure_compile_time_eval():  # a constant of the trace, so that its value is known there
        return _converted_leaf(leaf, describe)


def _converted_leaf(leaf: Any, describe: Callable[[], str]) -> jax.Array:
    if isinstance(leaf, torch.Tensor):
        if innermost(leaf) is not leaf:
            raise ArgumentError(
                f"{describe()} is a tensor of a transformation of `torch.func`, but a wrapped function is a JAX one. "
                "Transform it by JAX (`jax.vmap`, `jax.grad`), or call its `.function`, the torch function."
            )
        return tensor_to_jax(leaf, copy=True, describe=describe)
    if leaf.dtype.kind in "OUSMm" or leaf.dtype.names is not None:
        raise ArgumentError(
            f"{describe()} is a NumPy array of dtype `{leaf.dtype}`, which is not a number. "
            "Pass numbers, or close over it instead of passing it."
        )
    if leaf.dtype.char in "gG":  # long double
        raise DTypeError(
            f"{describe()} is a NumPy array of dtype `{leaf.dtype}`, which neither JAX nor torch has. Convert it with "
            f"`x.astype({'complex' if leaf.dtype.kind == 'c' else 'float'})`."
        )
    if not leaf.dtype.isnative:
        raise DTypeError(
            f"{describe()} is a NumPy array of dtype `{leaf.dtype!r}`, in a foreign byte order that neither JAX nor "
            "torch has. Convert it with `x.astype(x.dtype.newbyteorder('='))`."
        )
    return jnp.asarray(leaf)


def _is_number_of_jax(leaf: Any) -> bool:
    """Return whether a Python number has a dtype. JAX passes such numbers in place of arrays to `custom_jvp` rules."""
    return isinstance(leaf, int | float | complex) and hasattr(leaf, "dtype")


def _is_container(leaf: Any) -> bool:
    """Return whether a leaf may be a container that JAX does not know yet.

    A dataclass counts if it holds arrays or cannot be hashed. For an object of any other class, `register_node`
    decides.
    """
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | torch.Tensor | torch.nn.Module | Fixed | type):
        return False
    if not dataclasses.is_dataclass(leaf):
        return True  # unknown; `register_node` decides later
    values = jax.tree_util.tree_leaves([getattr(leaf, f.name, None) for f in dataclasses.fields(leaf)])
    holds_arrays = any(isinstance(v, jax.Array | np.ndarray | torch.Tensor) for v in values)
    return holds_arrays or type(leaf).__hash__ is None


def _static_leaf_key(leaf: Any, describe: Callable[[], str]) -> Any:
    """Return a hashable key that differs between 1, 1.0 and True, and between 0.0 and -0.0."""
    try:
        return static_key(leaf)
    except TypeError:
        if isinstance(leaf, jax.Ref):
            raise ArgumentError(f"{describe()} is a JAX reference. Pass its value: `ref[...]`.") from None
        raise ArgumentError(
            f"{describe()} is {kind_of(leaf)}, which is neither an array nor hashable. Pass arrays in tuples, "
            "lists, dicts or other pytrees, and static values as hashable ones; or close over it."
        ) from None
