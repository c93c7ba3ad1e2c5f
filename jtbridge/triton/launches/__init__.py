"""Triton kernels that a torch function launches, directly or with ``torch.library.wrap_triton``.

While a function is traced, `jtbridge.triton.intercepted_launches` replaces every launch by the torch operator
``jtbridge::launch`` (`_interception.py`, `_operator.py`). The operator takes the memories of the tensors and returns
new values of the memories that the kernel writes (`_memory.py`). The kernel's intermediate representation tells which
tensors the kernel writes (`_mutation_analysis.py`). The operator is translated to a JAX primitive (`_primitive.py`): on
a GPU, jax-triton compiles the kernel behind an adapter that has jax-triton's order of parameters (`_adapter.py`); on a
CPU, Triton's interpreter runs the kernel (`_interpreter.py`). Numbers that a function reads from a tensor only to pass
them to a kernel are read by the kernel (`_late_scalars.py`).

Triton is not imported before a kernel is launched; the user's code has imported it by then.
"""

from ._late_scalars import LateScalar, late_scalars, may_need_late_scalars
from ._launch import Launch
from ._operator import find_launch, launch_operator
from ._primitive import written_values
