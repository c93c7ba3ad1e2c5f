"""Lowerings: ATen operators in JAX.

Each folder is an area. A module of an area registers the lowerings of a family of operators with `register_lowering`,
and is found when the first graph is translated. Modules whose name begins with an underscore hold what lowerings share.
"""

from ._registry import find as find
from ._registry import find_kernel as find_kernel
from ._registry import register_lowering as register_lowering
