"""While a function is traced, its launches of Triton kernels become operators of ours."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from jtbridge._compat import triton_wrapper_class
from jtbridge._triton import analysed_code, jit_function
from jtbridge.errors import LaunchError

from ._launch import Launch, bound
from ._operator import launch_operator, number_of
from ._written import written_parameters


def with_launches(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose launches are operators, for torch to run."""

    @functools.wraps(call)
    def run(*tensors: torch.Tensor) -> Any:
        with routed():
            return call(*tensors)

    return run


@contextlib.contextmanager
def routed() -> Iterator[list[str]]:
    """What this thread launches inside the block are operators.

    Yields a list that the names of the kernels are added to.
    """
    launched: list[str] = []
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:  # no kernel can have been made; one that is made inside the block is not seen
        yield launched
        return
    thread = threading.get_ident()
    before = jit.KernelInterface.__getitem__

    def getitem(kernel: Any, grid: Any) -> Any:
        if threading.get_ident() != thread:
            return before(kernel, grid)
        return lambda *args, **kwargs: launched.append(_launched(kernel, grid, args, kwargs))

    wrapper = triton_wrapper_class()
    run = wrapper.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return run(self, *args, **kwargs)
        return launched.append(_launched(self.kernel, self.grid, args, kwargs))

    jit.KernelInterface.__getitem__ = getitem
    wrapper.__call__ = call
    try:
        yield launched
    finally:
        jit.KernelInterface.__getitem__ = before
        wrapper.__call__ = run


def _launched(kernel: Any, grid: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Launch a kernel as an operator; its name."""
    launch, tensors = bound(kernel, grid, args, kwargs)
    if not tensors:
        raise LaunchError(f"Kernel `{launch.name}` is launched on no tensor.")
    dense = [_dense(tensor) for tensor in tensors]
    launch = dataclasses.replace(launch, written=_written(launch, dense))
    results = launch_operator(dense, number_of(launch))
    for position, result in zip(launch.written, results, strict=True):
        dense[position].copy_(result)
    return launch.name


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that a kernel sees behind a tensor, as a contiguous one: JAX knows no strides.

    Of a tensor that is only permuted this is the permutation back; of one with gaps, all that lies between its first
    and its last element.
    """
    if tensor.is_contiguous():
        return tensor
    order = sorted(range(tensor.ndim), key=lambda d: (-tensor.stride(d), -tensor.shape[d]))
    permuted = tensor.permute(order)
    if permuted.is_contiguous():
        return permuted
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    whole = tensor if tensor._base is None else tensor._base
    return whole.as_strided((span if tensor.numel() else 0,), (1,), tensor.storage_offset())


def _written(launch: Launch, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The positions of the tensors that a kernel writes; all of them where that cannot be told."""
    values = {**launch.values, **launch.configurations(tensors)[0].constants}
    for name, tensor in zip(launch.tensors, tensors, strict=True):
        values[name] = _example(tensor, is_number=name in launch.numbers)
    # With their types, for 1, 1.0 and True are equal.
    names = _written_names(jit_function(launch.kernel), tuple((n, type(v), v) for n, v in sorted(values.items())))
    return tuple(i for i, name in enumerate(launch.tensors) if names is None or name in names)


@functools.lru_cache(maxsize=256)  # a function that is called launches the same again and again
def _written_names(function: Any, arguments: tuple[tuple[str, type, Any], ...]) -> frozenset[str] | None:
    code = analysed_code(function, {name: value for name, _, value in arguments})
    names = written_parameters(code, function.arg_names)
    return None if names is None else frozenset(names)


def _example(tensor: torch.Tensor, *, is_number: bool) -> Any:
    """What stands for a tensor there: its dtype, or a number like the one that is read from it."""
    if not is_number:
        return tensor.dtype
    return 2.0 if tensor.dtype.is_floating_point else 2
