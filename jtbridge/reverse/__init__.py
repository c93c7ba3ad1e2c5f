"""JAX functions and models as torch functions and modules. `README.md` in this folder explains the design."""

from ._function import to_torch_function
from ._module import to_torch_module

__all__ = ["to_torch_function", "to_torch_module"]
