"""Private APIs that query torch, its operators and its tensors."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch._C._functorch as functorch_bindings
from torch._ops import HigherOrderOperator as HigherOrderOperator  # torch.cond calls one; no public class

# Tried on torch 2.13. The type of `torch.ops.aten.sin.default`: its schema states which arguments are read or written.
from torch._ops import OpOverload as OpOverload

# Tried on torch 2.13. Torch has no public shape inference that computes no values; torch.export builds on this mode.
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedFakeTensorException, UnsupportedOperatorException
from torch.nn.utils import parametrize

# Tried on torch 2.13. TorchDispatchMode is documented, but its module has an underscore.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Tried on torch 2.11 and 2.13. The type of `iter(DataLoader(...))`.
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

from ._torch_modes import inside_functorch, outside_functorch, was_left


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that does not import torch's compiler, which takes seconds. Tried on torch 2.13.

    Torch's own class imports the compiler to wrap `__torch_dispatch__` by ``torch._dynamo.disable``, so that a compiled
    function that runs in the mode does not compile the method. This class wraps the method only if the compiler is
    already imported.
    """

    _is_wrapped: ClassVar[bool]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Any:
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
        cls = type(self)
        if disable is not None and "_is_wrapped" not in cls.__dict__:
            cls.__torch_dispatch__ = disable(cls.__torch_dispatch__, wrapping=False)
            cls._is_wrapped = True
        return super().__enter__()


# Tried on torch 2.13. Every `FakeTensorMode` imports this module, and with it torch's compiler.
IMPORTED_BY_FAKE_TENSORS = "torch._dynamo.config"

# Tried on torch 2.13. `torch.nn.utils.rnn` calls these two functions, and a torch function mode can recognize them.
pack_padded_sequence: Callable = torch._pack_padded_sequence


pad_packed_sequence: Callable = torch._pad_packed_sequence


# Tried on torch 2.13. Returns whether autocast is on for any device. The public query takes 0.2 us per device type.
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled


def batches_taken(iterator: LoaderIterator) -> int:
    """Return how many batches a DataLoader's iterator has given. Tried on torch 2.11 and 2.13; no public query."""
    return iterator._num_yielded


def global_module_hooks() -> dict[str, Any]:
    """Return the hooks that run in every module's calls, by the names of torch's variables. Tried on torch 2.13."""
    names = [f"_global_forward_{kind}" for kind in ("hooks", "pre_hooks", "hooks_with_kwargs", "hooks_always_called")]
    return {name: vars(torch.nn.modules.module)[name] for name in names}


def is_tracing_exception(error: BaseException) -> bool:
    """Return whether an exception is one that torch raises for fake tensors only. Tried on torch 2.13."""
    of_fake_tensors = (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
    return isinstance(error, of_fake_tensors) or type(error).__module__ == "torch.fx.experimental.symbolic_shapes"


def once_differentiable_in(tensors: Sequence[torch.Tensor]) -> str | None:
    """Return the name of an `autograd.Function` marked `once_differentiable` in the graph of some tensors, or None.

    Tried on torch 2.13. For a second derivative of such a Function, torch.func and `allow_unused=True` silently return
    zeros. `_forward_cls` is the only way from a graph node to its Function.
    """
    wrapper = torch.autograd.function.once_differentiable(lambda ctx: None)
    for node in graph_nodes(tensors):
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and getattr(function.backward, "__code__", None) is wrapper.__code__:
            return function.__name__
    return None


def has_lost_gradient(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the autograd graph of some tensors has an operator without a kernel for autograd.

    Tried on torch 2.13. Such an operator leaves a node that passes on no gradient, and warns if it is differentiated.
    """
    return any(node.name() == "torch::autograd::WarnNotImplemented" for node in graph_nodes(tensors))


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor under all wrappers of `torch.func`. Tried on torch 2.13; there is no public query."""
    while functorch_bindings.is_functorch_wrapped_tensor(tensor):
        tensor = functorch_bindings.get_unwrapped(tensor)
    return tensor


def has_own_dispatch(tensor: torch.Tensor) -> bool:
    """Return whether the class of a tensor defines `__torch_dispatch__`."""
    plain: Any = torch.Tensor
    of_class: Any = type(tensor)
    return of_class.__torch_dispatch__ is not plain.__torch_dispatch__


def is_of_trace(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a fake or a functional tensor, with which torch traces.

    Tried on torch 2.13. The module of the class is compared, because the import of `FunctionalTensor` is slow.
    """
    return type(tensor).__module__.startswith("torch._subclasses.")


def is_of_outer_trace(tensor: torch.Tensor) -> bool:
    """Return whether a tensor belongs to a trace or a torch.func transform that this code is not inside of.

    Tried on torch 2.13.
    """
    if functorch_bindings.is_functorch_wrapped_tensor(tensor):
        return functorch_bindings.maybe_current_level() is None
    mode = getattr(tensor, "fake_mode", None) if is_of_trace(tensor) else None
    if mode is None or not was_left(mode):
        return False
    now = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    # While torch.compile traces, an inner trace may use the same mode, and read its tensors outside of the mode.
    return now is not mode and (now is not None or not torch.compiler.is_compiling())


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor itself has memory: it is neither fake nor a wrapper. Tried on torch 2.11 and 2.13."""
    is_wrapper = functorch_bindings.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor)
    return not is_wrapper and not has_own_dispatch(tensor)


def unseen_by_function_modes() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no torch-function mode takes an access to a tensor for one by the user's code."""
    return torch._C.DisableTorchFunction()


@contextlib.contextmanager
def gradients_required(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let floating-point and complex tensors require a gradient inside the block, as parameters do.

    Inside `torch.func.vmap` torch refuses `requires_grad_`, so the flag is set on the tensor under the batched one,
    outside of `torch.func`. Tried on torch 2.13.
    """
    with unseen_by_function_modes():
        leaves = [leaf for leaf in map(innermost, tensors) if not leaf.requires_grad]
    leaves = [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]

    def set_all(value: bool) -> None:
        with outside_functorch() if inside_functorch() else contextlib.nullcontext(), unseen_by_function_modes():
            for leaf in leaves:
                if leaf.is_leaf:
                    leaf.requires_grad_(value)

    set_all(True)
    try:
        yield
    finally:
        set_all(False)


@contextlib.contextmanager
def without_cached_weights() -> Iterator[None]:
    """Switch off torch's caches of computed weights inside the block, so that no call uses the weights of another.

    `torch.nn.utils.parametrize.cached` stores a computed weight by the id of its module, and `torch.autocast` a
    converted weight by its tensor, both until their outermost block ends. Tried on torch 2.13; torch has no public
    access to the first cache.
    """
    cache, is_enabled = parametrize._cache, torch.is_autocast_cache_enabled()
    if parametrize._cache_enabled:
        parametrize._cache = {}
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(is_enabled)
        if parametrize._cache_enabled:
            parametrize._cache = cache


def mark_as_parameter(tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    """Make ``isinstance(tensor, torch.nn.Parameter)`` true for a tensor, which stays the same object.

    The tensor gets the attributes that the user gave to the parameter. `torch.nn.Parameter(tensor)` returns another
    tensor, outside the graph of the first. Tried on torch 2.13.
    """
    vars(tensor).update(vars(parameter))
    tensor._is_param = True  # type: ignore[attr-defined]


def custom_backwards(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the nodes of an `autograd.Function` in the graph of some tensors. Tried on torch 2.13.

    Nodes of `torch.cond` and similar functions are left out: they fail in a backward under a dispatch mode.
    """
    nodes = [node for node in graph_nodes(tensors) if isinstance(node, torch.autograd.function.BackwardCFunction)]
    of_torch = "torch._higher_order_ops."
    return [node for node in nodes if not node._forward_cls.__module__.startswith(of_torch)]  # type: ignore[attr-defined]


def backwards_that_may_detach(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the nodes in the graph of some tensors whose backward may compute a gradient outside autograd.

    These are the nodes of an `autograd.Function`, and torch's own nodes for the values of a sparse tensor, some of
    whose backwards call operators that are not differentiable. Tried on torch 2.13.
    """
    return [
        node
        for node in graph_nodes(tensors)
        if isinstance(node, torch.autograd.function.BackwardCFunction)
        or type(node).__name__.startswith(("Sparse", "Values"))
    ]


@contextlib.contextmanager
def detached_backwards(tensors: Sequence[torch.Tensor]) -> Iterator[list[tuple[str, bool]]]:
    """Record, inside the block, the backwards that compute their gradient outside autograd.

    For autograd, such a gradient does not depend on the cotangent, so its derivative is silently zero. A backward is
    recorded if its cotangent requires a gradient and a gradient that it returns does not, unless that gradient is zero
    (a fake gradient counts as not zero). Tried on torch 2.13.

    Args:
        tensors: the tensors whose autograd graph is examined.

    Returns:
        A list that is filled in the block: the name of each node, and whether it belongs to an `autograd.Function`.
    """
    found: list[tuple[str, bool]] = []

    def note(node: Any, gradients: Sequence[Any], cotangents: Sequence[Any]) -> None:
        if any(innermost(ct).requires_grad for ct in cotangents if ct is not None):
            constant = [g for g in (innermost(g) for g in gradients if g is not None) if not g.requires_grad]
            if any(isinstance(g, FakeTensor) or bool(g.to_dense().any()) for g in constant):
                is_function = isinstance(node, torch.autograd.function.BackwardCFunction)
                found.append((type(node).__name__.rstrip("0123456789").removesuffix("Backward"), is_function))

    handles = [node.register_hook(functools.partial(note, node)) for node in backwards_that_may_detach(tensors)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def materializes_gradients(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a cotangent of zeros for an unused result has the same effect as no cotangent.

    Torch passes no cotangent for an unused result. An `autograd.Function` with several results may distinguish the two,
    after ``ctx.set_materialize_grads(False)``. Tried on torch 2.13. A node with `_forward_cls` belongs to a Function;
    `_input_metadata` has one entry for each of its results.
    """
    return not any(
        hasattr(type(node), "_forward_cls") and len(node._input_metadata) > 1 for node in graph_nodes(tensors)
    )


def graph_nodes(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the nodes of the autograd graph of some tensors."""
    with torch._C.DisableTorchFunction():  # a torch function mode must not attribute this access to the user's function
        found = list(dict.fromkeys(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None))
    seen = set(found)
    for node in found:  # the loop appends to `found`
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                found.append(following)
    return found


# Nodes whose batching rule ignores the batch axis of a cotangent if no tensor that they saved has one (torch 2.13), and
# the names of these tensors.
_WRONG_FOR_COTANGENTS = {"CdistBackward0": ("_saved_x1", "_saved_x2")}


def wrong_batching_reason(tensors: Sequence[torch.Tensor], *, again: bool) -> str | None:
    """Return why a running torch.vmap would differentiate a node in the graph of some tensors wrongly, or None.

    The node saved no tensor that is batched by this torch.vmap; or the gradients will be differentiated `again`, and
    the node is one of `det`, which then uses singular vectors. Tried on torch 2.13.
    """
    stack = functorch_bindings.get_interpreter_stack() or []
    running = {each.level() for each in stack if each.key() == functorch_bindings.TransformType.Vmap}
    if not running and not (again and stack):
        return None
    for node in graph_nodes(tensors):
        names = _WRONG_FOR_COTANGENTS.get(node.name())
        if names is not None and running - {level for name in names for level in _batch_levels(getattr(node, name))}:
            return "torch.vmap is wrong for the gradient of `cdist` of the same points in each row"
        if again and node.name() == "LinalgDetBackward0":
            return "torch.vmap is wrong for the second derivative of `det` at equal singular values"
    return None


def _batch_levels(tensor: torch.Tensor) -> Iterator[int]:
    """Yield the levels of torch.func at which a tensor is a batch."""
    while functorch_bindings.is_functorch_wrapped_tensor(tensor):
        if functorch_bindings.is_batchedtensor(tensor):
            yield functorch_bindings.maybe_get_level(tensor)
        tensor = functorch_bindings.get_unwrapped(tensor)


def differentiating() -> bool:
    """Return whether a torch.func derivative, not only torch.vmap, is running on this thread. Tried on torch 2.13."""
    stack = functorch_bindings.get_interpreter_stack() or []
    return any(interpreter.key() != functorch_bindings.TransformType.Vmap for interpreter in stack)


def in_backward() -> bool:
    """Return whether torch's autograd runs this code in a backward; no public query. Tried on torch 2.13."""
    return torch._C._current_graph_task_id() != -1


def has_saved_tensor_hooks() -> bool:
    """Return whether ``torch.autograd.graph.saved_tensors_hooks`` is active on this thread. Tried on torch 2.13."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # type: ignore[attr-defined]


def functorch_level(tensor: torch.Tensor) -> int:
    """Return the depth of the torch.func transform that wrapped a tensor last; -1 for none. Tried on torch 2.13."""
    return functorch_bindings.maybe_get_level(tensor)


def has_cpu_kernel(schema: Any) -> bool:
    """Return whether an operator has its own CPU kernel, not one composed of other operators. Tried on torch 2.13."""
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")


def is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether torch conjugates, negates or zeroes a tensor when it is read, so its memory holds other values.

    Tried on torch 2.13. Autograd returns lazy zeros, which have no public query.
    """
    return tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()


def is_zero(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a lazy zero of autograd, which may be on the meta device. Tried on torch 2.13."""
    return tensor._is_zerotensor()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor detached from autograd. If it :func:`is_lazy`, return a copy whose memory holds its values."""
    values = tensor.detach() if tensor.requires_grad else tensor
    if is_zero(values):
        values = torch.zeros_like(values, memory_format=torch.contiguous_format)
    return values.resolve_conj().resolve_neg()


def storage_id(tensor: torch.Tensor) -> int:
    """Return an identifier of a tensor's storage. Tried on torch 2.13; fake storages have no `data_ptr`."""
    with torch._C.DisableTorchFunction():  # hides this access from modes that record it
        return tensor.untyped_storage()._cdata


def writes(tensor: torch.Tensor) -> int:
    """Return the number of writes to a tensor that autograd counts, 0 for a tensor of inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def replace_fake(fake: FakeTensor, tensor: torch.Tensor) -> None:
    """Replace a fake tensor by another tensor in everything that refers to it. Tried on torch 2.11 to 2.15.

    `swap_tensors` is public, but refuses tensors with weak references. A fake mode holds weak references to its tensors
    as long as it exists, so they are cleared first.

    Raises:
        RuntimeError: torch's own objects refer to the fake tensor, such as a view of it or an autograd graph.
    """
    fake.fake_mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
    try:
        torch.utils.swap_tensors(fake, tensor)
    except AssertionError as error:  # torch asserts that the tensor has an autograd node
        raise RuntimeError(str(error)) from error


def torch_pytree_node(cls: type) -> tuple[Callable, Callable] | None:
    """Return (flatten, unflatten) of a class that is registered as a torch pytree node, or None.

    Tried on torch 2.13. Hugging Face declares ModelOutput in this registry, which has no public lookup.
    """
    from torch.utils import _pytree

    node = _pytree.SUPPORTED_NODES.get(cls)
    return None if node is None else (node.flatten_fn, node.unflatten_fn)


def unwrap_compiled(fn: Any) -> Any:
    """Return the function or module that torch.compile wrapped; any other callable as it is.

    Only torch's own wrappers are unwrapped: `functools.wraps` copies their attributes to a function that does more, a
    proxy has every attribute, and a module of the user may have one of the same name. Tried on torch 2.13; compiling
    inside an XLA callback can hang.
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None and isinstance(fn, compiler.OptimizedModule):
        return fn if _has_hooks(fn) else fn._orig_mod
    while isinstance(fn, types.FunctionType) and str(fn.__globals__.get("__name__")).startswith("torch._dynamo."):
        wrapped = vars(fn).get("_torchdynamo_orig_callable")
        if wrapped is None:
            return fn
        fn = wrapped
    return fn


def _has_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module has hooks of its own. Tried on torch 2.13; no public query."""
    return any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks"))


def triton_wrapper_class() -> Any:
    """Return the class of the results of ``torch.library.wrap_triton``. Tried on torch 2.13; it is not public."""
    from torch._higher_order_ops.triton_kernel_wrap import TraceableTritonKernelWrapper

    return TraceableTritonKernelWrapper


def function_of_triton_operator(operator: OpOverload) -> Callable | None:
    """Return the function of an operator of ``torch.library.triton_op``, else None. Tried on torch 2.13; not public."""
    from torch._library.custom_ops import OPDEFS
    from torch._library.triton import triton_ops_to_kernels

    name = operator._schema.name
    return OPDEFS[name]._abstract_fn if name in triton_ops_to_kernels else None


def has_batching_rule(operator: OpOverload) -> bool:
    """Return whether ``register_vmap`` gave a custom operator a batching rule. Tried on torch 2.11, 2.13 and 2.15."""
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(operator._schema.name)
    return definition is not None and definition._vmap_fn is not None


def torch_batches(operator: OpOverload) -> bool:
    """Return whether torch.vmap has a rule for one of torch's operators, so that it does not run row by row.

    Tried on torch 2.13. The dispatcher has no public query.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "FuncTorchBatched")


def qualified_operator_name(operator: Any) -> str | None:
    """Return ``namespace::name`` of ``torch.ops.namespace.name`` or of a custom operator's definition; None for others.

    Tried on torch 2.13. Neither attribute is public.
    """
    return getattr(operator, "_qualified_op_name", None) or getattr(operator, "_qualname", None)
