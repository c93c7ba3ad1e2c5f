"""Arrays that XLA computes once, and does not compute again in each operation that reads them.

If XLA computes an array in two operations, it may fuse a product and a sum into one instruction in only one of them,
which rounds differently. Then ``x == x.max()`` may be false for every element.
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
    """Return an array that went through a loop without steps.

    XLA's CPU compiler drops optimization barriers before it decides which arrays to compute again. It cannot know that
    the loop has no steps, so it computes the array before the loop, and reads the result in every operation after it.
    """
    goes_on = jax.lax.optimization_barrier(jnp.array(False))
    return jax.lax.while_loop(lambda state: state[0], lambda state: (state[0], state[1] + state[1]), (goes_on, x))[1]


_materialized_p = cpu_identity(
    "jtbridge_materialized",
    mlir.lower_fun(_through_a_loop, multiple_results=False),
    mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False),
)
