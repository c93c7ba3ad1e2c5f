"""A workaround for sums over arrays of many dimensions, for which XLA's CPU compiler emits code that crashes.

For a float32 array of rank 7 or more, XLA (jaxlib 0.10.2) compiles ``sum(a * b)`` on a CPU to a call of YNNPACK whose
generated code writes outside its memory. A batched program soon reaches such ranks, because each ``vmap`` adds a
dimension. A clamp to the whole range of the dtype changes no value, NaN included. A clamp between the product and its
sum stops XLA from fusing the two; ``max(x, -inf)``, a reshape or an optimization barrier do not, because XLA removes
them first.
"""

from __future__ import annotations

import operator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, gensym, new_jaxpr_eqn, no_effects
from jax.extend.core.primitives import clamp_p, reduce_sum_p

_RANK = 7  # the lowest rank for which XLA's code was seen to crash


def with_clamped_sums(program: ClosedJaxpr) -> ClosedJaxpr:
    """Return the same program, with a clamp before every sum over a floating-point array of rank 7 or more."""
    jaxpr = _with_clamped_sums(program.jaxpr)
    return program if jaxpr is program.jaxpr else program.replace(jaxpr=jaxpr)


def _with_clamped_sums(jaxpr: Jaxpr) -> Jaxpr:
    new_variable = gensym()
    equations = []
    for equation in jaxpr.eqns:
        params = {name: _in_param(value) for name, value in equation.params.items()}
        if any(value is not equation.params[name] for name, value in params.items()):
            equation = equation.replace(params=params)
        if _is_high_rank_sum(equation):
            (x,) = equation.invars
            low, high = (Literal(np.asarray(bound, x.aval.dtype), x.aval.update(shape=())) for bound in _RANGE)  # type: ignore[attr-defined]
            clamped = new_variable(x.aval)
            equations.append(
                new_jaxpr_eqn([low, x, high], [clamped], clamp_p, {}, no_effects, equation.source_info, equation.ctx)
            )
            equation = equation.replace(invars=[clamped])
        equations.append(equation)
    # JAX lowers a repeated function only once if all calls hold the same jaxpr object, so an unchanged jaxpr is kept.
    is_same = len(equations) == len(jaxpr.eqns) and all(map(operator.is_, equations, jaxpr.eqns))
    return jaxpr if is_same else jaxpr.replace(eqns=equations)


_RANGE = (-np.inf, np.inf)


def _is_high_rank_sum(equation: Any) -> bool:
    if equation.primitive is not reduce_sum_p:
        return False
    aval = equation.invars[0].aval
    return aval.ndim >= _RANK and jnp.issubdtype(aval.dtype, jnp.floating)


def _in_param(value: Any) -> Any:
    """Return a parameter of an equation, with clamps in the bodies of loops, branches and inner functions."""
    if isinstance(value, ClosedJaxpr):
        return with_clamped_sums(value)
    if isinstance(value, Jaxpr):
        return _with_clamped_sums(value)
    if type(value) in (tuple, list):
        parts = [_in_param(part) for part in value]
        return value if all(map(operator.is_, parts, value)) else type(value)(parts)
    return value
