"""Graphs that write their results to XLA's memory: which results they write there, and their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import jtbridge
from jtbridge.capture._destinations import with_destinations

ROWS = torch.randn(64, 2048, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 8, 96, 96, generator=torch.Generator().manual_seed(1))


def to_sorted(x: torch.Tensor) -> list[torch.Tensor]:
    values, order = torch.sort(x, dim=1, stable=True)
    return [values.float(), order.int(), x.half(), x.half()]


def of_pool(x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    return torch.autograd.grad(F.max_pool2d(x, 2).square().sum(), x)[0]


# A function, its argument, and the number of its results that are written directly to XLA's memory.
CASES: dict[str, tuple[Callable, torch.Tensor, int]] = {
    "two results": (lambda x: torch.topk(x, 700, 1), ROWS, 2),
    "a transposed result": (lambda x: torch.topk(x, 900, 1)[0].t(), ROWS, 1),
    "the second result alone": (lambda x: torch.topk(x, 900, 1)[1], ROWS, 1),
    "the same result twice": (lambda x: (torch.topk(x, 700, 1)[0],) * 2, ROWS, 1),
    "results of other dtypes": (to_sorted, ROWS, 4),
    "cummax": (lambda x: torch.cummax(x, 1), ROWS, 2),
    "cummin of columns, as blocks": (lambda x: torch.cummin(x, 0)[0].reshape(32, 2, 2048), ROWS, 1),
    "median": (lambda x: torch.median(x.view(4, -1), 0), ROWS, 2),
    "kthvalue": (lambda x: x.view(4, -1).kthvalue(3, 0), ROWS, 2),
    "mode": (lambda x: x.view(4, -1).round().mode(0)[0], ROWS, 1),
    "max": (lambda x: x.view(4, -1).max(0), ROWS, 2),
    "aminmax": (lambda x: torch.aminmax(x.view(4, -1), dim=0), ROWS, 2),
    "max pooling": (lambda x: F.max_pool2d(x, 2, 1, return_indices=True), IMAGES, 2),
    "max pooling of channels last": (
        lambda x: F.max_pool2d(x.contiguous(memory_format=torch.channels_last), 2, 1, return_indices=True),
        IMAGES,
        2,
    ),
    "adaptive max pooling": (lambda x: F.adaptive_max_pool2d(x, 80, return_indices=True), IMAGES, 2),
    "max pooling of volumes": (lambda x: F.max_pool3d(x, 2, 1, return_indices=True), IMAGES, 2),
    "gradient of max pooling": (of_pool, IMAGES, 1),
    "a narrower dtype": (lambda x: (x * 100).to(torch.int16), ROWS, 1),
    "a copy in another order": (lambda x: x.t().clone(), ROWS, 1),
    "list of pieces": (lambda x: torch.split(x * 2, 32), ROWS, 0),
    "layer norm, which computes elsewhere": (lambda x: F.layer_norm(x, (2048,)), ROWS, 0),
}
each = pytest.mark.parametrize(("fn", "argument", "count"), CASES.values(), ids=CASES)


def leaves(result: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


@each
def test_results_are_written_to_destinations(fn: Callable, argument: torch.Tensor, count: int):
    graph = make_fx(lambda x: [x.contiguous() for x in leaves(fn(x))], tracing_mode="fake")(argument.clone())
    want = leaves(fn(argument.clone()))
    writing, written = with_destinations(graph)
    destinations = [torch.full_like(want[i].contiguous(), 7) for i in written]
    results = writing(argument.clone(), *destinations)
    for result, value in zip(results, want, strict=True):
        torch.testing.assert_close(result, value, rtol=0, atol=0)
    for i, destination in zip(written, destinations, strict=True):
        torch.testing.assert_close(destination, want[i].contiguous(), rtol=0, atol=0)
    assert len(written) == count


@each
def test_call_matches_torch(fn: Callable, argument: torch.Tensor, count: int):
    f = jtbridge.wrap(fn, backend="dlpack")
    for result, value in zip(jax.tree.leaves(jax.jit(f)(argument.numpy())), leaves(fn(argument.clone())), strict=True):
        np.testing.assert_array_equal(result, value.detach().numpy())
