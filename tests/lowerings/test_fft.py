"""Fourier transforms: normalisations, several dimensions, and real ones of odd and even size."""

import pytest
import torch

from .harness import check


@pytest.mark.parametrize("norm", ["forward", "backward", "ortho"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalisation(norm, dtype):
    x = torch.randn(4, 5, dtype=dtype)
    check(lambda x: [torch.fft.fft2(x, norm=norm), torch.fft.ifft2(x, norm=norm), torch.fft.rfft2(x, norm=norm)], x)
    check(lambda x: torch.view_as_real(torch.fft.rfft(x, norm=norm)), x, grad=True)
    check(lambda z: [torch.fft.irfft2(z, norm=norm), torch.fft.hfft(z, norm=norm)], x + 1j)


def test_four_dimensions_in_any_order():
    x = torch.randn(2, 3, 4, 5)
    check(lambda x: torch.fft.rfftn(x, dim=(3, 0, 2, 1)), x)
    check(lambda x: torch.fft.fftn(x + 1j), x)


@pytest.mark.parametrize("size", [7, 8])
def test_inverse_real_transform_ignores_the_imaginary_part_of_the_first(size):
    check(lambda z: torch.fft.irfft(z, n=size), torch.randn(3, 5, dtype=torch.complex64))
