"""A kernel gets the whole memory behind each argument, and each memory once."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge import errors
from tests.kernels.harness import ON_GPU, kernels_in, needs_compiler, needs_triton, pretending

pytestmark = [needs_triton, needs_compiler]

X = jnp.arange(1.0, 25.0).reshape(4, 6)


def halves(x):
    return x * np.repeat(np.float32([2, 3]), 3)


def columns(x):
    return x * np.float32([2, 1, 1, 1, 3, 1])


def rows(x):
    return x[..., 2:5]


def shaped(x):
    return jnp.concatenate([x.reshape(*x.shape[:-2], 24)[..., :12].reshape(*x.shape[:-2], 6, 2)], -1)


def power(x):
    flat = x.reshape(*x.shape[:-2], 24)
    return flat.at[..., 1:6].set(flat[..., :1] * 2.0 ** np.arange(1, 6))


def put(x):
    return x.reshape(*x.shape[:-2], 24).at[..., 0].set(5).at[..., 1].set(7)


CASES = {
    "halves_scaled": halves,
    "columns_scaled": columns,
    "from_the_first_row": rows,
    "by_the_shapes_of_views": shaped,
    "powers": power,
    "put_twice": put,
}


@pytest.mark.parametrize("backend", ["xla", "dlpack", "callback"])
@pytest.mark.parametrize("name", CASES)
def test_views_of_the_same_storage(name, backend):
    from . import memory_kernels

    f, want = jtbridge.wrap(getattr(memory_kernels, name), backend=backend), CASES[name]
    before = np.array(X)
    np.testing.assert_array_equal(f(X), want(X))
    np.testing.assert_array_equal(jax.jit(f)(X), want(X))
    batch = jnp.stack([X, -X, 2 * X])
    np.testing.assert_array_equal(jax.lax.map(f, batch), want(batch))
    np.testing.assert_array_equal(X, before)


@pytest.mark.parametrize("name", CASES)
def test_batches_of_views(name):
    from . import memory_kernels

    f, want = getattr(memory_kernels, name), CASES[name]
    batch = jnp.stack([X, -X, 2 * X])
    translated = jax.vmap(jtbridge.wrap(f, backend="xla"), in_axes=2, out_axes=0)
    np.testing.assert_array_equal(translated(jnp.moveaxis(batch, 0, 2)), want(batch))
    # torch.vmap hides the base of other views; for "put_twice" it may give a batch other strides.
    whole = name == "by_the_shapes_of_views"
    with (
        contextlib.nullcontext() if whole else pytest.warns(errors.SequentialVmapWarning, match=r"torch\.vmap"),
    ):
        np.testing.assert_array_equal(jax.vmap(jtbridge.wrap(f, backend="dlpack"))(batch), want(batch))


@pytest.mark.parametrize(("name", "operands"), [("halves_scaled", 1), ("powers", 1), ("from_the_first_row", 1)])
def test_one_storage_is_one_operand(name, operands):
    from . import memory_kernels

    f = jtbridge.wrap(getattr(memory_kernels, name))
    assert len(kernels_in(f, X)) == 1
    with pretending(90):
        text = jax.jit(f).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = [line for line in text.splitlines() if "@triton_kernel_call" in line]
    assert call.split("(")[1].split(")")[0].count("%") == operands
    assert ("output_operand_alias" in call) == (name != "from_the_first_row")


def test_unknown_storage_layout_is_refused():
    from . import memory_kernels as k

    for function in (k.written_as_two_types, k.written_detached):
        with pytest.raises(errors.LaunchError, match=r"^Kernel `put_two_kernel` writes to a tensor whose storage"):
            jtbridge.wrap(function)(X)
        with pytest.raises(errors.LaunchError, match=r"^Kernel `put_two_kernel` writes to a tensor whose storage"):
            jtbridge.wrap(function, backend="dlpack")(X)


def test_symbolic_sizes_are_refused():
    from .memory_kernels import put_twice

    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 4"), jnp.float32)
    with pytest.raises(errors.TranslationError, match="Kernel `put_two_kernel` was launched on a tensor whose size"):
        jtbridge.export(jtbridge.wrap(put_twice, backend="xla"), rows)


def test_closed_over_tensors_may_be_views():
    from .memory_kernels import copy_rows_kernel

    weights = torch.arange(24.0, device="cuda" if ON_GPU else "cpu").reshape(4, 6)
    last = weights[:, 3:]

    def f(x):
        out = torch.empty(4, 3, device=x.device)
        copy_rows_kernel[(4,)](last, out, last.stride(0), 3, BLOCK=4)
        return out + x

    for backend in ("xla", "dlpack"):
        np.testing.assert_array_equal(jtbridge.wrap(f, backend=backend)(jnp.float32(1)), last.cpu() + 1)
