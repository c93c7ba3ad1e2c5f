"""The two backends that translate the ATen graph to JAX operations. They are named, but not built yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import mlir

from jtbridge._flat import TorchFunction
from jtbridge.errors import BackendError


class _NotBuilt:
    name: str
    way = "translate"

    def unavailable(self, platform: str) -> str | None:
        del platform
        return "not built yet"

    def lower(self, ctx: mlir.LoweringRuleContext, fn: TorchFunction, operands: Sequence[Any]) -> Sequence[Any]:
        del ctx, fn, operands
        raise BackendError(f"Backend `{self.name}` is not built yet.")

    def call(self, fn: TorchFunction, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        del fn, arrays
        raise BackendError(f"Backend `{self.name}` is not built yet.")


class XlaBackend(_NotBuilt):
    """ATen operators as JAX operations."""

    name = "xla"


class TritonBackend(_NotBuilt):
    """As `xla`, with hot operators as Triton kernels."""

    name = "triton"
