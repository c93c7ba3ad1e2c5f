"""Operations that return their argument, and tell XLA's CPU compiler something about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.interpreters import ad, batching, mlir

from jtbridge._compat import Primitive


def cpu_identity(name: str, lower: Callable[..., Any], elsewhere: Callable[..., Any] = lambda ctx, x: [x]) -> Primitive:
    """Return a new primitive that returns its argument.

    `jax.lax.platform_dependent` would do, but takes several times as long to trace and to lower.

    Args:
        name: the name of the primitive.
        lower: the lowering rule for a CPU.
        elsewhere: the lowering rule for other platforms; by default the argument itself is the result.
    """
    primitive = Primitive(name)
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, elsewhere)
    mlir.register_lowering(primitive, lower, platform="cpu")
    batching.defvectorized(primitive)
    ad.deflinear2(primitive, lambda cotangent, _: [primitive.bind(cotangent)])
    return primitive
