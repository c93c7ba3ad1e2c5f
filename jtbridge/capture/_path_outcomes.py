"""The outcomes of several paths through one function, and the result types that they have in common."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import torch

from jtbridge.core.array_types import ArrayType
from jtbridge.core.pytree import leaf_paths
from jtbridge.core.traits import FunctionTraits
from jtbridge.errors import DataDependentShapeError


@dataclasses.dataclass(frozen=True)
class DependentTensor:
    """A tensor with sizes that depend on data: each size is a number, or a predicate for messages ("is 2 or 3 ...")."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class PathOutcome:
    """The result of one trace or run of a function, and its traits. Of result tensors, only the types are used."""

    leaves: Sequence[Any]
    tree: Any
    traits: FunctionTraits
    order: Any = None  # the order of the keys of dicts in the result, see `key_order`


def agreed(name: str, outcomes: Sequence[PathOutcome], *, declared: bool) -> PathOutcome:
    """Return the one outcome that several outcomes have in common.

    Args:
        name: of the function, for messages.
        outcomes: of several paths through the function.
        declared: whether the user declares the output shapes. If so, sizes that depend on data are marked by a
            :class:`DependentTensor`.

    Raises:
        DataDependentShapeError: the tree or an undeclared shape of the results depends on data.
    """
    first = outcomes[0]
    other = next((outcome.tree for outcome in outcomes if outcome.tree != first.tree), None)
    if other is not None:
        raise DataDependentShapeError(
            f"`{name}` returns {_tree_difference(first.tree, other)}, and a JAX program needs one tree of results. "
            "Return the same containers for all values of the arguments."
        )
    leaves = [_common(column) for column in zip(*(outcome.leaves for outcome in outcomes), strict=True)]
    if not declared:
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, DependentTensor):
                _refuse_dependent_shape(name, _path(first.tree, position), leaf)
    return PathOutcome(leaves, first.tree, _merged([outcome.traits for outcome in outcomes]), first.order)


def are_possible(declared: Sequence[ArrayType], found: Sequence[ArrayType]) -> bool:
    """Return whether the declared types agree with the found types, except in sizes that depend on data."""
    return len(declared) == len(found) and all(
        ours.dtype == theirs.dtype
        and len(ours.shape) == len(theirs.shape)
        and all(isinstance(b, str) or a == b for a, b in zip(ours.shape, theirs.shape, strict=True))
        for ours, theirs in zip(declared, found, strict=True)
    )


def without_empty_sizes(leaf: Any) -> Any:
    """Return a result of a run on example arguments, with sizes of 0 marked: other arguments may give other sizes."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.numel():
        return leaf
    return DependentTensor(tuple(size or "is 0 for example arguments" for size in leaf.shape), leaf.dtype)


def _common(column: Sequence[Any]) -> Any:
    """Return the common type of the leaves at one position of several results, with sizes that differ marked."""
    first = column[0]
    if not all(isinstance(leaf, torch.Tensor | DependentTensor) for leaf in column):
        return first
    if any(isinstance(leaf, torch.Tensor) and leaf.is_nested for leaf in column):  # no sizes: refused later
        return first
    shapes = [tuple(leaf.shape) for leaf in column]
    if any(leaf.dtype != first.dtype for leaf in column) or any(len(shape) != len(shapes[0]) for shape in shapes):
        return first  # at run time, a call that returns another dtype or rank raises
    shape = tuple(map(_common_size, zip(*shapes, strict=True)))
    return DependentTensor(shape, first.dtype) if any(isinstance(size, str) for size in shape) else first


def _common_size(sizes: Sequence[int | str]) -> int | str:
    unknown = next((size for size in sizes if isinstance(size, str)), None)
    if unknown is not None:
        return unknown
    found = sorted(set(sizes))  # type: ignore[type-var]
    return found[0] if len(found) == 1 else f"is {' or '.join(map(str, found))} for different values"


def _refuse_dependent_shape(name: str, path: str, leaf: DependentTensor) -> NoReturn:
    axis, size = next((axis, size) for axis, size in enumerate(leaf.shape) if isinstance(size, str))
    raise DataDependentShapeError(
        f"The shape of {path} of `{name}` depends on the values of its arguments: the size of axis {axis} {size}. "
        "A JAX program needs it before it runs. Return an array of a fixed size, such as "
        "`torch.where(mask, x, 0)` instead of `x[mask]`; or call it outside of `jax.jit`; or pass `output_shapes=` if "
        "you know the shape. If an integer argument gives a size, close over it, so that its value is known when JAX "
        "traces."
    )


def _tree_difference(tree: Any, other: Any) -> str:
    """Name the leaves that only one of two trees has, or both trees if only their containers differ."""
    names = [{f"`result{jax.tree_util.keystr(path)}`": None for path in leaf_paths(each)} for each in (tree, other)]
    alone = [name for name in (*names[0], *names[1]) if not (name in names[0] and name in names[1])]
    if not alone:
        return f"{tree} or {other} for different values"
    return f"{', '.join(alone[:3])}{', ...' * (len(alone) > 3)} for some values only"


def _path(tree: Any, position: int) -> str:
    """Return the name of a result for messages: ``the result``, or ``result['a'][1]`` within a tree."""
    keys = jax.tree_util.keystr(leaf_paths(tree)[position])
    return f"`result{keys}`" if keys else "the result"


def _merged(found: Sequence[Any]) -> Any:
    """Merge the traits of several paths through a function. Calls itself for fields that are dataclasses."""
    first = found[0]
    merged = {}
    for field in dataclasses.fields(first):
        values = [getattr(each, field.name) for each in found]
        if dataclasses.is_dataclass(values[0]):
            merged[field.name] = _merged(values)
        elif isinstance(values[0], tuple):
            merged[field.name] = functools.reduce(lambda a, b: (*a, *(x for x in b if x not in a)), values)
        elif field.name == "operators":
            merged[field.name] = max(values)
        else:
            merged[field.name] = next(filter(None, values), values[0])
    return dataclasses.replace(first, **merged)
