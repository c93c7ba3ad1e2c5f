"""The ways to make a torch function a JAX function, behind one signature."""

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import torch

from benchmarks._results import BY_HAND, CALLBACK, DLPACK, ISLANDS, TORCH2JAX, TORCHAX, XLA, Calls, Failed

# Takes a torch function and example arguments (pytrees of tensors, which some ignore), and returns a JAX function.
Wrapper = Callable[..., Callable[..., Any]]


def _jtbridge(backend: str) -> Wrapper:
    def wrap(fn: Callable[..., Any], *examples: Any) -> Callable[..., Any]:
        import jtbridge

        return jtbridge.wrap(fn, backend=backend)

    return wrap


def _torch2jax(fn: Callable[..., Any], *examples: Any) -> Callable[..., Any]:
    from wrap_torch2jax import torch2jax

    return torch2jax(fn, *examples)


def _by_hand(fn: Callable[..., Any], *examples: Any) -> Callable[..., Any]:
    from examples.by_hand import by_hand

    with torch.no_grad():
        out = to_jax(fn(*examples))
    return by_hand(fn, jax.ShapeDtypeStruct(out.shape, out.dtype))


def _torchax(fn: Callable[..., Any], *examples: Any) -> Callable[..., Any]:
    if reason := _why_torchax_cannot():
        raise ImportError(reason)
    from torchax import default_env, interop

    def call(*args: Any) -> Any:
        with default_env():
            return interop.jax_view(fn)(*args)

    return call


@cache
def _why_torchax_cannot() -> str:
    """Return why torchax cannot be imported, or "". Try it in another process: a failed import would change torch."""
    tried = subprocess.run([sys.executable, "-c", "import torchax"], capture_output=True, text=True, check=False)
    return tried.stderr.strip().splitlines()[-1] if tried.returncode else ""


WRAPPERS: dict[str, Wrapper] = {
    XLA: _jtbridge("xla"),
    ISLANDS: _jtbridge("auto"),
    DLPACK: _jtbridge("dlpack"),
    CALLBACK: _jtbridge("callback"),
    TORCH2JAX: _torch2jax,
    BY_HAND: _by_hand,
    TORCHAX: _torchax,
}


def wrap_all(
    fn: Callable[..., Any],
    *examples: Any,
    then: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.jit,
    on: tuple[Any, ...] | None = None,
) -> Calls:
    """Return, for each contestant, a call of `then(fn as a JAX function)` that waits for the result.

    The arguments are the tensors `on`, or the examples if `on` is None, as JAX arrays.
    """
    arrays = jax.tree.map(to_jax, examples if on is None else on)
    calls: Calls = {}
    for name, wrap in WRAPPERS.items():
        try:
            function = then(wrap(fn, *examples))
        except Exception as error:  # noqa: BLE001 - that a contestant fails is a result
            calls[name] = Failed.from_error(error)
        else:
            calls[name] = lambda function=function: jax.block_until_ready(function(*arrays))
    return calls


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """Copy a tensor to a JAX array. As in JAX, int64 becomes int32 while x64 is off."""
    if tensor.dtype is torch.bfloat16:  # NumPy has no such dtype
        return jnp.array(tensor.detach().float().numpy(), jnp.bfloat16)
    return jnp.array(tensor.detach().numpy())
