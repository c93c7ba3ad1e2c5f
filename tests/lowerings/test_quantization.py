"""Fake quantization at the ends of its range, at ties, and for NaN and infinities."""

import jax
import numpy as np
import pytest
import torch

import jtbridge

from .harness import check

NAN, INF = float("nan"), float("inf")
SPECIAL = [NAN, INF, -INF, 0.0, -0.0, 1e30, -1e30, 0.05, 0.15, -0.25, 12.65, 12.75, -12.85, -12.75, 1e-40]
X = torch.cat([torch.tensor(SPECIAL), torch.linspace(-20, 20, 4005)]).reshape(4, 1005)
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
RANGES = [(-128, 127), (0, 255), (-4, 3), (0, 0)]


def _exact(function, *args, **options):
    check(function, *args, rtol=0, atol=0, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("low", "high"), RANGES)
@pytest.mark.parametrize("scale", [0.1, 1 / 3, 1e-3, 7.0])
def test_per_tensor_with_a_constant_scale(dtype, low, high, scale):
    for zero_point in {low, (low + high) // 2, high}:

        def quantized(x, zero_point=zero_point):
            return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, low, high)

        _exact(quantized, X.to(dtype), grad=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("whole", [torch.int32, torch.int64, torch.float32], ids=str)
def test_per_tensor_with_a_tensor_scale(dtype, whole):
    def quantized(x, scale, zero_point):
        return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, -128, 127)

    _exact(quantized, X.to(dtype), torch.tensor([0.1]), torch.tensor([3]).to(whole))
    _exact(quantized, X.to(dtype), torch.tensor(1 / 3), torch.tensor(-7).to(whole))


@pytest.mark.parametrize("on", [0, 1])
def test_enabled_by_a_tensor(on):
    def quantized(x, scale, zero_point, enabled):
        operator = torch.ops.aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams
        return operator(x, scale, zero_point, enabled, -4, 3)

    _exact(quantized, X, torch.tensor([0.1]), torch.tensor([1]), torch.tensor([on]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "zero_point",
    [torch.tensor([0, -5, 17, 127], dtype=torch.int32), torch.tensor([0.0, -5.5, 17.25, 126.9])],
    ids=["int32", "float32"],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_per_channel(dtype, zero_point, axis):
    def quantized(x, scale, zero_point):
        return torch.fake_quantize_per_channel_affine(x, scale, zero_point, axis, -128, 127)

    x = (X if axis == 0 else X.T.reshape(-1, 4, 3)).to(dtype)
    _exact(quantized, x, torch.tensor([0.1, 1 / 3, 1e-3, 7.0]), zero_point)


def test_per_channel_with_a_zero_point_out_of_range():
    def quantized(x, scale, zero_point):
        return torch.fake_quantize_per_channel_affine(x, scale, zero_point.int(), 0, -4, 3)

    arguments = torch.ones(2, 3), torch.ones(2), torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="`zero_point` must be between"):
        quantized(*arguments)
    y = jax.jit(jtbridge.wrap(quantized, backend="xla"))(*jtbridge.to_jax(arguments))
    np.testing.assert_array_equal(y, [[1, 1, 1], [np.nan] * 3])


def test_nan_as_learnable_zero_point():
    def of_tensor(x, scale, zero_point):
        return torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero_point, -4, 3, 1.0)

    def of_channels(x, scale, zero_point):
        return torch._fake_quantize_learnable_per_channel_affine(x, scale, zero_point, 0, -4, 3, 1.0)

    for quantized in (of_tensor, of_channels):
        arguments = torch.ones(1, 3), torch.ones(1), torch.tensor([NAN])
        with pytest.raises(RuntimeError, match="`zero_point` must be between"):
            quantized(*arguments)
        assert np.isnan(jax.jit(jtbridge.wrap(quantized, backend="xla"))(*jtbridge.to_jax(arguments))).all()


def test_per_channel_gradient():
    def quantized(x):
        scale, zero_point = torch.tensor([0.1, 1 / 3, 1e-3, 7.0]), torch.tensor([0, -5, 17, 127], dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(x, scale, zero_point, 0, -128, 127)

    _exact(quantized, X, grad=True)


@pytest.mark.parametrize("zero_point", [0.0, 3.4, -2.5, 2.5, -200.0, 300.0])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_learnable_scale(zero_point, factor):
    def quantized(x, scale, zero_point):
        return torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero_point, -128, 127, factor)

    arguments = torch.tensor([0.1]), torch.tensor([zero_point])
    _exact(quantized, X, *arguments)
    x = X[X.isfinite() & (X.abs() < 1e3)]
    check(quantized, x, *arguments, grad=True, rtol=1e-5, atol=1e-3)  # sums of 4000 elements
    check(quantized, x[:0], *arguments, grad=True)


@pytest.mark.parametrize("axis", [0, 1])
def test_learnable_scales_per_channel(axis):
    def quantized(x, scale, zero_point):
        return torch._fake_quantize_learnable_per_channel_affine(x, scale, zero_point, axis, -128, 127, 0.3)

    arguments = torch.tensor([0.1, 1 / 3, 1e-3, 7.0]), torch.tensor([0.0, -5.5, 17.25, 300.0])
    _exact(quantized, X if axis == 0 else X.T, *arguments)
    x = X.nan_to_num(0, 1, -1).clamp(-1e3, 1e3)
    check(quantized, x if axis == 0 else x.T, *arguments, grad=True, rtol=1e-5, atol=1e-3)


def test_batched_scale():
    def quantized(x, scale):
        return torch._fake_quantize_learnable_per_tensor_affine(x, scale, torch.tensor([2.0]), -8, 7, 1.0)

    scales = torch.tensor([[0.1], [0.2], [0.3], [0.4]])
    got = jax.vmap(jtbridge.wrap(quantized, backend="xla"))(*jtbridge.to_jax((X, scales)))
    want = torch.stack([quantized(x, scale) for x, scale in zip(X, scales, strict=True)])
    np.testing.assert_array_equal(got, want)
