"""The two backends that translate the ATen graph to JAX operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.interpreters import mlir

from jtbridge.core.array_types import ArrayType
from jtbridge.core.functions import TorchFunction
from jtbridge.core.gpu_memory import GPU_PLATFORMS
from jtbridge.translate import lower_program, precision, translate, untranslatable_reason
from jtbridge.triton import unsupported_reason as triton_unsupported_reason

from ._base import Backend


class XlaBackend(Backend):
    """The backend that translates ATen operators to JAX operations."""

    name = "xla"
    kind = "translate"
    preference = 20
    uses_kernels = False

    def unsupported_reason(self, fn: TorchFunction) -> str | None:
        return untranslatable_reason(fn)

    def lower(self, ctx: mlir.LoweringRuleContext, fn: TorchFunction, operands: Sequence[Any]) -> Sequence[Any]:
        # Inside shard_map the types in `ctx` hold the mesh axes over which values vary. The program's types do not.
        inside = ctx.replace(avals_in=_avals(fn.in_types), avals_out=_avals(fn.out_types))
        program = translate(fn, kernels=self.used_kernels())
        return lower_program(inside, program, operands, matmul_precision=precision(fn.base))

    def used_kernels(self) -> bool | frozenset[str]:
        """Return whether translations may use kernels, or the names of the kernels that they may use."""
        return self.uses_kernels

    def call(self, fn: TorchFunction, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        raise AssertionError("a translated function is compiled, not called")


class TritonBackend(XlaBackend):
    """The backend `xla`, but with Triton kernels for the operators that have one in `jtbridge.kernels`."""

    name = "triton"
    preference = 10
    uses_kernels = True

    def unavailable_reason(self, platform: str) -> str | None:
        if platform not in GPU_PLATFORMS:
            return f'it needs a GPU, the platform is "{platform}"'
        return triton_unsupported_reason(platform)

    def unpreferred_reason(self, platform: str) -> str | None:
        """Return why "auto" uses no kernels: none is known to be proven on this chip. None if one is."""
        del platform
        from jtbridge.kernels._proofs import unproven_reason

        return unproven_reason()

    def for_auto(self) -> Backend:
        return _PROVEN


class ProvenTritonBackend(TritonBackend):
    """The backend `triton` as ``backend="auto"`` uses it: with only the kernels that are proven on this chip."""

    def used_kernels(self) -> bool | frozenset[str]:
        from jtbridge.kernels._proofs import proven

        return proven()


_PROVEN = ProvenTritonBackend()


def _avals(types: Sequence[ArrayType]) -> list[ShapedArray]:
    return [ShapedArray(type_.shape, type_.dtype) for type_ in types]


BACKENDS = (XlaBackend(), TritonBackend())
