"""The only home of private APIs and version differences.

Each entry says why the public API does not do, and on which version it was written. `make test`, which
needs neither Triton nor a GPU, was also run on torch 2.11.0 with jax 0.10.0 and on torch 2.15.0 with jax 0.10.2.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core as jax_core
import numpy as np
import torch
import torch._C._functorch as functorch_bindings
from jax.interpreters import mlir

# Tried on torch 2.13. The type of `torch.ops.aten.sin.default`: its schema tells what an operator reads and writes.
from torch._ops import OpOverload

# Tried on torch 2.13. Public torch has no shape inference without running; torch.export builds on this mode.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

# Tried on torch 2.13. TorchDispatchMode is documented, but its module has an underscore.
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import MutationError

__all__ = [
    "ORDERED_EFFECT",
    "TRACING",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "SharedTensor",
    "TorchDispatchMode",
    "add_linearization",
    "any_autocast",
    "autograd_place",
    "broken_assumption",
    "buffer_call",
    "call_aval",
    "cudnn_attention",
    "cudnn_version",
    "decomposition_of",
    "differentiating",
    "forgetting_graph_sources",
    "has_cpu_kernel",
    "has_saved_tensor_hooks",
    "has_torch_modes",
    "in_forward_mode",
    "inside_functorch",
    "is_lazy",
    "is_zero",
    "last_traced_node",
    "once_differentiable_in",
    "pack_padded_sequence",
    "pad_packed_sequence",
    "qualified_operator_name",
    "storage_id",
    "symbolic_shapes",
    "symbolic_tensors",
    "torch_pytree_node",
    "trace_joint",
    "tracing",
    "unify_varying_axes",
    "unwrap_compiled",
    "without_function_of_scores",
]

# Tried on torch 2.13: how deep torch function modes are stacked on this thread (default device among them).
has_torch_modes: Callable[[], int] = torch._C._len_torch_function_stack

# Tried on torch 2.13: what torch.nn.utils.rnn calls, and what can be told by a torch function mode.
pack_padded_sequence: Callable = torch._pack_padded_sequence
pad_packed_sequence: Callable = torch._pad_packed_sequence

# Tried on torch 2.13: whether autocast is on for any device. The public query takes 0.2 us per device type.
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Make ``torch.compiler.is_exporting()`` true: model code then avoids branching on data.

    Tried on torch 2.13. The flag has no public setter; without it Hugging Face's mask code reads tensor values. While
    it is set, a TorchScript module gets its arguments wrong (it is called with itself twice): there it is off.
    """
    before = torch.compiler._is_exporting_flag
    thread = threading.get_ident()

    def set_flag(module: torch.nn.Module, value: bool) -> None:
        if isinstance(module, torch.jit.ScriptModule) and threading.get_ident() == thread:
            torch.compiler._is_exporting_flag = value

    hooks = torch.nn.modules.module
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, torch.compiler, "_is_exporting_flag", before)
        entering = hooks.register_module_forward_pre_hook(lambda module, _: set_flag(module, before))
        leaving = hooks.register_module_forward_hook(lambda module, *_: set_flag(module, True), always_call=True)
        stack.callback(entering.remove)
        stack.callback(leaving.remove)
        torch.compiler._is_exporting_flag = True
        yield


def once_differentiable_in(tensors: Sequence[torch.Tensor]) -> str | None:
    """The name of an `autograd.Function` marked `once_differentiable` in the graph behind some tensors, if any.

    Tried on torch 2.13. Asked for a second derivative of it, torch.func and `allow_unused=True` give zeros in silence.
    `_forward_cls` is the one way from a graph node to its Function.
    """
    wrapper = torch.autograd.function.once_differentiable(lambda ctx: None)
    pending = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and getattr(function.backward, "__code__", None) is wrapper.__code__:
            return function.__name__
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return None


def differentiating() -> bool:
    """Whether a torch.func derivative, not only torch.vmap, is running on this thread. Tried on torch 2.13."""
    stack = functorch_bindings.get_interpreter_stack() or []
    return any(interpreter.key() != functorch_bindings.TransformType.Vmap for interpreter in stack)


def in_forward_mode() -> bool:
    """Whether tangents are on their way through torch on this thread. Tried on torch 2.13; no public query."""
    return torch.autograd.forward_ad._current_level >= 0


def cudnn_attention() -> Any:
    """JAX's lowerings of attention to cuDNN: ``_dot_product_attention_fwd_impl``, ``..._bwd_impl`` and their enums.

    Public is ``jax.nn.dot_product_attention(implementation="cudnn")``, which checks for a GPU when it is traced, has no
    forward mode and nothing for other platforms, and rounds the logarithm that the backward needs. Their arguments are
    tried on jax 0.10.2, 0.11.2 and 0.12.0, where a function of scores has come to them.

    Raises:
        ImportError: this JAX has other ones.
    """
    from jax._src.cudnn import fused_attention_stablehlo as module

    for name, parameters in _OF_CUDNN.items():
        found = set(inspect.signature(getattr(module, name)).parameters) - _OF_SCORES.keys()
        if found != set(parameters.split()):
            raise ImportError(f"`{name}` of JAX {jax.__version__} takes other arguments than those that are known")
    return module


_OF_BOTH = (
    "query key value bias q_seqlen kv_seqlen q_offsets kv_offsets page_table_k page_table_v "
    "scale seed dropout_rate variadic_args mask_type layout sliding_window_length"
)
_OF_CUDNN = {
    "_dot_product_attention_fwd_impl": f"{_OF_BOTH} is_training",
    "_dot_product_attention_bwd_impl": f"{_OF_BOTH} activation fwd_output grad_output",
}
_OF_SCORES = {"score_mod": None, "score_mod_args": ()}


def without_function_of_scores() -> dict[str, Any]:
    """What says so to :func:`cudnn_attention` where it has to be said: from jax 0.12 on."""
    parameters = inspect.signature(cudnn_attention()._dot_product_attention_fwd_impl).parameters
    return {name: value for name, value in _OF_SCORES.items() if name in parameters}


def cudnn_version() -> int | None:
    """The version of cuDNN beside JAX, as 91002 for 9.10.2; None if there is none. Tried on jax 0.10.2."""
    from jax._src.lib import cuda_versions

    try:
        return None if cuda_versions is None else cuda_versions.cudnn_get_version()
    except RuntimeError:
        return None


def has_saved_tensor_hooks() -> bool:
    """Whether ``torch.autograd.graph.saved_tensors_hooks`` is active on this thread. Tried on torch 2.13."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # type: ignore[attr-defined]


def inside_functorch() -> bool:
    """Whether a torch.func transform is running on this thread. Tried on torch 2.13; no public query."""
    return functorch_bindings.maybe_current_level() is not None


TRACING = threading.RLock()


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """For running a function to learn about it: exporting, and with warnings off.

    Torch warns of its own internals here, which would turn into wrong conclusions where warnings are errors; what
    concerns the user is said again when the function runs. One thread at a time: `make_fx` puts a wrapper in the place
    of ``nn.Module.__call__``, and two threads would leave it there. This lock is taken before those of modules.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled = logger.disabled
    with TRACING, exporting(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.disabled = True  # it prints the traceback of every exception, which is raised as well
        try:
            yield
        finally:
            logger.disabled = disabled


def has_cpu_kernel(schema: Any) -> bool:
    """Whether an operator has a kernel written for the CPU, not one made of others. Tried on torch 2.13."""
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor does not hold its values: it is conjugated, negated or zeroed when it is read.

    Tried on torch 2.13. Lazy zeros come out of autograd and have no public query.
    """
    return tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()


def is_zero(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of autograd's lazy zeros, which may lie on the meta device. Tried on torch 2.13."""
    return tensor._is_zerotensor()


def storage_id(tensor: torch.Tensor) -> int:
    """What tensors over the same memory have in common. Tried on torch 2.13; fake storages have no `data_ptr`."""
    return tensor.untyped_storage()._cdata


def torch_pytree_node(cls: type) -> tuple[Callable, Callable] | None:
    """(flatten, unflatten) of a class that is registered as a torch pytree node, else None.

    Tried on torch 2.13. The registry is how Hugging Face declares ModelOutput; it has no public lookup.
    """
    from torch.utils import _pytree

    node = _pytree.SUPPORTED_NODES.get(cls)
    return None if node is None else (node.flatten_fn, node.unflatten_fn)


def unwrap_compiled(fn: Callable) -> Callable:
    """The function behind torch.compile. Tried on torch 2.13; compiling inside an XLA callback can hang."""
    if isinstance(fn, torch.nn.Module):
        return getattr(fn, "_orig_mod", fn)
    return getattr(fn, "_torchdynamo_orig_callable", fn)


_ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def trace_joint(fn: Callable, args: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """The functional ATen graph, after autograd, of ``fn(*args)`` on fake tensors.

    Tried on torch 2.13. `make_fx` lives in an experimental module; torch.export functionalises with
    `dispatch_functionalize`. Writes are made functional only once autograd is out of the graph: on functional tensors
    autograd loses the gradient of sparse conversions, in silence.
    """
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    graph = make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    targets = [node.target for node in graph.graph.nodes]
    if any(isinstance(target, OpOverload) and target._schema.is_mutable for target in targets):
        # It counts as an effect, which is not made functional here. Where there is an error, the results tell too.
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten._linalg_check_errors.default):
            graph.graph.erase_node(node)
        again = torch.fx.Interpreter(graph).run  # unlike the graph itself it keeps what is noted of each node
        with preserve_node_meta():
            graph = make_fx(dispatch_functionalize(again), tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    _correct_types(graph)
    return graph


def _correct_types(graph: torch.fx.GraphModule) -> None:
    """Where torch has a wrong dtype for a result of an operator, the right one.

    Torch 2.11 takes the log-sum-exp of attention on doubles for floats; 2.13 does not.
    """
    for node in graph.graph.find_nodes(op="call_function", target=_ATTENTION_ON_CPU):
        out, log_sum_exp = node.meta["val"]
        if out.dtype == torch.float64 != log_sum_exp.dtype:
            node.meta["val"] = (out, log_sum_exp.to(torch.float64))
            for user in node.users:
                user.meta["val"] = node.meta["val"][user.args[1]]


def symbolic_tensors(
    shapes: Sequence[Sequence[tuple[int, bool]]], dtypes: Sequence[torch.dtype]
) -> tuple[list[torch.Tensor], Any]:
    """Fake tensors some of whose sizes are symbols, and the environment that collects what is assumed of these.

    Each size is (an example of it, whether it is a symbol); symbols with the same example are the same.

    Tried on torch 2.13. torch.export does this for whole modules only, and has no way back to the graph of a function
    after autograd.
    """
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    tensors = []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        kinds = [DimDynamic.DUCK if symbolic else DimDynamic.STATIC for _, symbolic in shape]
        real = torch.empty([size for size, _ in shape], dtype=dtype)
        tensors.append(mode.from_tensor(real, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds)))
    return tensors, environment


def symbolic_shapes(value: Any, symbols: dict[Any, torch.SymInt]) -> list[tuple[Any, ...] | None]:
    """The shapes of fake tensors with JAX's symbols for torch's (`symbols` maps the first to the second).

    Tried on torch 2.13. A size has no public form but its expression in sympy.
    """
    import sympy

    atoms = {size.node.expr: symbol for symbol, size in symbols.items()}

    def convert(size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        function = sympy.lambdify(list(atoms), size.node.expr, modules=[{"FloorDiv": lambda a, b: a // b}])
        return function(*atoms.values())

    tensors = value if isinstance(value, list | tuple) else [value]
    return [tuple(map(convert, t.shape)) if isinstance(t, torch.Tensor) else None for t in tensors]


def broken_assumption(environment: Any, sizes: Sequence[Any]) -> str | None:
    """Something that was assumed of symbolic sizes while tracing and does not hold for all of them, or None.

    Tried on torch 2.13. Guards have no public form; each is tried on a spread of sizes from 2 on, for torch treats no
    symbol as 0 or 1.
    """
    for size in sizes:
        if not isinstance(size, torch.SymInt) or environment.simplify(size.node.expr).is_number:
            return f"a size that must be {size}"
    for guard in environment.guards:
        symbols = sorted(guard.expr.free_symbols, key=str)
        for step in range(64):
            values = {
                s: (2, 3, 4, 5, 7, 8, 16, 31, 100, 1024, 4097)[(step * (i + 1)) % 11] for i, s in enumerate(symbols)
            }
            if guard.expr.subs(values) == False:  # noqa: E712  (a sympy relation)
                return str(guard.expr)
    return None


def autograd_place() -> tuple[int, bool]:
    """Which step of autograd runs on this thread: its number, and whether it is the backward of that step.

    Tried on torch 2.13. It is how torch.compile tells which forward operator a backward one belongs to.
    """
    node = torch._C._current_autograd_node()
    return (torch.autograd._get_sequence_nr() - 1, False) if node is None else (node._sequence_nr(), True)


def last_traced_node() -> torch.fx.Node | None:
    """The newest node of the graph that is being traced on this thread. Tried on torch 2.13; no public way to it."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)


def triton_wrapper_class() -> Any:
    """The class of what ``torch.library.wrap_triton`` returns. Tried on torch 2.13; it is nowhere public."""
    from torch._higher_order_ops.triton_kernel_wrap import TraceableTritonKernelWrapper

    return TraceableTritonKernelWrapper


def function_of_triton_operator(operator: OpOverload) -> Callable | None:
    """The function that ``torch.library.triton_op`` made an operator of. Tried on torch 2.13; it is nowhere public."""
    from torch._library.custom_ops import OPDEFS
    from torch._library.triton import triton_ops_to_kernels

    name = operator._schema.name
    return OPDEFS[name]._abstract_fn if name in triton_ops_to_kernels else None


def qualified_operator_name(operator: Any) -> str | None:
    """``namespace::name`` of ``torch.ops.namespace.name`` or of a custom operator's definition; None for others.

    Tried on torch 2.13. Neither has a public name.
    """
    return getattr(operator, "_qualified_op_name", None) or getattr(operator, "_qualname", None)


def decomposition_of(operator: OpOverload) -> Callable | None:
    """Torch's own decomposition of an operator, if it has one. Tried on torch 2.13.

    The public `torch.export.default_decompositions` holds fewer, for it keeps what its backends want whole.
    """
    from torch._decomp import decomposition_table

    found = decomposition_table.get(operator)
    if found is None and operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return operator.decompose
    return found


@contextlib.contextmanager
def forgetting_graph_sources() -> Iterator[None]:
    """Let go of the source text of the graph modules that are made inside.

    Tried on torch 2.13. Every GraphModule leaves its source in two caches that are never emptied, for tracebacks.
    """
    import linecache

    from torch.fx.graph_module import _loader

    before = set(_loader.eval_cache)
    try:
        yield
    finally:
        for key in set(_loader.eval_cache) - before:
            _loader.eval_cache.pop(key, None)
            linecache.cache.pop(key, None)


def buffer_call(
    ctx: mlir.LoweringRuleContext, callback: Callable, operands: Sequence[Any], *, gpu: bool
) -> Sequence[Any]:
    """Emit the custom call behind `jax.experimental.buffer_callback`: ``callback(ctx, *operands, *results)``.

    Tried on jax 0.10.2. The public function refuses multi-platform lowering and rebuilds pytrees at every call,
    which costs 2 us of 8. The executable keeps `callback` alive, and nothing else does.
    """
    from jax._src import ffi

    module_context = ctx.module_context
    module_context.add_host_callback(callback)
    index = np.uint64(len(module_context.host_callbacks) - 1)
    target = f"xla_buffer_python_{'gpu' if gpu else 'cpu'}_callback"
    return ffi.ffi_lowering(target)(ctx, *operands, index=index)


def _ordered_effect() -> Any:
    """The effect of `io_callback(ordered=True)`. Tried on jax 0.10.2.

    jax.experimental.io_callback exports the function only, and a primitive of our own that lowers to it has to
    carry the same effect.
    """
    from jax._src import callback

    return callback._OrderedIOEffect


ORDERED_EFFECT = _ordered_effect()


def add_linearization(primitive: Any, rule: Callable) -> None:
    """Register ``rule(is_vjp, nonzeros, *primals, **params)``, used by grad, vjp and linearize but not by jvp.

    It returns results, which of their tangents are not zero, residuals, and ``linearized(residuals, *tangents)``.
    Tried on jax 0.10.0 to 0.12.0; since 0.11.1 there is a place for residuals of another kind. It is how JAX tells a
    reverse-mode user, who wants residuals, from a forward-mode one; jax.interpreters.ad does not export the table.
    Without it the JVP rule is used, and the forward runs twice.
    """
    from jax._src.interpreters import ad

    def with_structured_residuals(*args: Any, **params: Any) -> Any:
        results, nonzeros, residuals, linearized = rule(*args, **params)
        return results, nonzeros, residuals, None, lambda saved, _, *tangents: linearized(saved, *tangents)

    since = (0, 11, 1)
    ad.primitive_linearizations[primitive] = rule if jax.__version_info__ < since else with_structured_residuals


def _helper_of_varying_axes() -> Callable[..., Sequence[Any]]:
    from jax._src import core

    return getattr(core, "auto_insert_reshard", None) or core.standard_insert_pvary  # type: ignore[attr-defined]


_unify = _helper_of_varying_axes()


def unify_varying_axes(args: Sequence[Any]) -> Sequence[Any]:
    """Give all arguments the same varying mesh axes inside shard_map, as JAX's own primitives do.

    Tried on jax 0.10.0 and 0.10.2, which call it differently. Without it an argument that is the same on every shard
    gets no sum over the shards in its gradient. The public `jax.lax.pcast` needs the mesh axes that only this helper
    works out.
    """
    return _unify(*args)


def call_aval(shape: tuple[int, ...], dtype: np.dtype, in_avals: Sequence[Any]) -> Any:
    """The abstract value of a result: as varying over mesh axes as the (unified) arguments.

    Tried on jax 0.10.2. ShapedArray is public, the field that holds the axes is not.
    """
    for operand in in_avals:
        varying = getattr(operand, "manual_axis_type", None)
        if varying is not None and not varying.empty:
            sharding = jax.sharding.NamedSharding(
                operand.sharding.mesh, jax.sharding.PartitionSpec(*[None] * len(shape))
            )
            return operand.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)
    return jax_core.ShapedArray(shape, dtype)


class SharedTensor(torch.Tensor):
    """A tensor over memory that must not be written to: in-place operators on it, or on its views, raise.

    Tried on torch 2.13. Torch has no read-only tensors, and its copy-on-write storages refuse foreign memory.
    """

    _inner: torch.Tensor

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> SharedTensor:
        shared = torch.Tensor._make_subclass(cls, tensor, tensor.requires_grad)
        shared._inner = tensor
        return shared

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        aliases = False
        for position, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name, args[position] if position < len(args) else None)
            if argument.alias_info is None or not _holds_shared(value):
                continue
            aliases = True
            if argument.alias_info.is_write:
                raise MutationError(
                    f"`{func}` writes to a tensor that shares the memory of a JAX array, which never changes. "
                    "Write to a `.clone()` of it, or convert with `jtbridge.to_torch(x, copy=True)`."
                )
        out = func(*_unshare(args), **_unshare(kwargs))
        return jax.tree.map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, out) if aliases else out

    def tolist(self) -> Any:
        """The values as nested lists (torch refuses this for subclasses)."""
        return self._inner.tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """A read-only NumPy view."""
        array = self._inner.numpy(force=force)
        array.flags.writeable = False
        return array


def _holds_shared(value: Any) -> bool:
    return any(isinstance(leaf, SharedTensor) for leaf in jax.tree.leaves(value))


def _unshare(tree: Any) -> Any:
    return jax.tree.map(lambda x: x._inner if isinstance(x, SharedTensor) else x, tree)
