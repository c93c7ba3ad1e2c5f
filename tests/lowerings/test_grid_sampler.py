"""Grid sampling: interpolations, padding and slopes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from .harness import check

TIGHT: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


def _draw(*shape, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_planes(mode, padding, corners):
    run = lambda x, g: F.grid_sample(x, g, mode=mode, padding_mode=padding, align_corners=corners)  # noqa: E731
    check(run, _draw(2, 3, 4, 5), _draw(2, 6, 3, 2, scale=1.5), grad=True, **TIGHT)


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_volumes(mode, padding, corners):
    run = lambda x, g: F.grid_sample(x, g, mode=mode, padding_mode=padding, align_corners=corners)  # noqa: E731
    check(run, _draw(2, 3, 2, 4, 3), _draw(2, 2, 3, 2, 3, scale=1.5), grad=True, **TIGHT)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_gradients_at_integer_positions_and_borders(padding):
    line = torch.tensor([-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5])
    grid = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1)[None]
    run = lambda x, g: F.grid_sample(x, g, padding_mode=padding, align_corners=True)  # noqa: E731
    check(run, _draw(1, 1, 5, 5), grid, grad=True, **TIGHT)


def test_nearest_rounds_halves_to_even():
    grid = torch.stack([torch.tensor([-0.75, -0.25, 0.25, 0.75])] * 2, -1)[None, None]
    check(lambda x, g: F.grid_sample(x, g, mode="nearest", align_corners=True), _draw(1, 1, 5, 5), grid)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_nan_and_distant_positions(padding):
    grid = torch.tensor([[[[float("nan"), 0.1], [1e6, -1e6], [0.1, 0.2], [0.5, float("nan")]] * 2]])
    check(lambda x, g: F.grid_sample(x, g, padding_mode=padding, align_corners=False), _draw(1, 2, 4, 4), grid, **TIGHT)


def test_positions_in_a_volume_that_are_not_finite_are_outside():
    nan, inf = float("nan"), float("inf")
    grid = torch.tensor([[nan, 0.1, 0.0], [0.1, inf, 0.0], [0.1, 0.2, -inf], [0.1, 0.2, 0.3]])[None, None, None]
    check(lambda x, g: F.grid_sample(x, g, align_corners=False), _draw(1, 2, 2, 3, 4), grid, grad=True, **TIGHT)


def test_gradient_by_input_or_grid_only():
    x, grid = _draw(1, 2, 4, 4), _draw(1, 3, 3, 2)
    check(lambda x: F.grid_sample(x, grid, align_corners=False), x, grad=True, **TIGHT)
    check(lambda g: F.grid_sample(x, g, align_corners=False), grid, grad=True, **TIGHT)


def test_affine_grid():
    def run(theta, x):
        return F.grid_sample(x, F.affine_grid(theta, [2, 3, 5, 4], align_corners=False), align_corners=False)

    check(run, _draw(2, 2, 3), _draw(2, 3, 4, 4), grad=True, **TIGHT)


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_empty_batch(mode):
    run = lambda x, g: F.grid_sample(x, g, mode=mode, align_corners=False)  # noqa: E731
    check(run, torch.ones(0, 3, 4, 5), torch.ones(0, 6, 3, 2), grad=True)
