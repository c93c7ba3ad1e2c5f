"""Resizing: the input elements of each output element, and gradients."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from .harness import check

X = torch.randn(2, 2, 5, 6, generator=torch.Generator().manual_seed(0))
SIZES: list[dict[str, Any]] = [
    {"size": (10, 12)},
    {"size": (3, 9)},
    {"size": (7, 3)},
    {"size": (5, 1)},
    {"scale_factor": (1.7, 0.6)},
]
FACTORS: dict[int, list[tuple[float, ...]]] = {
    1: [(1.03,), (2.03,)],
    2: [(1.01, 1.04), (2.01, 2.04), (1.1, 2.04)],
    3: [(1.1, 2.1, 1.04), (1.1, 1.1, 2.04)],
}
TIGHT: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("where", SIZES)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest(where, mode):
    check(lambda x: F.interpolate(x, mode=mode, **where), X, grad=True)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_reads_the_same_elements_as_torch(mode):
    sizes: list[dict[str, Any]] = [{"size": n} for n in (7, 50, 61, 100, 101, 173, 200, 300)]
    ways = sizes + [{"scale_factor": f} for f in (1 / 3, 0.61, 1.003, 2.003)]

    def run(x):
        return [F.interpolate(x, mode=mode, **how) for how in ways]

    for dtype in (torch.float32, torch.float64):
        x = torch.arange(300, dtype=dtype).reshape(1, 3, 100)
        check(run, x, grad=True, **TIGHT)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("channels", [3, 4])
def test_nearest_of_channels_last(mode, channels):
    def run(x):
        wide = x.to(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
        return [F.interpolate(wide, scale_factor=factor, mode=mode) for factor in FACTORS[x.ndim - 2]]

    for shape in [(2, channels, 70, 20), (2, channels, 7, 20), (1, channels, 2, 3, 20)]:
        check(run, torch.arange(float(math.prod(shape))).reshape(shape), grad=True)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_with_a_factor_inconsistent_with_the_sizes(mode):
    def run(x):
        return [F.interpolate(x, scale_factor=factor, mode=mode) for factor in FACTORS[x.ndim - 2]]

    for shape in [(1, 1, 30), (2, 2, 7, 20), (1, 1, 70, 20), (1, 1, 2, 3, 20)]:
        for dtype in (torch.float32, torch.float64):
            check(run, torch.arange(math.prod(shape), dtype=dtype).reshape(shape), grad=True)


def test_nearest_of_bytes():
    check(lambda x: F.interpolate(x, (3, 11)), (X * 50).to(torch.uint8))


@pytest.mark.parametrize("where", SIZES)
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_weighted(where, corners, mode):
    check(lambda x: F.interpolate(x, mode=mode, align_corners=corners, **where), X, grad=True, **TIGHT)


@pytest.mark.parametrize("where", SIZES)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiased(where, mode):
    check(lambda x: F.interpolate(x, mode=mode, antialias=True, **where), X, grad=True, **TIGHT)


def test_antialiased_with_a_large_factor():
    x = torch.randn(1, 1, 61, 50, generator=torch.Generator().manual_seed(0))
    for corners in (False, True):
        run = lambda x, c=corners: F.interpolate(x, (5, 4), mode="bicubic", antialias=True, align_corners=c)  # noqa: E731
        check(run, x, grad=True, **TIGHT)


def test_lanczos():
    check(lambda x: torch.ops.aten._upsample_lanczos2d_aa(x, [3, 9], False), X, **TIGHT)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
def test_one_dimension(mode):
    check(lambda x: F.interpolate(x[0], 14, mode=mode), X, grad=True, **TIGHT)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "trilinear"])
def test_three_dimensions(mode):
    check(lambda x: F.interpolate(x[None], scale_factor=(2, 1.5, 0.5), mode=mode), X, grad=True, **TIGHT)


def test_recomputed_scale_factors():
    for again in (True, False):
        check(
            lambda x, r=again: F.interpolate(x, scale_factor=1.3, mode="bilinear", recompute_scale_factor=r), X, **TIGHT
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_precision(dtype):
    tolerance: dict[str, Any] = (
        {} if dtype == torch.float64 else {"rtol": 1e-2, "atol": 1e-2}
    )  # torch rounds in between
    check(lambda x: F.interpolate(x, (7, 4), mode="bicubic"), X.to(dtype), **tolerance)
    check(lambda x: F.interpolate(x, (7, 4), mode="bilinear"), X.to(dtype), grad=True, **tolerance)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear"])
def test_empty_batch(mode):
    check(lambda x: F.interpolate(x, (4, 3), mode=mode), X[:0], grad=True)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("dims", [1, 3])
def test_empty_batch_of_other_dimensions(mode, dims):
    check(lambda x: F.interpolate(x, scale_factor=2, mode=mode), torch.ones(0, 2, *[3] * dims), grad=True)


def test_nan_does_not_affect_other_pixels():
    x = X.clone()
    x[..., 2, 2] = float("nan")
    check(lambda x: F.interpolate(x, (3, 2), mode="bilinear", antialias=True), x, **TIGHT)
    check(lambda x: F.interpolate(x, (9, 11), mode="bilinear"), x, **TIGHT)


def test_second_derivative():
    check(
        lambda x: torch.func.grad(lambda a: (F.interpolate(a, (3, 9), mode="bicubic") ** 2).sum())(x),
        X,
        grad=True,
        **TIGHT,
    )
