"""The base class of backends."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import mlir

from jtbridge.core.functions import TorchFunction


class Backend(abc.ABC):
    """A way to run a torch function inside a JAX program.

    A new backend is one file of this folder. Its name begins with no underscore, and its tuple `BACKENDS` has an
    instance of the backend.

    Attributes:
        name: the value of ``backend=`` that selects the backend.
        kind: "translate" (the ATen graph becomes JAX operations) or "call" (torch runs inside the program).
        preference: a number; ``backend="auto"`` chooses the usable backend with the smallest number.
        uses_kernels: whether the programs of this backend contain Triton kernels.
        on_host: whether functions run on the CPU, whatever the platform of the program.
    """

    name: str
    kind: str
    preference: int
    uses_kernels: bool
    on_host: bool = False

    def unavailable_reason(self, platform: str) -> str | None:
        """Return why the backend cannot run on an XLA platform ("cpu", "cuda", ...); None if it can."""
        del platform
        return None

    def unpreferred_reason(self, platform: str) -> str | None:
        """Return why ``backend="auto"`` skips the backend on a platform where it can run; None if it does not."""
        del platform
        return None

    def for_auto(self) -> Backend:
        """Return the backend to use where ``backend="auto"`` chose this one: itself, unless a subclass overrides it."""
        return self

    def unsupported_reason(self, fn: TorchFunction) -> str | None:
        """Return why the backend cannot run a function; None if it can."""
        del fn
        return None

    @abc.abstractmethod
    def lower(self, ctx: mlir.LoweringRuleContext, fn: TorchFunction, operands: Sequence[Any]) -> Sequence[Any]:
        """Emit the operations that run `fn`."""

    @abc.abstractmethod
    def call(self, fn: TorchFunction, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Run `fn` now on concrete CPU arrays. Exceptions of `fn` are raised unchanged."""


def has_assumed_empty_results(fn: TorchFunction) -> bool:
    """Return whether a result of a function that cannot be traced, or of its derivative, is assumed to be empty.

    XLA drops a call if only results without elements are used. The call of such a function must happen, so that its
    results are checked.
    """
    return fn.base.traits.untraceable_reason is not None and any(0 in type_.shape for type_ in fn.out_types)
