"""Triton kernels that a torch function launches itself, bare or by ``torch.library.wrap_triton``.

While a function is traced, `routed` turns every launch into one torch operator, ``jtbridge::launch``, which takes the
tensors and returns those that the kernel writes (`_route.py`, `_written.py`, `_operator.py`). Translated, it is a JAX
primitive (`_primitive.py`): compiled by jax-triton for a GPU, run by Triton's interpreter on a CPU (`_interpreter.py`).
Triton is not imported before a kernel is launched, and by then the user has done it.
"""

from ._deferred import DeferredNumber as DeferredNumber
from ._deferred import deferring_numbers as deferring_numbers
from ._launch import Launch as Launch
from ._operator import launch_of as launch_of
from ._operator import launch_operator as launch_operator
from ._primitive import launch as launch
from ._route import routed as routed
from ._route import with_launches as with_launches
