"""The table of cases: torch functions, their arguments, and their peculiarities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from . import functions

Arguments = Callable[[np.random.Generator], tuple]


@dataclasses.dataclass(frozen=True)
class Case:
    """A torch function and how to make its arguments (64-bit NumPy arrays, narrowed while x64 is off)."""

    name: str
    fn: Callable[..., Any]
    arguments: Arguments
    batches: bool = True  # torch.vmap can do it in one call
    derivatives_batch: bool = True  # and torch.vmap can also batch its derivatives
    twice: bool = True  # torch can differentiate it twice


def reals(*shapes: tuple[int, ...]) -> Arguments:
    return lambda rng: tuple(rng.normal(size=shape) for shape in shapes)


def positives(*shapes: tuple[int, ...]) -> Arguments:
    return lambda rng: tuple(rng.uniform(0.5, 2.0, size=shape) for shape in shapes)


def complexes(*shapes: tuple[int, ...]) -> Arguments:
    return lambda rng: tuple(rng.normal(size=shape) + 1j * rng.normal(size=shape) for shape in shapes)


_LINEAR = torch.nn.Linear(3, 2)
_MLP = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))


def _mlp_arguments(rng: np.random.Generator) -> tuple:
    return {name: rng.normal(size=tuple(p.shape)) for name, p in _MLP.named_parameters()}, rng.normal(size=(2, 3))


def _many_reductions(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.sum(0), x.mean(), x.var(0), x.logsumexp(-1), x.amax(-1), x.prod(1), torch.linalg.norm(x)


def _tree(batch: dict[str, Any]) -> dict[str, Any]:
    x, (y, n) = batch["x"], batch["pair"]
    return {"out": (torch.sin(x) * y, None), "list": [x + n], "size": x.shape[0], "name": "static"}


CASES = [
    Case("pointwise", lambda x, y: torch.sin(x) * torch.exp(-y * y) + x / (1 + y * y), reals((3, 4), (3, 4))),
    Case("broadcast", lambda x, y, z: x * torch.tanh(y) + z**3, reals((3, 1), (4,), ())),
    Case("where_clamp", lambda x: torch.where(x > 0, x * x, -x.sin()).clamp(max=1.5), reals((3, 4))),
    Case("matmul", lambda x, y: x @ y, reals((2, 3), (3, 4))),
    Case("einsum", lambda x, y: torch.einsum("bij,bjk->bki", x, y), reals((2, 2, 3), (2, 3, 2))),
    Case(
        "solve",
        lambda a, b: torch.linalg.solve(a @ a.T + torch.eye(3, dtype=a.dtype), b),
        reals((3, 3), (3, 2)),
    ),
    Case("reductions", _many_reductions, positives((3, 4))),
    Case("softmax", lambda x, y: torch.softmax(x @ y, -1), reals((2, 3), (3, 4))),
    Case("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), reals((3, 4), (4,), (4,))),
    Case("gelu_linear", lambda x, w, b: F.gelu(F.linear(x, w, b)), reals((2, 3), (4, 3), (4,))),
    Case("attention", lambda q: F.scaled_dot_product_attention(q, q * 2, q.sin()), reals((3, 4))),
    Case(
        "flash_attention",
        lambda q, k: F.scaled_dot_product_attention(q, k, k.sin()),
        reals((1, 2, 3, 4), (1, 2, 3, 4)),
        twice=False,
        derivatives_batch=False,
    ),
    Case("conv", lambda x, w: F.conv1d(x, w, padding=1), reals((1, 2, 5), (3, 2, 3))),
    Case(
        "cross_entropy",
        lambda x, labels: F.cross_entropy(x, labels, label_smoothing=0.1),
        lambda rng: (rng.normal(size=(3, 4)), rng.integers(0, 4, size=3)),
    ),
    Case(
        "gather",
        lambda x, i: torch.gather(x, 1, i) * torch.sin(x[:, :2]),
        lambda rng: (rng.normal(size=(3, 4)), rng.integers(0, 4, size=(3, 2))),
    ),
    Case(
        "index",
        lambda x, i: x[i] ** 2,
        lambda rng: (rng.normal(size=(5, 2)), rng.integers(0, 5, size=(4,))),
    ),
    Case("cumulative", lambda x: (torch.cumsum(x, 0) * x, torch.cumprod(x, 1)), positives((3, 3))),
    Case("sort", lambda x: (*torch.sort(x, dim=-1), x > 0, torch.topk(x, 2)[1]), reals((3, 4))),
    Case("tree", _tree, lambda rng: ({"x": rng.normal(size=(2, 3)), "pair": (rng.normal(size=3), 2)},)),
    Case("complex_holomorphic", lambda z: torch.exp(z) * z + torch.sin(z), complexes((3,))),
    Case(
        "complex_to_real",
        lambda z, w: (z * w.conj()).real + z.abs() ** 2 + torch.angle(w),
        complexes((3,), (3,)),
    ),
    Case(
        "spectrum",
        lambda x, w: torch.fft.ifft(torch.fft.fft(x) * w).real * x,
        lambda rng: (rng.normal(size=4), rng.normal(size=4) + 1j * rng.normal(size=4)),
    ),
    Case("view_as_complex", lambda x: torch.view_as_complex(x) ** 2, reals((3, 2))),
    Case("inner_gradient", functions.inner_gradient, reals((3,), (3,)), batches=False, derivatives_batch=False),
    Case("inner_func_grad", functions.inner_func_grad, reals((3,), (3,))),
    Case("inner_jacobian", functions.inner_jacobian, reals((3,))),
    Case("inner_vmap", functions.inner_vmap, reals((2, 3), (3,))),
    Case(
        "own_backward_old_style",
        lambda x: functions.TripledGradient.apply(x).sin(),
        reals((2, 3)),
        batches=False,
        derivatives_batch=False,
    ),
    Case("own_backward", lambda x: functions.StraightThrough.apply(x * 3) * x, reals((2, 3))),
    Case(
        "own_backward_two_results",
        lambda x, m: functions.TwoResults.apply(x.sin(), 2.0, m),
        reals((2, 3), (2, 3)),
    ),
    Case(
        "once_differentiable",
        lambda x: functions.OnceDifferentiable.apply(x),
        reals((3,)),
        batches=False,
        twice=False,
        derivatives_batch=False,
    ),
    Case("no_grad_region", functions.no_grad_region, reals((2, 3))),
    Case("no_grad_inside", functions.no_grad_inside, reals((2, 3))),
    Case("detached", functions.detached, reals((2, 3), (2, 3))),
    Case("data_attribute", lambda x: x * x.data, reals((2, 3)), batches=False, derivatives_batch=False),
    Case("custom_operator", lambda x: functions.numpy_sin(x) * x, reals((2, 3)), derivatives_batch=False),
    Case("in_place_inside", functions.in_place_inside, reals((3, 4), (3, 4)), derivatives_batch=False),
    Case("in_place_on_argument", functions.in_place_on_argument, reals((3, 4), (3, 4))),
    Case("aliased_results", functions.aliased_results, reals((3, 3))),
    Case("module", lambda p, x: torch.func.functional_call(_MLP, p, (x,)), _mlp_arguments),
    Case(
        "closed_over_weights",
        lambda x: torch.tanh(F.linear(x, _LINEAR.weight.to(x.dtype), _LINEAR.bias.to(x.dtype))),
        reals((2, 3)),
    ),
    Case(
        "no_float_argument",
        lambda i: (i * 2, torch.sin(i.to(torch.float32))),
        lambda rng: (rng.integers(0, 5, 3),),
    ),
    Case(
        "constant_result",
        lambda x: (x.sin(), torch.arange(3, dtype=x.dtype), torch.ones(2, dtype=torch.bool)),
        reals((2,)),
    ),
]
