"""The interface of a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax.interpreters import mlir

from jtbridge._functions import TorchFunction


class Backend(Protocol):
    """A way to run a torch function inside a JAX program. A new backend is a file and an entry in `_registry.py`."""

    name: str
    kind: str

    def unavailable_reason(self, platform: str) -> str | None:
        """Return why the backend cannot run on an XLA platform ("cpu", "cuda", ...); None if it can."""
        ...

    def unsupported_reason(self, fn: TorchFunction) -> str | None:
        """Return why the backend cannot run a function; None if it can."""
        ...

    def lower(self, ctx: mlir.LoweringRuleContext, fn: TorchFunction, operands: Sequence[Any]) -> Sequence[Any]:
        """Emit the operations that run `fn`."""
        ...

    def call(self, fn: TorchFunction, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Run `fn` now on concrete CPU arrays. Exceptions of `fn` are raised unchanged."""
        ...
