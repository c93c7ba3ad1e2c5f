"""Eager calls of kernel primitives: a call runs a program, compiled once for its types, parameters and settings."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import jax
from jax.extend.core import Primitive

from jtbridge.core.debug import check_results, without_debug_switches

from . import _proofs, _tuning


def run_compiled(primitive: Primitive, name: str, *arrays: jax.Array, **params: Hashable) -> Any:
    """Return the results of a primitive on arrays, computed by a program that JAX keeps for the next call.

    JAX looks up the program by the arrays' types, by its own settings and by the static arguments. Jtbridge's
    lowering rules also read the chosen configurations, and which kernels are replaced by their references. So these are
    static arguments too.

    Args:
        primitive: the primitive.
        name: the name of the kernel in an error of JAX's debugging switches.
        arrays: the operands.
        params: the parameters of the primitive.

    Raises:
        FloatingPointError: a result holds a NaN or an infinity, and ``jax_debug_nans`` or ``jax_debug_infs`` checks it.
    """
    settings = _tuning.program_key(), _proofs.kernels_in_use()
    with without_debug_switches():
        results = _program(*arrays, primitive=primitive, params=tuple(params.items()), settings=settings)
    check_results(f"`{name}`", jax.tree.leaves(results), "a kernel")
    return results


@functools.partial(jax.jit, static_argnames=("primitive", "params", "settings"))
def _program(*arrays: jax.Array, primitive: Primitive, params: tuple[tuple[str, Any], ...], settings: Hashable) -> Any:
    del settings
    return primitive.bind(*arrays, **dict(params))
