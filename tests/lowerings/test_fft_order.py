"""Fourier transforms beside factorizations, which store matrices by columns: XLA refused to compile such programs."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
import torch

import jtbridge

TRANSFORMS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "fft": lambda x, dim: torch.fft.fft(x, dim=dim),
    "ifft": lambda x, dim: torch.fft.ifft(x, dim=dim),
    "rfft": lambda x, dim: torch.fft.rfft(x, dim=dim),
    "irfft": lambda x, dim: torch.fft.irfft(x, n=x.shape[dim], dim=dim),
    "fft2": lambda x, dim: torch.fft.fft2(x),
    "irfft2": lambda x, dim: torch.fft.irfft2(x, s=x.shape[-2:]),
}
READERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "singular values": torch.linalg.svdvals,
    "pseudo-inverse": lambda x: torch.linalg.pinv(torch.real(x).sin()),
    "triangle": lambda x: torch.linalg.qr(x).R.abs(),
    "none": lambda x: torch.view_as_real(x.resolve_conj()) if x.is_complex() else x,
}


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("shape", [(4, 4), (1, 5), (5, 1), (2, 3, 3), (1, 1)])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_complete_qr_before_fft_in_one_program(
    transform: str, reader: str, shape: tuple[int, ...], dim: int, rng: np.random.Generator
):
    x = rng.normal(size=shape).astype(np.float32)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return READERS[reader](TRANSFORMS[transform](torch.linalg.qr(x, mode="complete").Q @ x, dim))

    f = jtbridge.wrap(fn, backend="xla")
    np.testing.assert_allclose(jax.jit(f)(x), fn(torch.from_numpy(x)), rtol=1e-2, atol=1e-3)
    both = np.stack([x, x])
    np.testing.assert_allclose(jax.jit(jax.vmap(f))(both)[1], fn(torch.from_numpy(x)), rtol=1e-2, atol=1e-3)
