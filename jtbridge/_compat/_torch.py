"""What can be asked of torch, of its modes and of its tensors, but not by a public name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._C._functorch as functorch_bindings

# Tried on torch 2.13. The type of `torch.ops.aten.sin.default`: its schema tells what an operator reads and writes.
from torch._ops import OpOverload as OpOverload

# Tried on torch 2.13. Public torch has no shape inference without running; torch.export builds on this mode.
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedFakeTensorException, UnsupportedOperatorException

# Tried on torch 2.13. TorchDispatchMode is documented, but its module has an underscore.
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Tried on torch 2.11 to 2.15. Inside a mode this calls an operator past all the others, for real.
outside_modes: Callable = _python_dispatch._disable_current_modes

# Tried on torch 2.13: how deep torch function modes are stacked on this thread (default device among them).
has_torch_modes: Callable[[], int] = torch._C._len_torch_function_stack


# Tried on torch 2.13: what torch.nn.utils.rnn calls, and what can be told by a torch function mode.
pack_padded_sequence: Callable = torch._pack_padded_sequence


pad_packed_sequence: Callable = torch._pad_packed_sequence


# Tried on torch 2.13: whether autocast is on for any device. The public query takes 0.2 us per device type.
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled


def is_tracing_exception(error: BaseException) -> bool:
    """Whether an exception is one that torch raises for tensors without values alone. Tried on torch 2.13."""
    of_fake_tensors = (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
    return isinstance(error, of_fake_tensors) or type(error).__module__ == "torch.fx.experimental.symbolic_shapes"


def once_differentiable_in(tensors: Sequence[torch.Tensor]) -> str | None:
    """The name of an `autograd.Function` marked `once_differentiable` in the graph behind some tensors, if any.

    Tried on torch 2.13. Asked for a second derivative of it, torch.func and `allow_unused=True` give zeros in silence.
    `_forward_cls` is the one way from a graph node to its Function.
    """
    wrapper = torch.autograd.function.once_differentiable(lambda ctx: None)
    for node in _graph_nodes(tensors):
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and getattr(function.backward, "__code__", None) is wrapper.__code__:
            return function.__name__
    return None


def materializes_gradients(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether zeros for the gradient of a result that nobody uses are as good as none, which is what torch passes on.

    An `autograd.Function` with several results may tell them apart, after ``ctx.set_materialize_grads(False)``. Tried
    on torch 2.13. `_forward_cls` tells that a node is of a Function, `_input_metadata` how many results it has.
    """
    return not any(
        hasattr(type(node), "_forward_cls") and len(node._input_metadata) > 1 for node in _graph_nodes(tensors)
    )


def _graph_nodes(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The nodes of the autograd graph behind some tensors."""
    found = list(dict.fromkeys(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None))
    seen = set(found)
    for node in found:  # which grows
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                found.append(following)
    return found


def differentiating() -> bool:
    """Whether a torch.func derivative, not only torch.vmap, is running on this thread. Tried on torch 2.13."""
    stack = functorch_bindings.get_interpreter_stack() or []
    return any(interpreter.key() != functorch_bindings.TransformType.Vmap for interpreter in stack)


def in_forward_mode() -> bool:
    """Whether tangents are on their way through torch on this thread. Tried on torch 2.13; no public query."""
    return torch.autograd.forward_ad._current_level >= 0


def has_saved_tensor_hooks() -> bool:
    """Whether ``torch.autograd.graph.saved_tensors_hooks`` is active on this thread. Tried on torch 2.13."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # type: ignore[attr-defined]


def inside_functorch() -> bool:
    """Whether a torch.func transform is running on this thread. Tried on torch 2.13; no public query."""
    return functorch_bindings.maybe_current_level() is not None


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


def replace_fake(fake: FakeTensor, tensor: torch.Tensor) -> None:
    """Have everybody who holds a fake tensor hold another tensor. Tried on torch 2.11 to 2.15.

    `swap_tensors` is public, but refuses what weak references are held of, as fake modes do for as long as they live.

    Raises:
        RuntimeError: torch itself refers to it, for a view of it or a graph.
    """
    fake.fake_mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
    torch.utils.swap_tensors(fake, tensor)


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


def has_batching_rule(operator: OpOverload) -> bool:
    """Whether ``register_vmap`` gave a custom operator a rule of its own. Tried on torch 2.11, 2.13 and 2.15."""
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(operator._schema.name)
    return definition is not None and definition._vmap_fn is not None


def qualified_operator_name(operator: Any) -> str | None:
    """``namespace::name`` of ``torch.ops.namespace.name`` or of a custom operator's definition; None for others.

    Tried on torch 2.13. Neither has a public name.
    """
    return getattr(operator, "_qualified_op_name", None) or getattr(operator, "_qualname", None)
