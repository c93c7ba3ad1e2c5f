"""Lowerings: JAX functions that compute ATen operators.

Each folder is an area. A module of an area registers the lowerings of a family of operators with `register_lowering`.
The registry imports these modules before it first looks up a lowering, or registers one that is not jtbridge's own. A
module whose name begins with an underscore holds helpers that several lowerings share.
"""

from ._registry import Lowering as Lowering
from ._registry import find as find
from ._registry import find_kernel as find_kernel
from ._registry import register_lowering as register_lowering
