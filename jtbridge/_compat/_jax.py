"""Private APIs of JAX: calls on XLA's buffers, effects, linearization, mesh axes, and attention by cuDNN."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core as jax_core
import numpy as np
from jax._src import callback, core
from jax._src.core import InconclusiveDimensionOperation as InconclusiveDimensionOperation  # not in 0.10.0's jax.errors
from jax._src.core import Primitive as Primitive  # the public `jax.extend.core` imports Pallas
from jax.interpreters import mlir

_LOWERINGS_OF_REDUCTIONS = frozenset(
    {"_generic_reduce_window_lower", "_reduce_lower", "_scatter_lower", "_select_and_scatter_lower"}
)


def jax_is_initialized() -> bool:
    """Return whether JAX has started its devices, and with them its threads.

    `jax.devices` would start them. Tried on jax 0.10.2.
    """
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def cudnn_attention() -> Any:
    """Return the module of JAX that lowers attention to cuDNN.

    It holds ``_dot_product_attention_fwd_impl``, ``..._bwd_impl`` and their enums. The public API is
    ``jax.nn.dot_product_attention(implementation="cudnn")``, which checks for a GPU when it is traced, has no forward
    mode, supports no other platform, and rounds the logarithm that the backward needs. The arguments of the two
    functions were tried on jax 0.10.2, 0.11.2 and 0.12.0.1, which adds a function of scores (`score_mod`).

    Raises:
        ImportError: the functions of the installed JAX have other parameters.
    """
    from jax._src.cudnn import fused_attention_stablehlo as module

    for name, parameters in _OF_CUDNN.items():
        found = set(inspect.signature(getattr(module, name)).parameters) - _OF_SCORES.keys()
        if found != set(parameters.split()):
            raise ImportError(f"`{name}` of JAX {jax.__version__} takes other arguments than those that are known")
    return module


def cudnn_forward(**options: Any) -> Any:
    """Call JAX's implementation of attention by cuDNN, forward."""
    return _cudnn("_dot_product_attention_fwd_impl", options)


def cudnn_backward(**options: Any) -> Any:
    """Call JAX's implementation of attention by cuDNN, backward."""
    return _cudnn("_dot_product_attention_bwd_impl", options)


def _cudnn(name: str, options: dict[str, Any]) -> Any:
    function = getattr(cudnn_attention(), name)
    parameters = inspect.signature(function).parameters
    return function(**{name: value for name, value in _OF_SCORES.items() if name in parameters}, **options)


_OF_BOTH = (
    "query key value bias q_seqlen kv_seqlen q_offsets kv_offsets page_table_k page_table_v "
    "scale seed dropout_rate variadic_args mask_type layout sliding_window_length"
)


_OF_CUDNN = {
    "_dot_product_attention_fwd_impl": f"{_OF_BOTH} is_training",
    "_dot_product_attention_bwd_impl": f"{_OF_BOTH} activation fwd_output grad_output",
}


# jax 0.12 and later need these arguments. The values mean that there is no function of scores.
_OF_SCORES = {"score_mod": None, "score_mod_args": ()}


def cudnn_version() -> int | None:
    """Return the version of cuDNN that JAX loads, such as 91002 for 9.10.2; None without cuDNN. Tried on jax 0.10.2."""
    from jax._src.lib import cuda_versions

    try:
        return None if cuda_versions is None else cuda_versions.cudnn_get_version()
    except RuntimeError:
        return None


def buffer_call(
    ctx: mlir.LoweringRuleContext, callback: Callable, operands: Sequence[Any], *, gpu: bool, always: bool = False
) -> Sequence[Any]:
    """Emit the custom call of `jax.experimental.buffer_callback`, which runs ``callback(ctx, *operands, *results)``.

    XLA drops a call whose results have no elements, unless `always` is true.

    Tried on jax 0.10.2. The public function refuses multi-platform lowering and rebuilds pytrees at every call,
    which costs 2 of the call's 8 us. Only the executable keeps `callback` alive.
    """
    return buffer_call_by_index(ctx, add_host_callback(ctx, callback), operands, gpu=gpu, always=always)


def add_host_callback(ctx: mlir.LoweringRuleContext, callback: Callable) -> int:
    """Add a callback to a program, which keeps it alive, and return its index. Tried on jax 0.10.2."""
    module_context = ctx.module_context
    module_context.add_host_callback(callback)
    return len(module_context.host_callbacks) - 1


def buffer_call_by_index(
    ctx: mlir.LoweringRuleContext, index: int, operands: Sequence[Any], *, gpu: bool, always: bool = False
) -> Sequence[Any]:
    """Emit the call of a callback that the program holds: see `buffer_call`."""
    from jax._src import ffi

    target = f"xla_buffer_python_{'gpu' if gpu else 'cpu'}_callback"
    return ffi.ffi_lowering(target, has_side_effect=always)(ctx, *operands, index=np.uint64(index))


def require_devices(primitive: Any) -> None:
    """Make JAX pass the devices of a program with `primitive` to the lowerings in it. Tried on jax 0.10.2."""
    from jax._src import dispatch

    dispatch.prim_requires_devices_during_lowering.add(primitive)


def spans_devices(ctx: mlir.LoweringRuleContext) -> bool:
    """Return whether XLA divides the program among the devices of a mesh.

    Inside `shard_map` the user has divided it. Tried on jax 0.10.2. JAX's own lowering of `custom_partitioning` reads
    the same fields, and knows the names of the axes only if the program has a mesh.
    """
    from jax._src import sharding_impls

    context = ctx.module_context.axis_context
    if not isinstance(context, sharding_impls.ShardingContext) or context.device_assignment is None:
        return False
    return context.num_devices > 1 and context.abstract_mesh is not None


def is_exported(ctx: mlir.LoweringRuleContext) -> bool:
    """Return whether a program is lowered for `jax.export`. Tried on jax 0.10.2; no public query."""
    return ctx.module_context.lowering_parameters.for_export


def is_divided(ctx: mlir.LoweringRuleContext) -> bool:
    """Return whether XLA divides a program among several devices.

    Inside `shard_map` over all axes of a mesh, the user has divided the program. Tried on jax 0.10.2; no public query.
    """
    from jax._src import sharding_impls

    context = ctx.module_context.axis_context
    if isinstance(context, sharding_impls.SPMDAxisContext):
        return context.manual_axes != frozenset(context.mesh.axis_names)
    return isinstance(context, sharding_impls.ShardingContext) and context.num_devices > 1


def is_in_reduction(ctx: mlir.LoweringRuleContext) -> bool:
    """Return whether the body of `jax.lax.reduce`, `reduce_window`, `scatter_apply` or the like is being lowered.

    XLA ends the process if such a body calls out of XLA. Tried on jax 0.10.2. There is no query, and the module does
    not show it: a function under `jax.jit` inside the body is lowered to a separate function. So JAX's lowerings of
    reductions are looked for on the stack.
    """
    if any(getattr(aval, "shape", ()) for aval in ctx.avals_in):  # the operands of a body are scalars
        return False
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _LOWERINGS_OF_REDUCTIONS:
            return True
        frame = frame.f_back
    return False


def is_for_one_device(ctx: mlir.LoweringRuleContext) -> bool:
    """Return whether a program runs on one device. Tried on jax 0.10.2; no public query."""
    from jax._src import sharding_impls

    context = ctx.module_context.axis_context
    if isinstance(context, sharding_impls.SPMDAxisContext):
        return context.mesh.size == 1
    return isinstance(context, sharding_impls.ShardingContext) and context.num_devices == 1


def replicated(ctx: mlir.LoweringRuleContext, values: Sequence[Any]) -> list[Any]:
    """Return the results of a lowering as replicated arrays, in a program that XLA divides among devices.

    The result of JAX's own callbacks is only on the first device. If it is also a result of the program, JAX makes an
    array of it that no other program accepts: "Cannot convert GSPMDSharding {maximal device=0}". Tried on jax 0.10.2.
    """
    from jax._src import sharding_impls
    from jax._src.interpreters import mlir as private

    whole = sharding_impls.NamedSharding(jax.sharding.AbstractMesh((), ()), jax.sharding.PartitionSpec())

    def constrained(value: Any, aval: Any) -> Any:
        if private.config.use_shardy_partitioner.value:
            sharding: Any = whole._to_sdy_sharding(aval.ndim)
        else:
            sharding = whole._to_xla_hlo_sharding(aval.ndim).to_proto()
        return private.wrap_with_sharding_op(ctx, value, aval, sharding)

    return list(map(constrained, values, ctx.avals_out))


# The effect of `io_callback(ordered=True)`. Tried on jax 0.10.2. `jax.experimental` exports the function `io_callback`
# only, and a primitive that lowers to it must have the same effect.
ORDERED_EFFECT: Any = callback._OrderedIOEffect


def add_linearization(primitive: Any, rule: Callable) -> None:
    """Register ``rule(is_vjp, nonzeros, *primals, **params)``, used by grad, vjp and linearize but not by jvp.

    The rule returns the results, a list of whether the tangent of each may be nonzero, the residuals, and
    ``linearized(residuals, *tangents)``. Tried on jax 0.10.0 to 0.12.0.1; from 0.11.1 on JAX expects a second kind of
    residuals too, for which None is returned. The rule lets JAX distinguish reverse mode, which needs residuals, from
    forward mode; `jax.interpreters.ad` does not export the table of rules. Without this rule JAX uses the JVP rule, and
    the forward runs twice.
    """
    from jax._src.interpreters import ad

    def with_structured_residuals(*args: Any, **params: Any) -> Any:
        results, nonzeros, residuals, linearized = rule(*args, **params)
        return results, nonzeros, residuals, None, lambda saved, _, *tangents: linearized(saved, *tangents)

    since = (0, 11, 1)
    ad.primitive_linearizations[primitive] = rule if jax.__version_info__ < since else with_structured_residuals


def unify_varying_axes(args: Sequence[Any]) -> Sequence[Any]:
    """Give all arguments the same varying mesh axes inside shard_map, as JAX's own primitives do.

    Tried on jax 0.10.0 and 0.10.2, where JAX's helper has different names. Without this step, the gradient of an
    argument that is the same on every shard is not summed over the shards. The public `jax.lax.pcast` needs the mesh
    axes, which only this helper computes.
    """
    unify = getattr(core, "auto_insert_reshard", None) or core.standard_insert_pvary  # type: ignore[attr-defined]
    return unify(*args)


def call_aval(shape: tuple[int, ...], dtype: np.dtype, in_avals: Sequence[Any]) -> Any:
    """Return the abstract value of a result, which varies over the same mesh axes as the (unified) arguments.

    Tried on jax 0.10.2. ShapedArray is public; its field that holds the axes is not.
    """
    for operand in in_avals:
        varying = getattr(operand, "manual_axis_type", None)
        if varying is not None and not varying.empty:
            sharding = jax.sharding.NamedSharding(
                operand.sharding.mesh, jax.sharding.PartitionSpec(*[None] * len(shape))
            )
            return operand.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)
    return jax_core.ShapedArray(shape, dtype)
