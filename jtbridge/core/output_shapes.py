"""The types of results that a user declares with ``output_shapes=``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from jtbridge.errors import OutputMismatchError, ShapeInferenceError

from .array_types import ArrayType
from .dtypes import canonical_dtype, numpy_dtype
from .pytree import flatten_output


def check_declared(declared: Sequence[ArrayType], found: Sequence[ArrayType], name: str) -> None:
    """Raise if the types of a function's results differ from the types that `output_shapes` declares.

    Raises:
        OutputMismatchError: the declared types differ from the types of the results.
    """
    if tuple(declared) != tuple(found):
        raise wrong_declaration(name, declared, found)


def wrong_declaration(name: str, declared: Sequence[ArrayType], found: Sequence[ArrayType]) -> OutputMismatchError:
    """Return the error for a declaration that differs from the results of the function."""
    return OutputMismatchError(
        f"`output_shapes` of `{name}` declares {_show(declared)}, but for these arguments it returns {_show(found)}. "
        "Leave `output_shapes` out, or correct it."
    )


def declared_types(output_shapes: Any) -> tuple[tuple[ArrayType, ...], Any]:
    """Return the types that `output_shapes` declares, and their pytree structure.

    Raises:
        ShapeInferenceError: a leaf has no shape and dtype.
    """
    leaves, tree = flatten_output(output_shapes)
    types = []
    for leaf in leaves:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ShapeInferenceError(
                f"`output_shapes` must be a tree of `jax.ShapeDtypeStruct` (or arrays), but holds {leaf!r}."
            )
        of_torch = isinstance(leaf.dtype, torch.dtype)
        dtype = numpy_dtype(leaf.dtype, "A result of `output_shapes`") if of_torch else leaf.dtype
        types.append(ArrayType(tuple(leaf.shape), canonical_dtype(dtype)))
    return tuple(types), tree


def _show(types: Sequence[ArrayType]) -> str:
    return "(" + ", ".join(f"{t.dtype}{list(t.shape)}" for t in types) + ")"
