"""JAX's debugging switches: ``jax_debug_nans``, ``jax_debug_infs`` and ``jax.disable_jit``.

JAX checks the results of its own primitives and of compiled programs. If a compiled program has a NaN among its
results, JAX runs the program again operation by operation. The error then names the first primitive that checks its own
results and finds a NaN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np


@contextlib.contextmanager
def without_debug_switches() -> Iterator[None]:
    """Switch ``jax.disable_jit``, ``jax_debug_nans`` and ``jax_debug_infs`` off inside the block.

    Under ``jax.disable_jit`` the program of a primitive would bind the same primitive again, without end. Under
    ``jax_debug_nans`` JAX runs a program with a NaN again without ``jit``, with the same consequence.
    """
    if not (jax.config.jax_disable_jit or wanted_checks()):  # type: ignore[attr-defined]
        yield
        return
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        yield


def check_results(name: str, results: Sequence[jax.Array], kind: str = "a torch function") -> None:
    """Check the results of a function for NaNs, for infinities, or for both, as JAX's switches say.

    Args:
        name: the name of the function in the error message.
        results: the results.
        kind: a noun for the function in the error message.

    Raises:
        FloatingPointError: a result holds a NaN or an infinity, and the switch for it is on.
    """
    for value, has_any in wanted_checks().items():
        for number, array in enumerate(results):
            if not jnp.issubdtype(array.dtype, jnp.inexact):
                continue
            if any(np.any(has_any(np.asarray(shard.data))) for shard in array.addressable_shards):
                raise FloatingPointError(
                    f"invalid value ({value}) encountered in result {number} "
                    f"({array.dtype}{list(array.shape)}) of {name}, {kind}"
                )


def wanted_checks() -> dict[str, np.ufunc]:
    """Return the NumPy tests that JAX's switches ask for, by the names that JAX's messages use."""
    nans = {"nan": np.isnan} if jax.config.jax_debug_nans else {}  # type: ignore[attr-defined]
    infs = {"inf": np.isinf} if jax.config.jax_debug_infs else {}  # type: ignore[attr-defined]
    return {**nans, **infs}
