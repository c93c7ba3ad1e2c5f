"""JAX functions and models as torch functions and modules. `README.md` in this folder explains the design."""

from ._function import to_torch_function

__all__ = ["to_torch_function"]
