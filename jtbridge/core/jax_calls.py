"""The table of JAX functions that torch code calls, and the name of the operator that calls them.

An operator of torch takes tensors, numbers and text, so it refers to a JAX function by a text, its handle. `reverse/`
defines the operator and its functions.
"""

from __future__ import annotations

import weakref
from typing import Any

OPERATOR = "jtbridge::jax_call"
START = "jtbridge::start_of_call"  # marks in a graph the start of a call of a module with a state

# The table is weak: a function lives as long as the torch function, autograd graph or traced graph that uses it.
HANDLES: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
