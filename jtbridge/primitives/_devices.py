"""``torch_with_devices(x) -> x``: tells JAX that the lowering of the program needs its devices.

JAX gives the devices of a program to its lowering only if one of its primitives is registered as needing them. A call
that is divided by rows needs them, but other calls of the same primitives do not. So an operand of a call that may be
divided passes through this primitive, which is registered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jtbridge._compat import require_devices
from jtbridge.core.functions import TracedFunction

from ._common import will_translate

torch_with_devices_p = Primitive("torch_with_devices")


def with_devices(operands: Sequence[Any], fn: TracedFunction, backend: str) -> list[Any]:
    """Return the operands of a function; if its call may be divided by rows, one passes through the primitive."""
    found = list(operands)
    if fn.batched and not will_translate(fn, backend):
        position = fn.batched[0]
        found[position] = torch_with_devices_p.bind(jnp.asarray(found[position]))
    return found


def _impl(x: jax.Array) -> jax.Array:
    return x


torch_with_devices_p.def_impl(_impl)
torch_with_devices_p.def_abstract_eval(lambda aval: aval)
ad.deflinear2(torch_with_devices_p, lambda ct, _: [ct])
batching.defvectorized(torch_with_devices_p)
mlir.register_lowering(torch_with_devices_p, lambda ctx, x: [x])
require_devices(torch_with_devices_p)
