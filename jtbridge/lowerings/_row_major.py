"""An array that XLA must compute whole, in row-major order, before another operator reads it."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import mlir

from jtbridge._compat import is_exported
from jtbridge.core.cpu_identity import cpu_identity


def row_major(x: jax.Array) -> jax.Array:
    """Return x in row-major order.

    On a CPU, XLA lets a Fourier transform write in the order of a factorization that reads it, which is column-major,
    and then refuses to compile it. In an exported program nothing is done: the constraint is a custom call, and custom
    calls cannot be serialized.
    """
    return _row_major_p.bind(x)


def constrained(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _lower(ctx: mlir.LoweringRuleContext, x: Any) -> Any:
    return [x] if is_exported(ctx) else mlir.lower_fun(constrained, multiple_results=False)(ctx, x)


_row_major_p = cpu_identity("jtbridge_row_major", _lower)
