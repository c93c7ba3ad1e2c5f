"""Lowering of a translated program, which uses 64-bit types, as part of a program that may have x64 disabled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from ._program import jax_semantics


def lower_program(
    ctx: mlir.LoweringRuleContext, program: ClosedJaxpr, operands: Sequence[Any], *, matmul_precision: str
) -> Sequence[Any]:
    """Emit a program and return its results. `ctx` has the abstract values of the program's inputs and outputs."""
    # Symbolic sizes and the index of the platform are int32 while x64 is off. The translated program needs int64.
    wide = ir.RankedTensorType.get([], ir.IntegerType.get_signless(64))
    sizes = tuple(stablehlo.convert(wide, size) for size in ctx.dim_var_values)
    with jax_semantics(matmul_precision):
        run = mlir.lower_fun(jaxpr_as_fun(program), multiple_results=True)
        return run(ctx.replace(dim_var_values=sizes), *operands)
