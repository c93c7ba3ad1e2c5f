"""The table of JAX functions that torch code calls, and the name of the operator that calls them.

An operator of torch takes tensors, numbers and strings, so it refers to a JAX function by a string, its handle.
`reverse/` defines the operator and its functions.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from jtbridge._compat import OpOverload

OPERATOR = "jtbridge::jax_call"
START = "jtbridge::start_of_call"  # marks in a graph the start of a call of a module with a state

# The JAX functions by handle. The table is weak: a function is kept alive by the torch function, autograd graph or
# traced graph that uses it.
HANDLES: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def called_function(func: Any, args: Sequence[Any]) -> Any | None:
    """Return the JAX function that a call of a torch function runs; None for every other torch function.

    Args:
        func, args: the torch function and its arguments, as a mode of torch gets them.
    """
    is_call = isinstance(func, OpOverload) and func.name() == OPERATOR
    return HANDLES.get(args[1]) if is_call else None
