"""Triton and jax-triton: supported versions, calls of kernels, and fixes of Triton's interpreter.

Neither package is imported before it is used. The folder `launches` handles the Triton kernels that a user's torch
function launches.

Triton's private functions are used in this folder alone. Tried on triton 3.6, 3.7 and 3.9 with jax-triton 0.3.1, and on
triton 3.7 to 3.9 with jax-triton 0.4.1.
"""

from ._assembler import jax_assembler
from ._call import triton_call
from ._interception import intercepted_launches, with_intercepted_launches
from ._interpreter import LANGUAGE_LOCK, fixed_interpreter
from ._ir import COMPILER_OPTIONS
from ._versions import unsupported_reason
