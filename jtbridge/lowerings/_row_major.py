"""A layout constraint: XLA must store an array in row-major order before another operation reads it."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import mlir

from jtbridge._compat import is_exported
from jtbridge.core.cpu_identity import cpu_identity


def row_major(x: jax.Array) -> jax.Array:
    """Return `x`, constrained to a row-major layout on the CPU.

    On a CPU, XLA gives the result of a Fourier transform the column-major layout that a factorization reads, and then
    refuses to compile the transform. An exported program has no constraint: the constraint is a custom call, which
    cannot be serialized.
    """
    return _row_major_p.bind(x)


def constrain_to_row_major(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _lower(ctx: mlir.LoweringRuleContext, x: Any) -> Any:
    return [x] if is_exported(ctx) else mlir.lower_fun(constrain_to_row_major, multiple_results=False)(ctx, x)


_row_major_p = cpu_identity("jtbridge_row_major", _lower)
