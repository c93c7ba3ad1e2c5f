"""Numbers of all dtypes have the same values in an interpreted kernel as on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge import errors
from tests.kernels.harness import ON_GPU, kernels_in, needs_compiler, needs_triton, pretending

pytestmark = [needs_triton, needs_compiler]

# Ties, numbers that round up to the next power of two, zeros, numbers below the smallest normal one.
EDGES = np.float32([0, -0.0, 1, -3, 17, 100, 127, -13.3, 2**-9, -(2**-7) * 1.1, 3e-7, 440, np.nan])


@pytest.mark.parametrize("given", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_floats_of_8_bits_are_rounded_to_even(backend, given, dtype):
    from .dtype_kernels import cast

    x = jnp.asarray(np.concatenate([EDGES, np.random.default_rng(0).standard_normal(200) * 20]), given)
    eight = jtbridge.wrap(cast(getattr(torch, dtype)), backend=backend)(x)
    assert eight.dtype == dtype
    want = x.astype(dtype)
    np.testing.assert_array_equal(eight.astype(jnp.float32), want.astype(jnp.float32))
    back = jtbridge.wrap(cast(getattr(torch, given)), backend=backend)(eight).astype(jnp.float32)
    if ON_GPU and (dtype, given) == ("float8_e5m2", "bfloat16"):  # Triton 3.6 makes a finite number of NaN on an H100
        back = jnp.where(jnp.isnan(x), jnp.nan, back)
    np.testing.assert_array_equal(back, want.astype(given).astype(jnp.float32))


def test_floats_of_8_bits_that_are_too_large(backend):
    from .dtype_kernels import cast

    x = jnp.asarray([1e6, -1e6, np.inf, -np.inf, np.nan], jnp.float32)
    for dtype, most in ((torch.float8_e5m2, 57344), (torch.float8_e4m3fn, 448)):
        got = jtbridge.wrap(cast(dtype), backend=backend)(x).astype(jnp.float32)
        np.testing.assert_array_equal(got, [most, -most, most, -most, np.nan])


def test_numbers_of_64_bits(backend):
    from .dtype_kernels import wide

    x = jnp.asarray([0.5, 1, -1, 3, 2, 2.5, 0, 0.25])
    np.testing.assert_array_equal(jtbridge.wrap(wide, backend=backend)(x), np.full(8, 4.0))
    np.testing.assert_array_equal(jax.vmap(jtbridge.wrap(wide, backend="xla"))(jnp.stack([x, x[::-1]]))[:, 0], [4, 5])


def test_an_empty_grid(backend):
    from .dtype_kernels import cast_or_nothing

    f = jtbridge.wrap(cast_or_nothing, backend=backend)
    np.testing.assert_array_equal(f(jnp.zeros(0)), np.ones(3))
    np.testing.assert_array_equal(f(jnp.zeros(2)), [0, 0, 1])
    assert kernels_in(jtbridge.wrap(cast_or_nothing), jnp.zeros(0)) == []
    assert kernels_in(jtbridge.wrap(cast_or_nothing), jnp.zeros(2)) == ["cast_kernel"]


def test_nvidia_device_library(backend):
    from .dtype_kernels import library

    x = np.float32([0.5, 2, -2.5, 1.5, -0.0, np.nan, -3.4, 2.6])
    with np.errstate(invalid="ignore"):
        want = [
            np.sign(x) * np.floor(np.abs(x) + 0.5),
            np.signbit(x),
            np.where(np.isnan(x) | (x > 1), 2**x, x),
            x / 2,
        ]
    np.testing.assert_allclose(jtbridge.wrap(library, backend=backend)(x), want, rtol=1e-6)
    assert kernels_in(jtbridge.wrap(library), x) == ["library_kernel"]


@pytest.mark.skipif(ON_GPU, reason="a GPU has the function that the interpreter lacks")
def test_an_error_in_a_kernel_names_it_and_its_line():
    from .dtype_kernels import remainder

    what = (
        r"Kernel `remainder_kernel` failed in Triton's interpreter, which runs kernels on a CPU, at "
        r".*dtype_kernels.py:\d+: "
        r"NotImplementedError: libdevice.remainder cannot be interpreted on a CPU"
    )
    with pytest.raises(errors.LaunchError, match="^" + what):
        jtbridge.wrap(remainder, backend="dlpack")(jnp.ones(4))
    with pytest.raises(jax.errors.JaxRuntimeError, match=what):
        jtbridge.wrap(remainder, backend="xla")(jnp.ones(4))
    assert kernels_in(jtbridge.wrap(remainder), jnp.ones(4)) == ["remainder_kernel"]


def test_failed_kernel_compilation_names_the_kernel():
    from .dtype_kernels import library

    traced = jax.jit(jtbridge.wrap(library, backend="xla")).trace(jnp.ones(4))
    with (
        pretending(90),
        pytest.raises(errors.LaunchError, match=r"^Kernel `library_kernel` cannot run on"),
    ):
        traced.lower(lowering_platforms=("tpu",))
