"""Convolutions: geometry, groups, dtypes and gradients."""

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import jtbridge

from .harness import check

CONVOLUTIONS = {
    "1d": (F.conv1d, (2, 4, 9), (6, 4, 3), {}),
    "1d strided, grouped": (F.conv1d, (2, 4, 9), (6, 2, 3), {"stride": 2, "groups": 2, "padding": 1}),
    "1d causal": (lambda x, w, b: F.conv1d(F.pad(x, (4, 0)), w, b, dilation=2), (2, 4, 9), (6, 4, 3), {}),
    "1d same": (F.conv1d, (2, 4, 9), (6, 4, 4), {"padding": "same"}),
    "1d unbatched": (F.conv1d, (4, 9), (6, 4, 3), {"padding": 2}),
    "2d uneven": (F.conv2d, (2, 4, 7, 8), (6, 4, 3, 2), {"stride": (2, 1), "padding": (0, 3), "dilation": (1, 2)}),
    "2d rest of the stride": (F.conv2d, (1, 2, 8, 8), (3, 2, 3, 3), {"stride": 3}),
    "2d depthwise": (F.conv2d, (2, 4, 7, 8), (8, 1, 3, 3), {"groups": 4}),
    "1d depthwise, long": (F.conv1d, (2, 3, 40), (6, 1, 21), {"groups": 3, "stride": 2, "padding": 20, "dilation": 2}),
    "2d depthwise, strided": (F.conv2d, (2, 4, 9, 8), (4, 1, 3, 2), {"groups": 4, "stride": (2, 3), "padding": (2, 0)}),
    "3d depthwise": (F.conv3d, (1, 2, 4, 5, 4), (4, 1, 2, 3, 2), {"groups": 2, "padding": 1}),
    "2d depthwise, more elements than are written out": (F.conv2d, (1, 2, 9, 9), (2, 1, 9, 9), {"groups": 2}),
    "1d pointwise": (F.conv1d, (2, 4, 5), (6, 4, 1), {}),
    "2d pointwise": (F.conv2d, (2, 4, 5, 4), (6, 4, 1, 1), {}),
    "2d pointwise, padded and strided": (F.conv2d, (2, 4, 5, 4), (6, 4, 1, 1), {"padding": 1, "stride": 2}),
    "3d pointwise": (F.conv3d, (2, 4, 2, 3, 2), (6, 4, 1, 1, 1), {}),
    "2d pointwise, empty batch": (F.conv2d, (0, 4, 7, 8), (6, 4, 1, 1), {}),
    "2d depthwise, strides and dilation beyond the end": (
        F.conv2d,
        (2, 3, 11, 10),
        (6, 1, 3, 2),
        {"groups": 3, "stride": (4, 3), "padding": (1, 2), "dilation": (2, 3)},
    ),
    "2d depthwise, padding beyond the kernel": (F.conv2d, (1, 3, 5, 4), (3, 1, 2, 2), {"groups": 3, "padding": 4}),
    "2d depthwise, empty batch": (F.conv2d, (0, 4, 7, 8), (4, 1, 3, 3), {"groups": 4}),
    "2d empty batch": (F.conv2d, (0, 4, 7, 8), (6, 4, 3, 3), {}),
    "3d": (F.conv3d, (1, 2, 4, 5, 6), (3, 2, 2, 3, 2), {"stride": (1, 2, 1)}),
}

TRANSPOSED = {
    "1d": (F.conv_transpose1d, (2, 4, 5), (4, 6, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "1d cropped": (F.conv_transpose1d, (2, 4, 5), (4, 6, 2), {"padding": 2}),
    "2d grouped": (F.conv_transpose2d, (2, 4, 5, 4), (4, 3, 3, 2), {"stride": (2, 3), "groups": 2}),
    "2d dilated": (F.conv_transpose2d, (2, 4, 5, 4), (4, 3, 3, 2), {"dilation": (2, 1), "output_padding": (1, 0)}),
    "2d depthwise": (F.conv_transpose2d, (2, 4, 5, 4), (4, 1, 3, 2), {"groups": 4, "stride": 2, "output_padding": 1}),
    "2d depthwise, cropped": (
        F.conv_transpose2d,
        (2, 4, 5, 4),
        (4, 2, 3, 3),
        {"groups": 4, "stride": 2, "padding": 2, "output_padding": 1, "dilation": (1, 2)},
    ),
    "1d depthwise, long": (F.conv_transpose1d, (2, 3, 9), (3, 1, 5), {"groups": 3, "dilation": 2, "stride": 3}),
    "2d wide": (F.conv_transpose2d, (2, 4, 5, 4), (4, 3, 2, 2), {"dilation": 4, "output_padding": 3, "groups": 2}),
    "2d pointwise": (F.conv_transpose2d, (2, 4, 5, 4), (4, 3, 1, 1), {}),
    "3d": (F.conv_transpose3d, (1, 2, 3, 4, 3), (2, 3, 2, 3, 2), {"stride": 2}),
}


def _run(case, dtype=torch.float32, **how):
    function, x, w, options = case
    outputs = w[1] * options.get("groups", 1) if "transpose" in getattr(function, "__name__", "") else w[0]
    draw = (
        (lambda s: torch.randint(-9, 9, s, dtype=dtype))
        if not dtype.is_floating_point | dtype.is_complex
        else (lambda s: torch.randn(s, dtype=dtype))
    )
    check(lambda a, b, c: function(a, b, c, **options), draw(x), draw(w), draw((outputs,)), **how)


# Warnings of torch reach the user when the function is traced.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name):
    _run(CONVOLUTIONS[name], grad=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolution(name):
    _run(TRANSPOSED[name], grad=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", [CONVOLUTIONS["2d uneven"], TRANSPOSED["2d grouped"]])
def test_dtypes(case, dtype):
    tolerance = {"rtol": 2e-2, "atol": 2e-1} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    _run(case, dtype, **tolerance)


@pytest.mark.parametrize("case", [CONVOLUTIONS["2d depthwise, strided"], TRANSPOSED["2d depthwise"]])
def test_gradients_of_depthwise_convolutions_in_double_precision(case):
    _run(case, torch.float64, grad=True, rtol=1e-12, atol=1e-12)


def test_integers_beyond_a_float_are_exact():
    big = 2**53 + 1
    check(F.conv1d, torch.full((1, 1, 3), big), torch.ones(1, 1, 2, dtype=torch.int64), None)


def test_only_the_gradients_asked_for():
    x, w = torch.randn(2, 3, 6), torch.randn(4, 3, 2)

    def by_weight(w):
        w = w.detach().requires_grad_()
        return torch.autograd.grad(F.conv1d(x, w).sum(), w)[0]

    check(by_weight, w, rtol=1e-4, atol=1e-4)


def test_second_derivative():
    def slope(x, w):
        return torch.func.grad(lambda a: (F.conv2d(a, w, stride=2, padding=1) ** 3).sum())(x)

    check(slope, torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3), grad=True, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: torch.ops.aten.thnn_conv2d(x, w, [3, 3], None, [2, 2], [1, 1]),
        lambda x, w: torch.ops.aten.slow_conv_dilated2d(x, w, [3, 3], None, [1, 1], [0, 0], [2, 2]),
        lambda x, w: torch.ops.aten.slow_conv_transpose2d(x, w.transpose(0, 1), [3, 3], None, [2, 2]),
    ],
)
def test_kernels_called_by_name(call):
    check(call, torch.randn(2, 3, 7, 6), torch.randn(4, 3, 3, 3), rtol=1e-4, atol=1e-4)


def test_time_batch_channel():
    check(
        lambda x, w, b: torch.conv_tbc(x, w, b, 1),
        torch.randn(6, 2, 3),
        torch.randn(3, 3, 4),
        torch.randn(4),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("name", ["2d depthwise", "2d pointwise"])
def test_convolution_is_lowered_to_sums_of_products_on_cpu(name):
    function, x, w, options = CONVOLUTIONS[name]
    traced = jax.jit(jtbridge.wrap(lambda x, w: function(x, w, **options), backend="xla")).trace(
        jax.ShapeDtypeStruct(x, "float32"), jax.ShapeDtypeStruct(w, "float32")
    )
    assert "stablehlo.convolution" not in traced.lower().as_text()
    assert "stablehlo.convolution" in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_depthwise_convolution_of_16_bits_is_rounded_once(dtype):
    x, w = (torch.randn(1, 8, 20, 20) + 3).to(dtype), (torch.rand(8, 1, 7, 7) + 0.5).to(dtype)
    exact = F.conv2d(x.double(), w.double(), groups=8).numpy()
    f = jax.jit(jtbridge.wrap(lambda x, w: F.conv2d(x, w, groups=8), backend="xla"))
    ours = np.asarray(f(jtbridge.to_jax(x), jtbridge.to_jax(w)), np.float64)
    rounding = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11
    np.testing.assert_allclose(ours, exact, rtol=1.1 * rounding)
