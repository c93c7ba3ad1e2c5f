"""The private APIs and version differences of JAX, torch and Python. Triton's are in `jtbridge/triton`.

No other folder uses private APIs of JAX, torch or Python. Each entry states why no public API suffices, and on which
version the entry was written. `make test`, which needs neither Triton nor a GPU, was also run on torch 2.11.0 with jax
0.10.0 and with jax 0.11.2, on torch 2.15.0 with jax 0.10.2, and with jax 0.12.0.1.
"""

from ._checkpoint import reentrant_checkpoints
from ._control_flow import COND, WHILE_LOOP, control_flow_outside_modes, control_flow_uncompiled
from ._draws import (
    EarlierDraws,
    default_generator,
    draw_source,
    drawing_from,
    inside_mode,
    on_meta,
    random_state_of,
    same_generator,
    states_on_gpus,
)
from ._flex_attention import (
    flex_attention_in_operators,
    flex_attention_scores,
    flex_attention_uncompiled,
    is_flex_attention,
)
from ._forward_mode import (
    dual,
    enter_shared_level,
    exit_shared_level,
    forward_mode,
    has_tangent,
    has_tangent_at_any_level,
    in_forward_mode,
    level_is_shared,
    thread_in_forward_mode,
)
from ._interrupts import on_own_thread, raise_in_thread
from ._jax import (
    ORDERED_EFFECT,
    InconclusiveDimensionOperation,
    Primitive,
    add_host_callback,
    add_linearization,
    buffer_call,
    buffer_call_by_index,
    call_aval,
    cudnn_attention,
    cudnn_backward,
    cudnn_forward,
    cudnn_version,
    is_divided,
    is_exported,
    is_for_one_device,
    is_in_reduction,
    jax_is_initialized,
    replicated,
    require_devices,
    spans_devices,
    unify_varying_axes,
)
from ._jax_arrays import ArrayImpl, array_on_device, weakly_typed
from ._jax_checkpoint import (
    add_policy_rule,
    add_pruning,
    cut_by_policy,
    has_custom_vjp,
    is_dropped,
    is_staging,
    new_variable,
    without_unused,
)
from ._jax_tools import add_nan_check, refuse_in_jet, register_with_jet
from ._jax_traces import (
    Context,
    concrete_values,
    current_context,
    current_trace,
    outermost_trace,
    refusing_jax,
    traced_for,
    without_axis_names,
)
from ._l1_loss import keep_weight_of_l1_loss
from ._module_tables import (
    HOOK_TABLES,
    MODULE_TABLES,
    RNN_WEIGHTS,
    VersionedStateDict,
    computed_attribute,
    forward_pre_hooks,
    module_versions,
    non_persistent_buffers,
    registered_buffers,
    registered_modules,
    registered_parameters,
)
from ._python import cache_entries, dispatch_cache
from ._released import ReleasedTensor, reads_no_values
from ._shared_tensor import SharedTensor
from ._symbolic_sizes import broken_assumption, kernels_of_symbolic_sizes, may_equal, symbolic_shapes, symbolic_tensors
from ._to_dlpack import exports_to_dlpack_seen
from ._torch import (
    IMPORTED_BY_FAKE_TENSORS,
    DataDependentOutputException,
    DispatchMode,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    LoaderIterator,
    OpOverload,
    TorchDispatchMode,
    any_autocast,
    backwards_that_may_detach,
    batches_taken,
    custom_backwards,
    detached_backwards,
    differentiating,
    function_of_triton_operator,
    functorch_level,
    global_module_hooks,
    gradients_required,
    graph_nodes,
    has_batching_rule,
    has_cpu_kernel,
    has_lost_gradient,
    has_own_dispatch,
    has_plain_memory,
    has_saved_tensor_hooks,
    in_backward,
    innermost,
    is_lazy,
    is_of_outer_trace,
    is_of_trace,
    is_tracing_exception,
    is_zero,
    mark_as_parameter,
    materializes_gradients,
    once_differentiable_in,
    pack_padded_sequence,
    pad_packed_sequence,
    plain,
    qualified_operator_name,
    replace_fake,
    storage_id,
    torch_batches,
    torch_pytree_node,
    triton_wrapper_class,
    unseen_by_function_modes,
    unwrap_compiled,
    without_cached_weights,
    writes,
    wrong_batching_reason,
)
from ._torch_eager import (
    StorageWeakRef,
    add_gradient_hook,
    address_of,
    can_replace_memory,
    has_error_node,
    is_graph_leaf,
    is_shared,
    node_names,
    replace_memory,
    requiring_gradient,
    run_backward,
    storage_of,
)
from ._torch_fields import (
    BACKWARD_HOOKS,
    base_of,
    global_hooks,
    has_gradient_hooks,
    hooks_of_leaf,
    overload_name,
    overload_of,
    schema_of,
    set_hooks_of_leaf,
    tensor_of_class,
    undeclared_writes,
    write_count,
)
from ._torch_library import (
    SingleLevelFunction,
    mark_constant_for_dynamo,
    outside_dynamo,
    recording_in_operators,
    recording_outer_levels,
    redispatch_below_autograd,
    single_level_allowed,
    with_autograd,
)
from ._torch_modes import (
    functorch_depth,
    has_torch_modes,
    hidden_from_modes,
    inside_functorch,
    is_tracing,
    is_transforming,
    outside_functorch,
    outside_modes,
    outside_traces,
    run_outside_transforms,
)
from ._tracing import (
    TRACING,
    autograd_place,
    decomposition_of,
    fake_tensors,
    forget_tensors,
    forgetting_graph_sources,
    last_traced_node,
    last_traced_node_of,
    lstm_in_operators,
    running_modules,
    trace_joint,
    tracing,
)
from ._transformers import show_as_real, treated_as_fake, was_answered_fake, watch_is_fake_tensor
from ._unbacked import known_size, unbacked_fake_mode

keep_weight_of_l1_loss()
