"""Arrays that XLA computes once, and does not compute again in each operation that reads them.

An array that is computed twice may be rounded in two ways, because a product and a sum become one instruction in one of
the operations and not in the other. Then no element of the array equals the largest element that was found.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from .cpu_identity import cpu_identity


def materialized(x: jax.Array) -> jax.Array:
    """Return an array that XLA computes once for all operations that read the result."""
    return _materialized_p.bind(x)


def _through_a_loop(x: jax.Array) -> jax.Array:
    """Return an array as the state of a loop of no steps.

    XLA's CPU compiler drops an optimization barrier before it decides what to compute again. It does not know how many
    steps the loop has, and copies no array that it computes itself into the loop.
    """
    goes_on = jax.lax.optimization_barrier(jnp.array(False))
    return jax.lax.while_loop(lambda state: state[0], lambda state: (state[0], state[1] + state[1]), (goes_on, x))[1]


_materialized_p = cpu_identity(
    "jtbridge_materialized",
    mlir.lower_fun(_through_a_loop, multiple_results=False),
    mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False),
)
