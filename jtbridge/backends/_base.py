"""What every backend has, and the reasons it gives when it cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax.interpreters import mlir

from jtbridge._functions import TorchFunction


class Backend(Protocol):
    """A way to run a torch function inside a JAX program. Adding one touches `_registry.py` alone."""

    name: str
    kind: str

    def unavailable_reason(self, platform: str) -> str | None:
        """Why it cannot run on an XLA platform ("cpu", "cuda", ...); None if it can."""
        ...

    def unsupported_reason(self, fn: TorchFunction) -> str | None:
        """Why it cannot run this function; None if it can."""
        ...

    def lower(self, ctx: mlir.LoweringRuleContext, fn: TorchFunction, operands: Sequence[Any]) -> Sequence[Any]:
        """Emit the operations that run `fn`."""
        ...

    def call(self, fn: TorchFunction, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Run `fn` now on concrete CPU arrays; its exceptions are raised as they are."""
        ...
