"""Conversions outside a wrapped function: :func:`jtbridge.to_jax` and :func:`jtbridge.to_torch`."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import numpy as np
import torch

from jtbridge._compat import SharedTensor, is_lazy, run_outside_transforms
from jtbridge.errors import ArgumentError, DeviceError

from .array_types import ArrayType, has_values, is_dense, kind_of_layout
from .dtypes import canonical_dtype, numpy_dtype, torch_dtype
from .gpu_memory import copied_to_xla, shared_with_torch, shared_with_xla
from .host_memory import reader, to_canonical_numpy


def to_jax(tree: Any, *, copy: bool = True) -> Any:
    """Turn every torch tensor of a tree into a JAX array of the same shape, dtype and values.

    Args:
        tree: a JAX pytree with tensors of any shape and strides; conjugate and negative views and tensors that
            require grad included (they are resolved and detached). Other leaves are left alone. 64-bit dtypes
            become 32-bit ones while x64 is off, as in JAX itself.
        copy: with True, the array has its own memory. With False, the array shares the tensor's memory through
            DLPack if possible: a later write to the tensor changes the array, so do not write to the tensor. A CPU
            tensor is copied all the same if it is not contiguous, is lazily conjugated or negated, or has a dtype that
            changes width. An array that shares memory is committed to its device, as all arrays from DLPack are.

    Raises:
        DTypeError: JAX has no such dtype.
        DeviceError: the tensor lies on a device that JAX does not have here.
        ArgumentError: the tensor is sparse or of another layout that JAX does not have, or has no values, because torch
            traces or transforms the code; or a leaf is a module, a generator, an iterator or a set of tensors; or
            `tree` is a function.

    Example:
        >>> import jtbridge, torch
        >>> jtbridge.to_jax({"w": torch.ones(2)})
        {'w': Array([1., 1.], dtype=float32)}

    Source: https://docs.jax.dev/en/latest/jax.dlpack.html
    """

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return tensor_to_jax(leaf, copy)
        if isinstance(leaf, set | frozenset) and any(isinstance(x, torch.Tensor) for x in leaf):
            raise ArgumentError(
                "`to_jax` converts tensors in ordered containers, but got a set, which has no order. Use a list."
            )
        for kind, what, remedy in _REFUSED:
            if isinstance(leaf, kind):
                raise ArgumentError(f"`to_jax` converts tensors in containers, but got {what}. {remedy}")
        return leaf

    if isinstance(tree, types.FunctionType):
        raise ArgumentError(
            "`to_jax` converts tensors, but got a function. A torch function becomes a JAX function by "
            "`jtbridge.wrap(f)`."
        )
    return jax.tree.map(convert, tree, is_leaf=lambda node: isinstance(node, _ITERATORS))


_ITERATORS = (types.GeneratorType, map, filter, zip, enumerate, reversed)
_REFUSED = (
    (torch.nn.Module, "a module", "Its tensors are `params, state = jtbridge.module(model).init()`."),
    (torch.Generator, "a generator", "JAX draws from keys: `jax.random.key(generator.initial_seed())`."),
    (
        _ITERATORS,
        "an iterator",
        "Make it a container: `dict(model.named_parameters())`, `list(...)`; or use `jtbridge.module(model).init()`.",
    ),
)


def to_torch(tree: Any, *, copy: bool = False) -> Any:
    """Turn every JAX array of a tree into a torch tensor of the same shape, dtype and values.

    Args:
        tree: a JAX pytree; NumPy arrays are converted too (always copied), other leaves are left alone.
        copy: with False, the tensor of an array on one device shares the array's memory through DLPack. The tensor
            refuses writes, in place or through a view, because a JAX array never changes. Writes after
            ``parameter.data = tensor``, to its storage and to its NumPy view are not detected. An array on several
            devices is gathered, which copies. With True, each tensor has its own CPU memory and can be written to.

    Raises:
        DTypeError: torch has no such dtype.
        DeviceError: the array lies on a device that torch does not have here.
        ArgumentError: `tree` is a function, or has an array that JAX traces, as inside ``jax.jit``, a masked array of
            NumPy or an iterator.

    Example:
        >>> import jax.numpy as jnp, jtbridge
        >>> jtbridge.to_torch(jnp.ones(2), copy=True)
        tensor([1., 1.])

    Source: https://docs.pytorch.org/docs/stable/dlpack.html
    """

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, jax.core.Tracer):
            raise ArgumentError(
                "`to_torch` converts arrays with values, but got an array that JAX traces. Pass it as an argument of a "
                "wrapped function, which gets it as a tensor."
            )
        if isinstance(leaf, jax.Array):
            return _to_torch(leaf, copy)
        if isinstance(leaf, np.ma.MaskedArray):
            raise ArgumentError("`to_torch` got a masked NumPy array, whose mask would be lost. Pass `x.filled(0)`.")
        if isinstance(leaf, np.ndarray):
            return _copy_as_tensor(leaf)
        if isinstance(leaf, _ITERATORS):
            raise ArgumentError("`to_torch` converts arrays in containers, but got an iterator. Make it a list.")
        return leaf

    if isinstance(tree, types.FunctionType):
        raise ArgumentError(
            "`to_torch` converts arrays, but got a function. A JAX function becomes a torch function by "
            "`jtbridge.to_torch_function(f)`."
        )
    return jax.tree.map(convert, tree, is_leaf=lambda node: isinstance(node, _ITERATORS))


@run_outside_transforms
def tensor_to_jax(tensor: torch.Tensor, copy: bool, describe: Callable[[], str] = lambda: "a tensor") -> jax.Array:
    """Return a tensor as a JAX array; `describe` names it in errors. See :func:`to_jax`."""
    if not is_dense(tensor):
        kind, dense = kind_of_layout(tensor)
        raise ArgumentError(f"{describe()} {kind}, which JAX does not have. Pass {dense}.")
    if not has_values(tensor):
        raise ArgumentError(
            f"{describe()} has no values, because torch is tracing or transforming (`torch.func`) the code that uses "
            "it. Pass it as an argument to a function of `jtbridge.to_torch_function`: its JAX function gets an array."
        )
    tensor = torch.ops.aten.detach.default(tensor)  # the method `detach` would count as the user's wish for no gradient
    dtype = numpy_dtype(tensor.dtype, describe)
    wanted = canonical_dtype(dtype)
    if tensor.device.type not in ("cpu", "cuda"):
        raise DeviceError(f"A tensor lies on device `{tensor.device}`, which JAX does not have. Move it with `.cpu()`.")
    if tensor.device.type == "cuda":
        shares = not copy and dtype == wanted and not is_lazy(tensor) and tensor.is_contiguous()
        return shared_with_xla(tensor) if shares else copied_to_xla(tensor)
    if not copy and dtype == wanted and not is_lazy(tensor) and tensor.is_contiguous() and tensor.numel():
        return jax.dlpack.from_dlpack(tensor)
    return jax.device_put(to_canonical_numpy(tensor))


def _to_torch(array: jax.Array, copy: bool) -> torch.Tensor:
    torch_dtype(array.dtype, "an array")
    devices = array.sharding.device_set
    platform = next(iter(devices)).platform
    if not array.is_fully_addressable and not array.is_fully_replicated:
        raise DeviceError(
            "An array has parts on devices of other processes, which torch cannot use in this one. Gather it first, on "
            "every process: `jax.experimental.multihost_utils.process_allgather(x, tiled=True)`."
        )
    if len(devices) > 1 or copy or not array.size:
        return _copy_as_tensor(np.asarray(array))
    if platform != "cpu" and not torch.cuda.is_available():
        raise DeviceError(
            f'An array lies on JAX\'s platform "{platform}", which torch does not have here. Move it with '
            "`jax.device_put(x, jax.devices('cpu')[0])`, or pass `copy=True`."
        )
    return SharedTensor(shared_with_torch(array))


def _copy_as_tensor(array: np.ndarray) -> torch.Tensor:
    memory = np.array(array, order="C")
    torch_dtype(memory.dtype, "an array")
    return reader(ArrayType(memory.shape, memory.dtype))(memory)
