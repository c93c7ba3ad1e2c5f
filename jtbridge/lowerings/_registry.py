"""The table of lowerings: for each ATen or custom operator, a function that computes it in JAX."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch import fx

from jtbridge._compat import OpOverload, qualified_operator_name
from jtbridge.errors import LoweringError

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Lowering:
    """How an operator is computed in JAX, and what its function takes besides the operator's arguments."""

    function: Function
    node: bool = False
    key: bool = False
    own: bool = True  # jtbridge's, not a user's

    def __call__(self, *args: Any, node: fx.Node, key: Callable[[], jax.Array], **kwargs: Any) -> Any:
        if self.node:
            kwargs["node"] = node
        if self.key:
            kwargs["key"] = key
        return self.function(*args, **kwargs)


_TABLE: dict[str, Lowering] = {}

# One file per family. They are imported when the first graph is translated.
_FAMILIES = (
    "activation",
    "adaptive_pooling",
    "arithmetic",
    "attention",
    "batch_norm",
    "bitcast",
    "class_loss",
    "comparison",
    "complex",
    "conversion",
    "convolution",
    "ctc",
    "cumulative",
    "diagonal",
    "distance",
    "embedding",
    "embedding_bag",
    "exponential",
    "extrema",
    "factorization",
    "factory",
    "fft",
    "grid_sampler",
    "histogram",
    "indexing",
    "launch",
    "ldl",
    "linear_cross_entropy",
    "loss",
    "matmul",
    "normalization",
    "order_statistics",
    "padding",
    "polynomials",
    "pooling",
    "random",
    "recurrent",
    "reduction",
    "resize",
    "rounding",
    "scatter",
    "segment",
    "selection",
    "shape",
    "slicing",
    "softmax",
    "solve",
    "sorting",
    "special",
    "special_bessel",
    "spectral",
    "strided",
    "trigonometric",
    "windows",
)


def lowers(*names: str, node: bool = False, key: bool = False) -> Callable[[Function], Function]:
    """Register the lowering of some ATen overloads, such as ``"sin"`` (its default overload) or ``"add.Tensor"``.

    A lowering takes the operator's arguments by its ATen schema, with JAX arrays for tensors, and returns an array,
    or a tuple of them for several results. It is only ever evaluated, or batched by `jax.vmap`, and never
    differentiated: gradients are graphs of their own, written by torch's autograd. 64-bit types are enabled, and the
    result must have the shape and dtype that torch's has, which is checked.

    Args:
        names: overloads; without a namespace they are ATen's.
        node: pass the graph node as ``node=``, for what depends on more than the values of arrays.
        key: pass ``key=``, a function without arguments that gives the JAX key of this draw.
    """

    def register(function: Function) -> Function:
        for name in names:
            qualified = name if "::" in name else f"aten::{name}"
            if qualified in _TABLE:
                raise LoweringError(f"`{qualified}` has a lowering already: {_TABLE[qualified].function.__qualname__}.")
            _TABLE[qualified] = Lowering(function, node, key)
        return function

    return register


def find(operator: OpOverload) -> Lowering | None:
    """The lowering of an operator, if it has one."""
    load()
    return _TABLE.get(operator.name())


@functools.cache
def load() -> None:
    """Import every family."""
    for family in _FAMILIES:
        importlib.import_module(f"jtbridge.lowerings.{family}")


def register_lowering(operator: Any) -> Callable[[Function], Function]:
    """Say how an operator of yours is computed in JAX, so that functions that use it can be translated.

    The lowering takes the operator's arguments by its schema, with JAX arrays for tensors, and returns an array (or
    a tuple of them, for several results) of the shape and dtype that the operator's fake implementation
    (``register_fake``) gives, with 64-bit types enabled. It need not be differentiable: gradients are torch's, so give
    the operator ``register_autograd``, and register lowerings for the operators its backward calls.

    Args:
        operator: an overload such as ``torch.ops.mylib.scale.default``, a ``torch.ops.mylib.scale`` with just one,
            what ``torch.library.custom_op`` returns, or a name such as ``"mylib::scale"``.

    Returns:
        A decorator that registers a function and returns it.

    Raises:
        LoweringError: there is no such operator, or it has a lowering already.

    Example:
        >>> import jax.numpy as jnp, jtbridge, torch
        >>> @torch.library.custom_op("readme::scale", mutates_args=())
        ... def scale(x: torch.Tensor, by: float) -> torch.Tensor:
        ...     return x * by
        >>> @scale.register_fake
        ... def _(x, by):
        ...     return torch.empty_like(x)
        >>> @jtbridge.register_lowering(torch.ops.readme.scale.default)
        ... def scale_in_jax(x, by):
        ...     return x * by
        >>> jtbridge.wrap(scale, backend="xla")(jnp.arange(3.0), 2.0)
        Array([0., 2., 4.], dtype=float32)
    """
    key = _overload(operator).name()

    def register(function: Function) -> Function:
        load()
        if key in _TABLE:
            known = _TABLE[key]
            whose = "jtbridge's own" if known.own else f"`{known.function.__qualname__}`"
            raise LoweringError(f"`{key}` has a lowering already, {whose}. An operator has one lowering.")
        if not callable(function):
            raise LoweringError(f"The lowering of `{key}` must be a function, but it is a {type(function).__name__}.")
        _TABLE[key] = Lowering(function, own=False)
        return function

    return register


def _overload(operator: Any) -> OpOverload:
    if isinstance(operator, OpOverload):
        return operator
    name = operator if isinstance(operator, str) else qualified_operator_name(operator)
    if not isinstance(name, str) or "::" not in name:
        raise LoweringError(
            f"`register_lowering` takes an operator such as `torch.ops.mylib.myop.default` or its name "
            f'"mylib::myop", but got {operator!r}.'
        )
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if packet is None:
        raise LoweringError(f"There is no operator `{name}`. Define it first (`torch.library.custom_op`).")
    known = packet.overloads()
    if overload or len(known) == 1:
        overload = overload or known[0]
        if overload in known:
            return getattr(packet, overload)
    choices = ", ".join(f"{namespace}::{base}.{known_name}" for known_name in known)
    raise LoweringError(f"`{name}` does not name one overload. Name one of: {choices}.")
