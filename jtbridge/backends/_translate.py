"""The two backends that translate the ATen graph to JAX operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import mlir

from jtbridge._flat import ArrayType, TorchFunction
from jtbridge.errors import BackendError
from jtbridge.translate import jax_semantics, refusal, translate


class XlaBackend:
    """ATen operators as JAX operations."""

    name = "xla"
    way = "translate"

    def unavailable(self, platform: str) -> str | None:
        del platform
        return None

    def refuses(self, fn: TorchFunction) -> str | None:
        return refusal(fn)

    def lower(self, ctx: mlir.LoweringRuleContext, fn: TorchFunction, operands: Sequence[Any]) -> Sequence[Any]:
        run = jaxpr_as_fun(translate(fn))
        # Inside shard_map the types here say over which mesh axes values vary, and the program's constants do not.
        inside = ctx.replace(avals_in=_plain(fn.in_types), avals_out=_plain(fn.out_types))
        with jax_semantics():
            return mlir.lower_fun(run, multiple_results=True)(inside, *operands)

    def call(self, fn: TorchFunction, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        raise AssertionError("a translated function is compiled, not called")


def _plain(types: Sequence[ArrayType]) -> list[ShapedArray]:
    return [ShapedArray(type_.shape, type_.dtype) for type_ in types]


class TritonBackend:
    """As `xla`, with hot operators as Triton kernels. Not built yet."""

    name = "triton"
    way = "translate"

    def unavailable(self, platform: str) -> str | None:
        del platform
        return "not built yet"

    def refuses(self, fn: TorchFunction) -> str | None:
        return self.unavailable("")

    def lower(self, ctx: mlir.LoweringRuleContext, fn: TorchFunction, operands: Sequence[Any]) -> Sequence[Any]:
        raise BackendError(f"Backend `{self.name}` is not built yet.")

    def call(self, fn: TorchFunction, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        raise BackendError(f"Backend `{self.name}` is not built yet.")
