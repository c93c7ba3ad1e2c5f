"""Compare translated functions that contain chains with torch."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jtbridge
from jtbridge.capture import aten_graph

DTYPES = ("float32", "bfloat16", "float16")
TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> jax.Array:
    """Return normal numbers, the same in every run."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.dtype(dtype))


def operators(fn: Callable[..., Any], *arrays: Any, ours: bool = True) -> dict[str, int]:
    """Count the operators in the graph of a function: only those of chains, or all."""
    report = jtbridge.explain(jtbridge.wrap(fn, backend="xla"), *arrays)
    counts = {str(name).removesuffix(".default"): count for name, count in report.operators.items()}
    return {name: count for name, count in counts.items() if not ours or name.startswith("jtbridge.")}


def gradient_operators(fn: Callable[..., Any], *arrays: Any) -> dict[str, int]:
    """Count jtbridge's operators in the graph of a function's gradient by all its arguments."""
    from jtbridge.transforms import Vjp

    traced, _ = jtbridge.wrap(fn, backend="xla").prepared(arrays, {})
    wrt = tuple(i for i, type_ in enumerate(traced.in_types[: len(arrays)]) if type_.differentiable)
    outs = tuple(i for i, type_ in enumerate(traced.out_types) if type_.differentiable)
    nodes = aten_graph(Vjp(traced, wrt, outs)).graph.nodes
    names = [str(n.target).removesuffix(".default") for n in nodes if str(n.target).startswith("jtbridge.")]
    return dict(collections.Counter(names))


def loss(f: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Return a scalar from all results of `f`, with a different weight for each."""

    def of(*arrays: Any) -> jax.Array:
        total = jnp.zeros((), jnp.float32)
        for y in jax.tree.leaves(f(*arrays)):
            total += (
                jnp.sin(y.astype(jnp.float32))
                * jnp.arange(1.0, 1 + y.size, dtype=jnp.float32).reshape(y.shape)
                / y.size
            ).sum()
        return total

    return of


def torch_loss(fn: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Return the same scalar for a torch function."""

    def of(*tensors: torch.Tensor) -> torch.Tensor:
        out = fn(*tensors)
        total = torch.zeros(())
        for y in out if isinstance(out, tuple | list) else [out]:
            total = total + (y.float().sin() * torch.arange(1.0, 1 + y.numel()).reshape(y.shape) / y.numel()).sum()
        return total

    return of


def to_torch(arrays: Sequence[Any]) -> list[torch.Tensor]:
    """Convert arrays to tensors, and integers to int64."""
    tensors = [jtbridge.to_torch(x, copy=True) for x in arrays]
    return [x.long() if not x.is_floating_point() else x for x in tensors]


def assert_near(got: Any, want: Sequence[torch.Tensor], factor: float = 1.0) -> None:
    """Compare shapes, dtypes, and values to within the rounding of the dtype."""
    for g, w in zip(jax.tree.leaves(got), want, strict=True):
        assert g.shape == tuple(w.shape)
        assert str(g.dtype) == str(w.dtype).removeprefix("torch.")
        expected = w.detach().double().numpy()
        atol = TOLERANCE[str(g.dtype)] * factor * np.abs(expected).max(initial=1e-30)
        np.testing.assert_allclose(np.asarray(g, np.float64), expected, rtol=0, atol=atol)


def assert_matches_torch(fn: Callable[..., Any], *arrays: Any, second: bool = False, factor: float = 4.0) -> None:
    """Compare values and gradients with torch; with `second`, second derivatives too."""
    f = jtbridge.wrap(fn, backend="xla")
    tensors = to_torch(arrays)
    moving = tuple(i for i, x in enumerate(tensors) if x.is_floating_point())
    out = fn(*tensors)
    assert_near(jax.jit(f)(*arrays), out if isinstance(out, tuple | list) else [out], factor)
    for i in moving:
        tensors[i].requires_grad_()
    grads = torch.autograd.grad(torch_loss(fn)(*tensors), [tensors[i] for i in moving], materialize_grads=True)
    assert_near(jax.jit(jax.grad(loss(f), moving))(*arrays), grads, factor)
    assert_near(jax.grad(loss(f), moving)(*arrays), grads, factor)  # the forward keeps, the backward is apart
    if second:
        along = [jtbridge.to_torch(normal(*tensors[i].shape, seed=50 + i)).to(tensors[i].dtype) for i in moving]
        firsts = torch.autograd.grad(
            torch_loss(fn)(*tensors), [tensors[i] for i in moving], create_graph=True, materialize_grads=True
        )
        total = sum((g.float() * v.float()).sum() for g, v in zip(firsts, along, strict=True))
        seconds = torch.autograd.grad(total, [tensors[i] for i in moving], materialize_grads=True)  # type: ignore[arg-type]

        def directional(*args: Any) -> jax.Array:
            found = jax.grad(loss(f), moving)(*args)
            pairs = zip(found, along, strict=True)
            return sum(
                ((g.astype(jnp.float32) * jtbridge.to_jax(v.float())).sum() for g, v in pairs),
                jnp.zeros((), jnp.float32),
            )

        assert_near(jax.jit(jax.grad(directional, moving))(*arrays), seconds, 4 * factor)


def assert_not_fused(fn: Callable[..., Any], *arrays: Any, forward: bool = False) -> None:
    """Assert that no operator of jtbridge is in the gradient, nor (unless `forward`) in the value, and compare both."""
    assert forward or operators(fn, *arrays) == {}
    assert gradient_operators(fn, *arrays) == {}
    assert_matches_torch(fn, *arrays)
