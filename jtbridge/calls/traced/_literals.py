"""Warning for closed-over tensors that become literals of a program of ``jax.jit``."""

from __future__ import annotations

import jax

from jtbridge._compat import outermost_trace, traced_for
from jtbridge.core.messages import warn_user
from jtbridge.errors import ConstantsWarning
from jtbridge.translate import closed_over_bytes

_MAX_BYTES = 16 << 20  # bytes
_KEY = "constants"


def warn_of_literals(name: str, warnings_given: set[str]) -> None:
    """Warn once about a function if the program that is traced now closes over large tensors.

    Args:
        name: the name of the function.
        warnings_given: keys of the warnings already given about the function.
    """
    trace = outermost_trace()
    if _KEY in warnings_given or trace is None or traced_for(trace) != "jit":
        return
    if getattr(jax.config, "jax_use_simplified_jaxpr_constants", False):  # JAX passes closed-over arrays as arguments
        return
    size = closed_over_bytes()
    if size > _MAX_BYTES:
        warnings_given.add(_KEY)
        warn_user(
            f"`{name}` closes over {size / 1e6:.0f} MB of tensors in a program of `jit`, and `jit` writes them "
            "into the program as literals: it takes several times their memory, and long to compile. Pass them as "
            "arguments: for a module, `net = jtbridge.module(model)`, `params, state = net.init()`, "
            "`net(params, state, x)`. Or let JAX pass them: "
            '`jax.config.update("jax_use_simplified_jaxpr_constants", True)`.',
            ConstantsWarning,
        )
