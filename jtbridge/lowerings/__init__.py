"""ATen operators in JAX: a registry, and one file per family of operators."""

from ._registry import Lowering, find, lowers, register_lowering
from .by_kernel import find_by_kernel

__all__ = ["Lowering", "find", "find_by_kernel", "lowers", "register_lowering"]
