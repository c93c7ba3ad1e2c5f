"""Users' kernels: values, gradients and batches, in the interpreter on a CPU and lowered for a GPU."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge import errors
from tests.kernels.harness import ON_GPU, kernels_in, needs_compiler, needs_triton, pretending

pytestmark = [needs_triton, needs_compiler]

X = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
Y = np.random.default_rng(1).standard_normal((6, 5)).astype(np.float32)


def test_a_bare_launch(backend):
    from .kernels import add

    f = jtbridge.wrap(add, backend=backend)
    np.testing.assert_allclose(jax.jit(f)(X, Y), X + Y, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(f)(X, Y), X + Y, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(f, (0, None))(X, Y[0]), X + Y[0], rtol=1e-6)


def test_small_eager_calls_on_the_only_device(monkeypatch: pytest.MonkeyPatch):
    """They take a fast path, which also launches kernels. The other tests have several devices, which disable it."""
    from jtbridge.calls.eager import _direct

    from .kernels import add, blocks, scale_kernel, wrapped_add

    def scaled(x):
        scale_kernel[blocks(x.numel())](x, 3.0, x.numel())
        return x

    monkeypatch.setattr(_direct, "only_device", lambda: jax.devices()[0])
    x, y = jnp.asarray(X), jnp.asarray(Y)
    assert _direct.small_tensors((x, y)) is not None
    np.testing.assert_allclose(jtbridge.wrap(add)(x, y), X + Y, rtol=1e-6)
    np.testing.assert_allclose(jtbridge.wrap(wrapped_add)(x, y), X + Y, rtol=1e-6)
    np.testing.assert_allclose(jtbridge.wrap(scaled)(x), 3 * X, rtol=1e-6)
    np.testing.assert_array_equal(x, X)


def test_batch_uses_the_vmap_rule_of_the_operator(backend):
    from .kernels import batches_of_sum, operator_sum

    f = jtbridge.wrap(operator_sum, backend=backend)
    batches_of_sum.clear()
    np.testing.assert_allclose(jax.jit(jax.vmap(f))(X, Y), X + Y, rtol=1e-6)
    assert set(batches_of_sum) == {torch.Size([6, 5])}
    np.testing.assert_allclose(jax.vmap(f, (1, None), 1)(X, Y[:, 0]), X + Y[:, :1], rtol=1e-6)
    assert batches_of_sum[-1] == torch.Size([5, 6])
    np.testing.assert_allclose(jax.vmap(jax.vmap(f), (0, None))(np.stack([X, Y]), Y), np.stack([X, Y]) + Y, rtol=1e-6)
    assert batches_of_sum[-1] == torch.Size([2, 6, 5])
    grads = jax.vmap(jax.grad(lambda x, y: (f(x, y) ** 2).sum(), (0, 1)))(X, Y)
    np.testing.assert_allclose(grads, [2 * (X + Y)] * 2, rtol=1e-5)


def test_vmap_rules_and_loops_on_a_gpu():
    from .kernels import operator_add, operator_sum

    for operator, loops in ((operator_sum, False), (operator_add, True)):
        run = jax.vmap(jtbridge.wrap(operator))
        assert kernels_in(run, X, Y) == ["add_kernel"]
        with pretending(90):
            text = jax.jit(run).trace(X, Y).lower(lowering_platforms=("cuda",)).as_text()
        assert ("stablehlo.while" in text) == loops


def test_parameters_with_the_names_of_launch_options(backend):
    if ON_GPU and backend == "dlpack":
        pytest.skip("Triton's own autotuner cannot launch such a kernel")
    from .kernels import launched_short, options_are_parameters

    f = jtbridge.wrap(options_are_parameters, backend=backend)
    x = jnp.arange(1.0, 9.0)
    by_warps, by_stages = f(x)
    # Without a GPU the first configuration is used; on a GPU, the faster one.
    warps = int((by_warps != 0).sum()) if ON_GPU else 2
    assert warps in (2, 4)
    np.testing.assert_array_equal(by_warps, np.where(np.arange(8) < warps, 3 * x, 0))
    np.testing.assert_array_equal(by_stages, 8 * x)
    with pytest.raises(errors.LaunchError, match=r"`stages_kernel` was launched without its parameters num_warps"):
        jtbridge.wrap(launched_short, backend=backend)(x)


def test_parameters_with_the_names_of_launch_options_are_lowered():
    from .kernels import options_are_parameters

    f = jtbridge.wrap(options_are_parameters)
    assert sorted(kernels_in(f, jnp.ones(8))) == ["stages_kernel", "warps_kernel"]


def test_loop_counters_are_tensors(backend):
    from .kernels import rows_scaled

    want = X * np.float32([[1], [2], [3], [4], [-4], [0]])
    np.testing.assert_array_equal(jtbridge.wrap(rows_scaled, backend=backend)(X), want)


def test_builtins_by_other_names(backend):
    from .kernels import clipped

    np.testing.assert_array_equal(jtbridge.wrap(clipped, backend=backend)(X), np.maximum(X, 0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products_of_matrices(backend, dtype):
    from .kernels import product

    a, b = (jnp.asarray(np.random.default_rng(i).standard_normal((16, 16)), dtype) for i in range(2))
    got = jtbridge.wrap(product, backend=backend)(a, b)
    assert got.dtype == a.dtype
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers_are_rounded_to_their_dtype(backend, dtype):
    from .kernels import rounded

    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(1 + rng.standard_normal(50), dtype) for _ in range(2))
    out, total, most = jtbridge.wrap(rounded, backend=backend)(x, y)
    # Numbers with a dtype are rounded after every step, in jnp as in Triton.
    with jax.disable_jit():
        want = jnp.where(x < y, x * y - x, -x / (y + jnp.arange(50, dtype=dtype)))
    if ON_GPU:  # a compiler may round a product and a difference once
        eps = float(jnp.finfo(dtype).eps)
        largest = float(jnp.abs(x * y).max() + jnp.abs(x).max())
        np.testing.assert_allclose(np.float32(out), np.float32(want), rtol=2 * eps, atol=eps * largest)
    else:
        np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(most, x.max())
    if ON_GPU:  # and adds in another order
        np.testing.assert_allclose(float(total[0]), float(np.float64(x).sum()), rtol=50 * float(jnp.finfo(dtype).eps))
        return
    step = jnp.zeros((), dtype)
    for number in x:
        step = step + number
    np.testing.assert_array_equal(total[0], step)
    whole = np.asarray(x, np.float64).sum()
    np.testing.assert_allclose(float(total[1]), whole, rtol=float(jnp.finfo(dtype).eps))


def test_in_place_autotuned_with_a_grid_of_its_block(backend):
    from .kernels import scaled_in_place

    np.testing.assert_allclose(jtbridge.wrap(scaled_in_place, backend=backend)(X), 3 * X, rtol=1e-6)
    np.testing.assert_allclose(jtbridge.wrap(scaled_in_place, backend=backend)(X, 1.0), X, rtol=1e-6)


def test_heuristics_and_results_before_arguments(backend):
    from .kernels import every_other_row_sum, row_sums

    np.testing.assert_allclose(jtbridge.wrap(row_sums, backend=backend)(X), X.sum(1), rtol=1e-5)
    got = jtbridge.wrap(every_other_row_sum, backend=backend)(X)
    np.testing.assert_allclose(got, X[::2, :3].sum(1), rtol=1e-5)


def test_a_view_with_gaps_is_written(backend):
    from .kernels import column_scaled

    want = X.copy()
    want[:, 1] *= 10
    np.testing.assert_allclose(jtbridge.wrap(column_scaled, backend=backend)(X), want, rtol=1e-6)


def test_the_argument_itself_is_never_written(backend):
    from .kernels import blocks, scale_kernel

    def in_place(x):
        scale_kernel[blocks(x.numel())](x, 2.0, x.numel())
        return x + 0

    x = jnp.asarray(X)
    np.testing.assert_allclose(jtbridge.wrap(in_place, backend=backend)(x), 2 * X, rtol=1e-6)
    np.testing.assert_array_equal(x, X)
    _, mutated = jtbridge.wrap(in_place, backend=backend, return_mutated=True)(x)
    np.testing.assert_allclose(jax.tree.leaves(mutated)[0], 2 * X, rtol=1e-6)


# On a GPU its launches are not operators, so torch.vmap of them fails.
@pytest.mark.filterwarnings("ignore:torch.vmap cannot batch" if ON_GPU else "error")
def test_registered_backward(backend):
    from .kernels import scaled

    f = jtbridge.wrap(scaled, backend=backend)
    np.testing.assert_allclose(f(X), 9 * X**2, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(X), 18 * X, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(lambda x: f(x).sum())))(X), 18 * X, rtol=1e-5)


def test_without_a_backward_a_gradient_is_refused(backend):
    from .kernels import add

    f = jtbridge.wrap(add, backend=backend)
    with pytest.raises(Exception, match=r"Kernel `add_kernel` is launched where autograd records"):
        jax.grad(lambda x: f(x, Y).sum())(X)


def test_wrap_triton_and_triton_op(backend):
    from .kernels import operator_add, wrapped_add

    np.testing.assert_allclose(jtbridge.wrap(wrapped_add, backend=backend)(X, Y), X + Y, rtol=1e-6)
    f = jtbridge.wrap(operator_add, backend=backend)
    np.testing.assert_allclose(f(X, Y), X + Y, rtol=1e-6)
    by_x, by_y = jax.grad(lambda x, y: f(x, y).sum(), (0, 1))(X, Y)
    np.testing.assert_array_equal(by_x, np.ones_like(X))
    np.testing.assert_array_equal(by_y, 2 * np.ones_like(X))


def test_a_number_read_from_a_tensor_for_the_kernel(backend):
    from .kernels import mean_of_positive

    x = X[0]
    got = jax.jit(jtbridge.wrap(mean_of_positive, backend=backend))(x)
    np.testing.assert_allclose(got, [x[x > 0].mean()], rtol=1e-5)


def test_one_program_for_both_platforms():
    from .kernels import mean_of_positive, row_sums, scaled

    f, g = jtbridge.wrap(scaled), jtbridge.wrap(row_sums)
    for platforms in (("cuda",), ("cpu", "cuda")):
        assert kernels_in(jax.grad(lambda x: f(x).sum()), X, platforms=platforms) == ["scale_kernel"] * 2
        assert kernels_in(lambda x: g(2 * x), X, platforms=platforms) == ["row_sum_kernel"]
    assert kernels_in(jtbridge.wrap(mean_of_positive), X[0]) == ["mean_kernel"]


def test_unsupported_launches_give_the_reason():
    from .kernels import add_kernel, triton

    tuned = triton.autotune(configs=[triton.Config({"BLOCK": 64}, pre_hook=print)], key=[])(add_kernel)

    def hooked(x):
        tuned[(1,)](x, x, x.clone(), x.numel())
        return x

    def unknown(x):
        add_kernel[(1,)](x, x, x, 3, BLOCKS=64)
        return x

    def text(x):
        add_kernel[(1,)](x, x, x, "3", BLOCK=64)
        return x

    with pytest.raises(errors.LaunchError, match=r"^Kernel `add_kernel` is autotuned with hooks"):
        jtbridge.wrap(hooked)(X)
    with pytest.raises(errors.LaunchError, match=r"launched with BLOCKS, which it does not take"):
        jtbridge.wrap(unknown)(X)
    with pytest.raises(errors.LaunchError, match=r"^Kernel `add_kernel` was given a str for `n`"):
        jtbridge.wrap(text)(X)


def test_triton_state_is_restored():
    import triton.language as tl
    from triton.runtime.jit import JITFunction, KernelInterface

    from .kernels import add, half_of

    before = [dict(vars(place)) for place in (tl, tl.core, tl.tensor, tl.math, JITFunction, KernelInterface)]
    environment = dict(os.environ)
    jtbridge.wrap(add, backend="xla")(X, Y)
    assert [dict(vars(place)) for place in (tl, tl.core, tl.tensor, tl.math, JITFunction, KernelInterface)] == before
    assert dict(os.environ) == environment
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        half_of(3)


def test_numbers_used_outside_a_kernel_are_read_by_torch():
    from .kernels import counts_without_a_kernel, returns_a_number

    x = np.abs(X[0])
    mean, count = jtbridge.wrap(returns_a_number)(x)
    np.testing.assert_allclose(mean, [x.mean()], rtol=1e-5)
    assert count == 5
    with pytest.warns(errors.CalledWarning, match="it needs the values of tensors"):
        np.testing.assert_allclose(jax.jit(jtbridge.wrap(counts_without_a_kernel))(x), 5 * x, rtol=1e-6)
    # An assertion outside of a kernel is still checked.
    with pytest.raises(AssertionError, match="something is negative"):
        jtbridge.wrap(counts_without_a_kernel, backend="dlpack")(-x)
