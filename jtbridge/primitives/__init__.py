"""The JAX primitives, one file each, closed under jvp, linearize, transpose and vmap."""

from ._call import torch_call
from ._ordered import torch_ordered

__all__ = ["torch_call", "torch_ordered"]
