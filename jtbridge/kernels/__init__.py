"""JAX functions with Triton kernels: differentiable, batched, and computed in jnp where there is no GPU.

Each function has a folder, named after it with an underscore: ``reference.py`` (the function in jnp),
``triton_kernel.py`` (device code; only files named ``triton_*.py`` import Triton), ``op.py`` (the public function, the
condition under which its kernel applies, its derivatives and its batching rule) and ``proof.py`` (cases on which the
kernel is compared with the reference). A function that is tuned also has ``configurations.py``: the launch
configurations that tuning tries, and the default for each shape and chip. ``lowering.py``, where there is one, holds
lowerings of torch operators to the kernel. The folder ``_linear_cross_entropy`` has no kernel: it uses the kernels of
``_cross_entropy``.
"""

from ._attention import attention as attention
from ._attention import chosen_attention as chosen_attention
from ._cross_entropy import cross_entropy as cross_entropy
from ._gated import geglu as geglu
from ._gated import swiglu as swiglu
from ._linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from ._matmul import matmul as matmul
from ._norms import layer_norm as layer_norm
from ._norms import rms_norm as rms_norm
from ._rope import rope as rope
from ._rope import rope_qk as rope_qk
from ._softmax import log_softmax as log_softmax
from ._softmax import softmax as softmax
