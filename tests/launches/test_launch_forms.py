"""Every form of a launch gives the same program, and passes the kernel the numbers that Triton would pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge import errors
from jtbridge.triton._versions import passes_aliases_twice
from tests.kernels.harness import ON_GPU, kernels_in, needs_compiler, needs_triton, pretending

pytestmark = [needs_triton, needs_compiler]

X = np.random.default_rng(0).standard_normal(64).astype(np.float32)


@pytest.mark.parametrize("way", ["by_a_model", "on_amd", "reset", "held", "run", "by_name", "with_registers"])
def test_launch_forms(way, backend):
    if ON_GPU and way == "on_amd" and backend == "dlpack":
        pytest.skip("Triton itself refuses the options of AMD's GPUs on another GPU")
    from .way_kernels import WAYS

    np.testing.assert_array_equal(jtbridge.wrap(WAYS[way], backend=backend)(X), X)
    assert kernels_in(jtbridge.wrap(WAYS[way]), X) == ["add_kernel"]


def test_autotuning_uses_the_performance_model():
    from jtbridge.triton.launches._launch import Launch

    from .way_kernels import blocks, by_a_model

    x = torch.empty(64)
    launch = Launch(by_a_model, blocks, ("x_ptr", "out_ptr"), {"n": 64}, {})
    (only,) = launch.configurations({"x_ptr": x, "out_ptr": x, "n": 64})
    assert (only.constants, only.num_warps) == ({"BLOCK": 32}, 2)


def test_cooperative_grids_are_refused(backend):
    from .way_kernels import waits_for_all

    with pytest.raises(errors.LaunchError, match=r"^Kernel `add_kernel` is launched with `launch_cooperative_grid`"):
        jtbridge.wrap(waits_for_all, backend=backend)(X)


@pytest.mark.parametrize("flag", [True, False])
def test_numbers_have_the_types_of_triton(backend, flag):
    from .way_kernels import numbers

    want = X * flag + 1 + (4 if flag else 0) + 3
    np.testing.assert_allclose(jtbridge.wrap(numbers, backend=backend)(X, flag), want, rtol=1e-3)
    assert kernels_in(lambda x: jtbridge.wrap(numbers)(x, flag), X) == ["numbers_kernel"]


def test_an_operator_that_writes_to_its_argument(backend):
    from .way_kernels import end_squared, square_

    want = np.where(np.arange(64) < 16, X, X * X)
    f = jtbridge.wrap(end_squared, backend=backend)
    np.testing.assert_array_equal(f(X), want)
    np.testing.assert_array_equal(jax.lax.map(f, np.stack([X, X])), [want, want])
    assert kernels_in(jtbridge.wrap(end_squared), X) == ["square_kernel"]
    _, mutated = jtbridge.wrap(lambda x: square_(x), backend=backend, return_mutated=True)(X)
    np.testing.assert_array_equal(jax.tree.leaves(mutated)[0], X * X)


def test_complex_numbers_are_refused():
    from .way_kernels import of_complex

    with pytest.raises(errors.LaunchError, match=r"`square_kernel` was given a tensor of torch.complex64 for `x_ptr`"):
        jtbridge.wrap(of_complex)(X)


def test_tensor_descriptors_of_the_device(backend):
    from .way_kernels import described

    x = jnp.asarray(X.reshape(4, 16))
    if ON_GPU and backend == "xla" and passes_aliases_twice():
        pytest.skip("jax-triton 0.3 gives descriptors no memory: see the next test")
    for dtype in ("float32", "bfloat16"):
        got = jtbridge.wrap(described, backend=backend)(x.astype(dtype))
        np.testing.assert_array_equal(got, 2 * x.astype(dtype))


def test_tensor_descriptors_are_refused_without_jax_triton_scratch_memory():
    from .way_kernels import described

    x = jnp.asarray(X.reshape(4, 16))
    with pretending(80):
        text = jax.jit(jtbridge.wrap(described)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @triton_kernel_call") == 1
    if passes_aliases_twice():
        with pytest.raises(errors.LaunchError, match=r"`described_kernel` cannot .* calls `tl.make_tensor_descriptor`"):
            kernels_in(jtbridge.wrap(described), x)
    else:
        assert kernels_in(jtbridge.wrap(described), x) == ["described_kernel"]


def test_kernels_in_called_functions_are_launched_by_triton(monkeypatch):
    from triton.runtime.jit import JITFunction

    from jtbridge.triton import intercepted_launches
    from jtbridge.triton.launches._launch import Launch
    from jtbridge.triton.launches._memory import memories_of
    from jtbridge.triton.launches._operator import run_on_gpu

    from .way_kernels import add_kernel

    calls = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **kwargs: calls.append((kernel, args, kwargs)))
    tensors = [torch.empty(64, device="meta"), torch.empty(64, device="meta")]
    memories, views = memories_of(tensors)
    names = ("x_ptr", "out_ptr")
    launch = Launch(add_kernel, (4,), names, {"n": 64, "BLOCK": 16}, {"num_warps": 2}, views=tuple(views))
    with intercepted_launches() as launched:
        run_on_gpu(launch, memories)
    ((kernel, args, given),) = calls
    assert (kernel, args, launched) == (add_kernel, (), [])
    assert {name: given.pop(name).shape for name in names} == dict.fromkeys(names, (64,))
    assert given == {"n": 64, "BLOCK": 16, "num_warps": 2, "grid": (4,), "warmup": False}
