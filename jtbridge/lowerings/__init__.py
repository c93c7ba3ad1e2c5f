"""ATen operators in JAX: a registry, and one file per family of operators."""

from ._registry import Lowering, find, lowers, register_lowering

__all__ = ["Lowering", "find", "lowers", "register_lowering"]
