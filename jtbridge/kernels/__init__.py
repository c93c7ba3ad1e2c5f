"""Functions with Triton kernels, as JAX functions: differentiable, batched, and in jnp where there is no GPU.

Each has a folder: ``reference.py`` (jnp), ``triton_kernel.py`` (device code, the only file that imports Triton) and
``op.py`` (the public function, when its kernel applies, its derivatives and its batching rule); those that are tuned
also have ``configurations.py`` (the ways to launch the kernel, and the default by shape and chip).
"""

from .attention import attention as attention
from .cross_entropy import cross_entropy as cross_entropy
from .gated import geglu as geglu
from .gated import swiglu as swiglu
from .linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from .matmul import matmul as matmul
from .norms import layer_norm as layer_norm
from .norms import rms_norm as rms_norm
from .rope import rope as rope
from .rope import rope_qk as rope_qk
from .softmax import log_softmax as log_softmax
from .softmax import softmax as softmax
