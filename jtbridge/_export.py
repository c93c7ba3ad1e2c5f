"""Programs that are saved and run without torch: :func:`jtbridge.export`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import numpy as np
import torch

from ._backends import portable
from .calls._config import config
from .calls._wrap import Wrapped, wrap
from .core.convert import to_jax
from .errors import ArgumentError, EffectsError


def export(fn: Any, *args: Any, platforms: Sequence[str] | None = None, **kwargs: Any) -> jax.export.Exported:
    """Translate a function into a program that can be saved, and run later without torch.

    Closed-over weights become part of the program. The program contains no derivative; for a derivative, export
    ``jax.grad(f)``.

    Args:
        fn: a wrapped function, a torch module, or a JAX function that calls wrapped functions.
        args, kwargs: the arguments of a call. Only the shape and dtype of an array are used, so a
            ``jax.ShapeDtypeStruct`` is enough. For a single wrapped function of arrays the sizes may be symbols
            (``jax.export.symbolic_shape("b, 16")``); the program then runs with any size that their constraints allow.
            Static arguments must be keywords, and their values are fixed in the program.
        platforms: the XLA platforms to lower for, such as ``("cpu", "cuda", "tpu")``; by default JAX's default
            platform.

    Returns:
        A `jax.export.Exported` that takes the arrays: ``.call(*arrays)`` runs it, ``.serialize()`` turns it into bytes
        for ``jax.export.deserialize``.

    Raises:
        TranslationError: an operator has no lowering, or the function works only for some of the symbolic sizes.
        ArgumentError: a positional argument is static, `fn` is a torch function that is not wrapped, or `platforms` is
            one string.
        EffectsError: `fn` is a wrapped function with ordered effects.

    Example:
        >>> import jax, jax.numpy as jnp, jtbridge, torch
        >>> f = jtbridge.wrap(lambda x: torch.softmax(x, -1).sum(0))
        >>> shape = jax.export.symbolic_shape("b, 3")
        >>> data = jtbridge.export(f, jax.ShapeDtypeStruct(shape, jnp.float32)).serialize()
        >>> jax.export.deserialize(data).call(jnp.zeros((6, 3)))
        Array([2., 2., 2.], dtype=float32)

    Source: https://docs.jax.dev/en/latest/export/export.html
    """
    if isinstance(platforms, str):
        raise ArgumentError(f"`platforms` is {platforms!r}, expected a sequence such as `({platforms!r},)`.")
    if isinstance(fn, Wrapped) and fn.ordered:
        raise EffectsError(
            f'{fn!r} has effects="ordered", whose side effects need torch in each call, and an exported program runs '
            "without torch. Export the part without side effects by itself."
        )
    statics = {name: value for name, value in kwargs.items() if not _is_array_tree(value)}
    arrays = {name: value for name, value in kwargs.items() if name not in statics}
    for position, value in enumerate(args):
        if not _is_array_tree(value):
            raise ArgumentError(
                f"Argument {position} holds {type(value).__name__} `{value!r}`, which is static. Pass it as a keyword, "
                "or fix it with `functools.partial`."
            )

    function = wrap(fn) if isinstance(fn, torch.nn.Module) else fn

    def run(*args: Any, **arrays: Any) -> Any:
        try:
            return function(*args, **arrays, **statics)
        except TypeError as error:
            if "must be Tensor, not" not in str(error):
                raise
            raise ArgumentError(
                f"`{getattr(fn, '__name__', type(fn).__name__)}` passed a JAX array to torch. `export` takes a wrapped "
                "function, or a JAX function that calls wrapped functions: `jtbridge.export(jtbridge.wrap(f), ...)`."
            ) from error

    specs = jax.tree.map(_spec, (args, arrays))
    with config(backend=portable().name, islands="never"):
        return jax.export.export(jax.jit(run), platforms=platforms)(*specs[0], **specs[1])


def _is_array_tree(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return all(isinstance(x, jax.Array | np.ndarray | np.generic | torch.Tensor | jax.ShapeDtypeStruct) for x in leaves)


def _spec(leaf: Any) -> jax.ShapeDtypeStruct:
    leaf = to_jax(leaf) if isinstance(leaf, torch.Tensor) else leaf
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype)
