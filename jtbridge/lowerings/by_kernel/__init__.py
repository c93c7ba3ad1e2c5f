"""Operators by the kernels of `jtbridge.kernels`: what the `triton` backend prefers to the lowerings in JAX.

Each takes what the lowering of the operator takes, and gives ``NotImplemented`` where its kernel does not apply: then
the lowering in JAX is used. A kernel is a JAX primitive, which on other platforms than a GPU is jnp.
"""

from . import attention as attention
from . import cross_entropy as cross_entropy
from . import gated as gated
from . import norms as norms
from . import rope as rope
from . import softmax as softmax
from ._table import find_by_kernel as find_by_kernel
