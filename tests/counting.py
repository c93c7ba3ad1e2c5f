"""A custom operator that counts how often torch really runs it, forward, backward and batched."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

_COUNTS: collections.Counter[str] = collections.Counter()
_LOCK = threading.Lock()  # XLA calls from its own threads


def _count(what: str) -> None:
    with _LOCK:
        _COUNTS[what] += 1


@contextlib.contextmanager
def counted() -> Iterator[collections.Counter[str]]:
    """Count "forward", "backward" and "batched" runs inside the block. Tracing runs none of them."""
    _COUNTS.clear()
    yield _COUNTS


@torch.library.custom_op("jtbridge_tests::counted_square", mutates_args=())
def counted_square(x: torch.Tensor) -> torch.Tensor:
    """x**2"""
    _count("forward")
    return x * x


@counted_square.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("jtbridge_tests::counted_square_backward", mutates_args=())
def counted_square_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """2 x grad"""
    _count("backward")
    return 2 * x * grad


@counted_square_backward.register_fake
def _(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(grad)


def _backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return counted_square_backward(x, grad)


def _batched_square(info: Any, in_dims: Any, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    _count("batched")
    return counted_square(x), in_dims[0]


def _batched_backward(info: Any, in_dims: Any, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, int]:
    _count("batched")
    rows = [
        t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
        for t, d in zip((x, grad), in_dims, strict=True)
    ]
    return counted_square_backward(*rows), 0


counted_square.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
counted_square.register_vmap(_batched_square)
counted_square_backward.register_vmap(_batched_backward)
