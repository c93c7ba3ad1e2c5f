"""The only home of private APIs and version differences of JAX and torch; Triton's are in `jtbridge/_triton.py`.

Each entry says why the public API does not do, and on which version it was written. `make test`, which needs neither
Triton nor a GPU, was also run on torch 2.11.0 with jax 0.10.0 and with jax 0.11.2, on torch 2.15.0 with jax 0.10.2, and
with jax 0.12.0.
"""

from ._jax import ORDERED_EFFECT as ORDERED_EFFECT
from ._jax import add_linearization as add_linearization
from ._jax import buffer_call as buffer_call
from ._jax import call_aval as call_aval
from ._jax import cudnn_attention as cudnn_attention
from ._jax import cudnn_version as cudnn_version
from ._jax import unify_varying_axes as unify_varying_axes
from ._jax import without_function_of_scores as without_function_of_scores
from ._shared_tensor import SharedTensor as SharedTensor
from ._torch import DataDependentOutputException as DataDependentOutputException
from ._torch import DynamicOutputShapeException as DynamicOutputShapeException
from ._torch import FakeTensor as FakeTensor
from ._torch import FakeTensorMode as FakeTensorMode
from ._torch import OpOverload as OpOverload
from ._torch import TorchDispatchMode as TorchDispatchMode
from ._torch import any_autocast as any_autocast
from ._torch import differentiating as differentiating
from ._torch import function_of_triton_operator as function_of_triton_operator
from ._torch import has_batching_rule as has_batching_rule
from ._torch import has_cpu_kernel as has_cpu_kernel
from ._torch import has_saved_tensor_hooks as has_saved_tensor_hooks
from ._torch import has_torch_modes as has_torch_modes
from ._torch import in_forward_mode as in_forward_mode
from ._torch import inside_functorch as inside_functorch
from ._torch import is_lazy as is_lazy
from ._torch import is_zero as is_zero
from ._torch import once_differentiable_in as once_differentiable_in
from ._torch import outside_modes as outside_modes
from ._torch import pack_padded_sequence as pack_padded_sequence
from ._torch import pad_packed_sequence as pad_packed_sequence
from ._torch import qualified_operator_name as qualified_operator_name
from ._torch import replace_fake as replace_fake
from ._torch import storage_id as storage_id
from ._torch import torch_pytree_node as torch_pytree_node
from ._torch import triton_wrapper_class as triton_wrapper_class
from ._torch import unwrap_compiled as unwrap_compiled
from ._tracing import TRACING as TRACING
from ._tracing import autograd_place as autograd_place
from ._tracing import broken_assumption as broken_assumption
from ._tracing import decomposition_of as decomposition_of
from ._tracing import exporting as exporting
from ._tracing import forgetting_graph_sources as forgetting_graph_sources
from ._tracing import last_traced_node as last_traced_node
from ._tracing import last_traced_node_of as last_traced_node_of
from ._tracing import symbolic_shapes as symbolic_shapes
from ._tracing import symbolic_tensors as symbolic_tensors
from ._tracing import trace_joint as trace_joint
from ._tracing import tracing as tracing
