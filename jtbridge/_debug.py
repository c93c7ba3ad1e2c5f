"""JAX's debugging switches: ``jax_debug_nans``, ``jax_debug_infs`` and ``jax.disable_jit``.

JAX checks the results of its own primitives and of compiled programs. A compiled program with a NaN among its results
is run again operation by operation, so a primitive that checks its own results is the one that gets named.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np


@contextlib.contextmanager
def without_debug_switches() -> Iterator[None]:
    """Compile programs, and leave their results unchecked, whatever JAX's debugging switches say.

    Under ``jax.disable_jit`` the program of a primitive would bind the same primitive again, without an end. Under
    ``jax_debug_nans`` JAX runs a program with a NaN again without ``jit``, which would do the same.
    """
    if not (jax.config.jax_disable_jit or wanted_checks()):  # type: ignore[attr-defined]
        yield
        return
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        yield


def check_results(name: str, results: Sequence[jax.Array]) -> None:
    """Check the results of the torch function `name` as ``jax_debug_nans`` and ``jax_debug_infs`` ask for.

    Raises:
        FloatingPointError: a result holds a NaN or an infinity, and the switch for it is on.
    """
    for kind, has_any in wanted_checks().items():
        for number, array in enumerate(results):
            if jnp.issubdtype(array.dtype, jnp.inexact) and _holds(array, has_any):
                raise FloatingPointError(
                    f"invalid value ({kind}) encountered in result {number} "
                    f"({array.dtype}{list(array.shape)}) of {name}, a torch function"
                )


def wanted_checks() -> dict[str, np.ufunc]:
    """What to look for, by the name that JAX's messages give it."""
    nans = {"nan": np.isnan} if jax.config.jax_debug_nans else {}  # type: ignore[attr-defined]
    infs = {"inf": np.isinf} if jax.config.jax_debug_infs else {}  # type: ignore[attr-defined]
    return {**nans, **infs}


def _holds(array: jax.Array, has_any: np.ufunc) -> bool:
    return any(bool(np.any(has_any(np.asarray(shard.data)))) for shard in array.addressable_shards)
