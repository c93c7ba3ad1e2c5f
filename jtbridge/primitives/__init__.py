"""The JAX primitives, one file each, closed under jvp, linearize, transpose and vmap."""

from . import _part as _part  # registers its rules
from ._call import torch_call
from ._ordered import torch_ordered

__all__ = ["torch_call", "torch_ordered"]
