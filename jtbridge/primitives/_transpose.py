"""The transpose of a torch function that is linear in some of its inputs: its vector-Jacobian product at zero.

    y = f(x, a), linear in x:    x_bar = y_bar @ D_x f(0, a)

As in JAX, a constant term drops out: ``x + a`` and ``x`` have the same transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.interpreters import ad

from jtbridge.capture import check_differentiable
from jtbridge.core.functions import TorchFunction
from jtbridge.core.positions import replaced
from jtbridge.core.primitive_rules import describe, differentiable, sharded_like
from jtbridge.errors import DifferentiationError
from jtbridge.transforms import Vjp
from jtbridge.translate import nonlinear_reason

from ._binding import torch_call


def transpose_linear(fn: TorchFunction, cotangents: Sequence[Any], operands: Sequence[Any], backend: str) -> list[Any]:
    """Return the cotangents of the inputs in which `fn` is transposed, and None for the other inputs.

    Args:
        fn: the function.
        cotangents: the cotangents of its results; symbolic zeros included.
        operands: its inputs, with an undefined primal for each input in which `fn` is transposed.
        backend: the name of the backend for the vector-Jacobian product.

    Raises:
        DifferentiationError: `fn` is not linear in these inputs, or it is not known to be.
    """
    is_linear = [ad.is_undefined_primal(operand) for operand in operands]
    outs = tuple(o for o in differentiable(fn.out_types) if type(cotangents[o]) is not ad.Zero)
    wrt = tuple(i for i in differentiable(fn.in_types) if is_linear[i])
    found: list[Any] = [
        ad.Zero(operand.aval.to_tangent_aval()) if linear else None
        for operand, linear in zip(operands, is_linear, strict=True)
    ]
    if not outs or not wrt:
        return found
    reason = nonlinear_reason(fn, wrt)
    if reason is not None:
        raise DifferentiationError(
            f"{describe(fn)} was to be transposed, which takes a linear function: {reason}. If it is linear, pass its "
            "transpose yourself: `jax.vjp(f, jnp.zeros_like(x))[1]`, or the `transpose_solve=` or `rmatvec=` of the "
            "solver that transposes it."
        )
    check_differentiable(fn, wrt, again=fn.order > 0)
    at_zero = [
        jnp.zeros(operand.aval.shape, operand.aval.dtype) if linear else operand
        for operand, linear in zip(operands, is_linear, strict=True)
    ]
    grads = torch_call(*at_zero, *(cotangents[o] for o in outs), fn=Vjp(fn, wrt, outs), backend=backend)
    return replaced(found, wrt, [sharded_like(grad, operands[i].aval) for grad, i in zip(grads, wrt, strict=True)])
