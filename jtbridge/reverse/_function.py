"""`jtbridge.to_torch_function`: a JAX function as a torch function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from jtbridge.core.messages import kind_of
from jtbridge.errors import ArgumentError

from ._bound import Caller
from ._compiled import call_in_graph


def to_torch_function(f: Callable[..., Any] | None = None, *, int32: str = "int64") -> Any:
    """Make a JAX function a torch function.

    The result works eagerly, under torch's autograd to any order, in forward mode (`torch.autograd.forward_ad`), under
    ``torch.func`` (``grad``, ``vjp``, ``jvp``, ``vmap``, ``jacrev``, ``jacfwd``, ``hessian``, in any nesting), in
    ``torch.compile`` and in ``torch.export``. Derivatives are JAX's own, in torch's convention for complex numbers. JAX
    compiles the function once for each signature. On a CPU a large argument or result crosses without a copy, if it is
    contiguous and aligned. GPUs are experimental: two GPUs have run this.

    Inside a function of :func:`jtbridge.wrap` that is translated, `f` becomes part of the program.

    The arguments of a call may be any JAX pytrees. Torch tensors, NumPy arrays, JAX arrays and JAX keys reach `f` as
    JAX arrays. Every other leaf (Python numbers, strings, None, ...) reaches `f` as it is, and must be hashable:
    another value compiles `f` again. All tensors lie on one device, where `f` runs. `f` is a pure function, as for
    ``jax.jit``: values that it closes over are read when it is traced.

    Args:
        f: a JAX function of arrays, in any pytrees, to arrays in any pytree; jitted or not.
        int32: while x64 is off, JAX uses int32 where torch uses int64, so int32 results become int64. With "keep" they
            stay int32. 64-bit arguments become 32-bit ones while x64 is off, as in JAX itself.

    Returns:
        A function of the same arguments that returns `f`'s result with tensors for arrays. Each result has its own
        memory.

    Raises:
        ArgumentError: at once, for an `f` that is not a function of JAX; later, for an argument that JAX cannot have (a
            sparse tensor), for one that is neither a tensor nor hashable, and for a result that is not an array.
        DTypeError: JAX or torch does not have a dtype.
        DeviceError: tensors lie on several devices, or on a device that JAX does not have.
        JaxCallError: a compiled JAX program calls the torch function that calls `f`; a graph of ``torch.export``
            outlived `f`; or x64 was turned on or off after ``torch.compile`` traced the call. Exceptions of `f` itself
            are raised unchanged.

    Example:
        >>> import jax.numpy as jnp, jtbridge, torch
        >>> @jtbridge.to_torch_function
        ... def f(x):
        ...     return x**2 * jnp.sin(x)
        >>> torch.func.grad(torch.func.grad(f))(torch.tensor(0.7))
        tensor(3.1143)

    Source: https://docs.jax.dev/en/latest/notebooks/autodiff_cookbook.html
    """
    check_int32(int32)
    if f is None:
        return lambda function: to_torch_function(function, int32=int32)
    if isinstance(f, torch.nn.Module):
        raise ArgumentError("`to_torch_function` takes a JAX function, but got a torch module. Call the module itself.")
    if not callable(f):
        raise ArgumentError(f"`to_torch_function` takes a callable, but got {kind_of(f)}.")
    name = getattr(f, "__name__", None) or type(f).__name__
    return torch_function(Caller(f, name, keep_int32=int32 == "keep"), f)


def check_int32(int32: str) -> None:
    """Refuse an unknown value of the argument `int32`."""
    if int32 not in ("int64", "keep"):
        raise ArgumentError(f"`int32` must be 'int64' or 'keep', but it is {int32!r}.")


def torch_function(caller: Caller, f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `caller` as a function with the name and the documentation of `f`."""
    in_graph = call_in_graph(caller)

    @functools.wraps(f, updated=())
    def function(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return in_graph(args, kwargs)
        return caller(*args, **kwargs)

    return function
