"""Compare a translated torch function with torch itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

import jtbridge


def check(
    function: Callable[..., Any], *args: Any, rtol: float | None = None, atol: float | None = None, grad: bool = False
) -> None:
    """Assert that the translation of `function` gives torch's values, shapes and dtypes; with `grad`, also gradients.

    Args:
        function: a function of tensors and static values that returns a tensor, or a tuple or list of tensors.
        args: the arguments. Tensors become arguments of the JAX program; other values are passed unchanged.
        rtol, atol: the tolerances of `torch.testing.assert_close`; by default, its defaults for the dtype.
        grad: whether to compare the gradient of a weighted sum of the float results by every float argument.
    """
    with jax.enable_x64(True):
        translated = jtbridge.wrap(function, backend="xla")
        _assert_same(_leaves(translated(*args)), _leaves(function(*args)), rtol, atol)
        if grad:
            _assert_same(*_gradients(translated, function, args), rtol, atol)


def _gradients(translated: Any, function: Any, args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    moving = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    leaves = [x.detach().clone().requires_grad_() if i in moving else x for i, x in enumerate(args)]
    results = [y for y in _leaves(function(*leaves)) if isinstance(y, torch.Tensor) and y.requires_grad]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in results]
    expected = torch.autograd.grad(
        results, [leaves[i] for i in moving], weights, allow_unused=True, materialize_grads=True
    )
    positions = [i for i, y in enumerate(_leaves(function(*leaves))) if isinstance(y, torch.Tensor) and y.requires_grad]

    def of_moving(*chosen: Any) -> list[Any]:
        filled = list(args)
        for i, x in zip(moving, chosen, strict=True):
            filled[i] = x
        out = _leaves(translated(*filled))
        return [out[i] for i in positions]

    arrays = jtbridge.to_jax([args[i] for i in moving])
    _, pullback = jax.vjp(of_moving, *arrays)
    return list(pullback(jtbridge.to_jax(weights))), list(expected)


def _assert_same(got: list[Any], expected: list[Any], rtol: float | None, atol: float | None) -> None:
    assert len(got) == len(expected)
    for array, tensor in zip(got, expected, strict=True):
        if not isinstance(tensor, torch.Tensor):
            assert array == tensor
            continue
        assert isinstance(array, jax.Array)
        actual = jtbridge.to_torch(np.asarray(array))
        torch.testing.assert_close(
            actual,
            tensor.detach().resolve_conj().resolve_neg(),
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            check_stride=False,
        )


def _leaves(out: Any) -> list[Any]:
    return list(out) if isinstance(out, tuple | list) else [out]
