"""The registry of lowerings: for each ATen or custom operator, a function that computes it in JAX."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch import fx

from jtbridge._compat import OpOverload, qualified_operator_name
from jtbridge.core.imports import run_imports
from jtbridge.core.messages import kind_of
from jtbridge.errors import LoweringError

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Lowering:
    """A JAX function that computes an operator, and whether the function takes the graph node and a random key."""

    function: Function
    node: bool
    key: bool

    def __call__(self, *args: Any, node: fx.Node, key: Callable[[], jax.Array], **kwargs: Any) -> Any:
        if self.node:
            kwargs["node"] = node
        if self.key:
            kwargs["key"] = key
        return self.function(*args, **kwargs)

    @property
    def is_own(self) -> bool:
        """Return whether the lowering is part of jtbridge."""
        return _is_own(self.function)


_LOWERINGS: dict[str, Lowering] = {}
_KERNELS: dict[str, Lowering] = {}


def register_lowering(
    *operators: Any, node: bool = False, key: bool = False, kernel: bool = False
) -> Callable[[Function], Function]:
    """Register a JAX function that computes one or more operators, so that functions that call them can be translated.

    The lowering takes the operator's arguments as its schema declares them, with JAX arrays for tensors. It returns an
    array (or a tuple of arrays, for several results) of the shape and dtype that the operator's fake implementation
    (``register_fake``) gives. It runs with 64-bit types enabled. JAX evaluates the lowering and batches it with
    ``jax.vmap``, but never differentiates it: torch computes the gradients. For gradients, give the operator an
    autograd formula (``register_autograd``) and register lowerings for the operators that its backward calls.

    Args:
        operators: overloads such as ``torch.ops.mylib.scale.default``, an operator such as ``torch.ops.mylib.scale``
            with just one overload, the result of ``torch.library.custom_op``, or names such as ``"mylib::scale"`` or
            ``"add.Tensor"``. Names without a namespace are ATen's.
        node: pass the graph node as the keyword argument ``node``. ``node.meta["val"]`` holds the results' shapes and
            dtypes, ``node.args`` the nodes of the arguments.
        key: pass a function as the keyword argument ``key``. It takes no arguments and returns the JAX random key of
            this call. The operator must have the tag ``torch.Tag.nondeterministic_seeded``.
        kernel: register the function as a kernel, which the backend "triton" prefers to the lowering. The function
            returns ``NotImplemented`` for arguments that its kernel does not support.

    Returns:
        A decorator that registers a function and returns it.

    Raises:
        LoweringError: no operator is given; an operator does not exist or already has a lowering; a name does not
            denote exactly one overload; the lowering is not callable, or takes a key and the operator lacks the tag.

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
    if not operators:
        raise LoweringError("`register_lowering` takes the operators to lower, such as `torch.ops.lib.scale.default`.")
    names = [_qualified_name(operator) for operator in operators]
    table = _KERNELS if kernel else _LOWERINGS

    def register(function: Function) -> Function:
        if not callable(function):
            raise LoweringError(f"The lowering of `{names[0]}` must be a function, but it is {kind_of(function)}.")
        if not _is_own(function):
            load_lowerings()
            for name, operator in zip(names, operators, strict=True):
                overload = _overload(name if _is_unchecked(operator) else operator)
                if key and torch.Tag.nondeterministic_seeded not in overload.tags:
                    raise LoweringError(
                        f"The lowering of `{name}` takes a random key, but the operator is not tagged as random. "
                        "Define it with `tags=[torch.Tag.nondeterministic_seeded]`."
                    )
        for name in names:
            if name in table:
                owner = "jtbridge's own" if table[name].is_own else f"`{table[name].function.__qualname__}`"
                raise LoweringError(f"`{name}` has a lowering already, {owner}. An operator has one lowering.")
            table[name] = Lowering(function, node, key)
        return function

    return register


def find(operator: OpOverload) -> Lowering | None:
    """Return the lowering of an operator, or None if no lowering is registered."""
    load_lowerings()
    return _LOWERINGS.get(operator.name())


def find_kernel(operator: OpOverload) -> Lowering | None:
    """Return the function that computes an operator with a kernel, or None if no kernel is registered."""
    load_kernels()
    return _KERNELS.get(operator.name())


@functools.cache
def load_lowerings() -> None:
    """Import the modules of all areas, which register their lowerings."""
    run_imports(lambda: _import_all("jtbridge.lowerings", lambda name: True))


@functools.cache
def load_kernels() -> None:
    """Import the module `lowering` of each kernel's folder."""
    run_imports(lambda: _import_all("jtbridge.kernels", lambda name: name == "lowering"))


def _import_all(package: str, chosen: Callable[[str], bool]) -> None:
    for area in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if area.ispkg:
            folder = importlib.import_module(f"{package}.{area.name}")
            for module in pkgutil.iter_modules(folder.__path__):
                if not module.name.startswith("_") and chosen(module.name):
                    importlib.import_module(f"{package}.{area.name}.{module.name}")


def _is_own(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "jtbridge"


# In these namespaces, `_qualified_name` accepts a name without looking up the operator: some versions of torch may not
# have it, or its module may be slow to import.
_UNCHECKED = ("prims", "torch_nn", "flex_lib", "jtbridge")


def _is_unchecked(operator: Any) -> bool:
    """Return whether `operator` is a name that is not looked up: without a namespace, or with one of `_UNCHECKED`."""
    return isinstance(operator, str) and ("::" not in operator or operator.partition("::")[0] in _UNCHECKED)


def _qualified_name(operator: Any) -> str:
    """Return the qualified name of an overload, such as `aten::add.Tensor`, or `aten::relu` for a default overload."""
    if _is_unchecked(operator):
        return operator if "::" in operator else f"aten::{operator}"
    return _overload(operator).name()


def _overload(operator: Any) -> OpOverload:
    """Return the one overload that an operator or its name denotes; raise an error if there are none or several."""
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
