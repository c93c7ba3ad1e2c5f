"""Calling torch from JAX without jtbridge, the way notebooks do it: for comparison only.

A `jax.custom_vjp` with two `jax.pure_callback`s: one for the value, and one that computes everything again for the
gradient. The result's shape has to be written down, every call copies its arrays, `vmap` loops, and there is no
forward mode and no second derivative.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch


def by_hand(fn: Callable[..., torch.Tensor], out: jax.ShapeDtypeStruct) -> Callable[..., jax.Array]:
    """Return the torch function `fn` of pytrees as a JAX function. `out` is its result's shape and dtype."""

    def value(*args: Any) -> np.ndarray:
        with torch.no_grad():
            return fn(*jax.tree.map(_to_torch, args)).numpy()

    def gradient(args: Any, cotangent: Any) -> list[np.ndarray]:
        leaves, tree = jax.tree.flatten(jax.tree.map(_to_torch, args))
        floats = [leaf.requires_grad_() for leaf in leaves if leaf.is_floating_point()]
        result = fn(*jax.tree.unflatten(tree, leaves))
        return [g.numpy() for g in torch.autograd.grad(result, floats, _to_torch(cotangent))]

    def call(*args: Any) -> jax.Array:
        return jax.pure_callback(value, out, *args, vmap_method="sequential")

    def forward(*args: Any) -> tuple[jax.Array, Any]:
        return call(*args), args

    def backward(args: Any, cotangent: jax.Array) -> Any:
        leaves, tree = jax.tree.flatten(args)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves if _is_float(x)]
        grads = iter(jax.pure_callback(gradient, shapes, args, cotangent, vmap_method="sequential"))
        return jax.tree.unflatten(
            tree, [next(grads) if _is_float(x) else np.zeros(x.shape, jax.dtypes.float0) for x in leaves]
        )

    # `forward` must not refer to `differentiable`: JAX's caches would then keep it for ever.
    differentiable = jax.custom_vjp(call)
    differentiable.defvjp(forward, backward)
    return differentiable


def _is_float(x: jax.Array) -> bool:
    return jax.numpy.issubdtype(x.dtype, jax.numpy.floating)


def _to_torch(x: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        # The arrays are JAX's and read-only. If `fn` writes to its arguments, nothing here stops it.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(np.asarray(x))
    return tensor.long() if tensor.dtype == torch.int32 else tensor
