"""Programs that once ended the process, by XLA's CPU compiler or a null pointer. A child process must survive them."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

# Each program prints only differences from torch. Overwritten memory often shows only at the end of the process.
PRELUDE = """
import jax, jax.numpy as jnp, numpy as np, torch, jtbridge
import torch.nn.functional as F
rng = np.random.default_rng(0)
def array(*shape):
    return rng.uniform(-1, 1, shape).astype(np.float32)
def check(fn, in_axes, *arrays):
    wrapped = jax.jit(jax.vmap(jtbridge.wrap(fn, backend="xla"), in_axes=in_axes))
    expected = torch.func.vmap(fn, in_dims=in_axes)(*map(torch.from_numpy, arrays))
    for _ in range(3):
        np.testing.assert_allclose(wrapped(*arrays), expected.numpy(), rtol=1e-4, atol=1e-4)
"""
PROGRAMS = {
    "the memory of a traced tensor": """
        import ctypes
        def numbers(tensor):
            return np.ctypeslib.as_array((ctypes.c_float * 4).from_address(tensor.data_ptr()))
        writes = [
            lambda x: np.from_dlpack(x).__setitem__(0, 7),
            lambda x: torch.from_dlpack(x).add_(1),
            lambda x: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)).add_(1),
            lambda x: numbers(x).fill(9),
        ]
        for write in writes:
            def fn(x):
                write(x.detach())
                return x * 1
            x = jnp.arange(40000.0)
            expected = fn(torch.arange(40000.0)).numpy()
            for backend in ("auto", "dlpack", "callback"):
                f = jtbridge.wrap(fn, backend=backend)
                np.testing.assert_array_equal(jax.jit(lambda x: f(x))(x), expected)
                np.testing.assert_array_equal(x, np.arange(40000.0))
        try:
            print(jtbridge.wrap(fn, backend="xla")(x))
        except jtbridge.errors.TranslationError:
            pass
    """,
    "one grid, a batch of images": """
        check(lambda g, im: F.grid_sample(im, g, align_corners=True), (None, 0), array(2, 16, 16, 2),
              array(3, 2, 3, 16, 16))
    """,
    "one grid, a batch of batches of volumes": """
        check(lambda g, im: F.grid_sample(im, g, align_corners=False), (None, 0), array(2, 4, 4, 4, 3),
              array(3, 2, 3, 4, 4, 4))
    """,
    "gradient by the images of a warp": """
        def loss(im, g):
            return (F.grid_sample(im, g, align_corners=True) ** 2).sum()
        f = jtbridge.wrap(loss, backend="xla")
        im, g = array(3, 2, 3, 16, 16), array(2, 16, 16, 2)
        got = jax.jit(jax.vmap(jax.grad(f), in_axes=(0, None)))(im, g)
        expected = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None))(torch.from_numpy(im), torch.from_numpy(g))
        np.testing.assert_allclose(got, expected.numpy(), rtol=1e-3, atol=1e-3)
    """,
    "gradient of a warp that reflects, at places without numbers": """
        f = jtbridge.wrap(lambda im, g: F.grid_sample(im, g, "bilinear", "reflection", False).sin().sum())
        im, g = array(4, 8, 64, 64), np.full((4, 64, 64, 2), np.inf, np.float32)
        jax.block_until_ready(jax.jit(jax.grad(f, (0, 1)))(im, g))
    """,
    "the places of maxima, in forward mode": """
        f = jtbridge.wrap(lambda x: F.fractional_max_pool2d(x, 3, output_size=2), backend="xla")
        x, key = array(1, 3, 9, 9), jax.random.key(0)
        slope = jax.jit(lambda x, t: jax.jvp(lambda x: f(x, rng=key), (x,), (t,))[1])
        np.testing.assert_allclose(slope(x, x), jax.jit(f)(x, rng=key), rtol=1e-6)  # maxima are linear in a scale
    """,
    "the sum of a product of rank 7": """
        check(lambda a, b: (a * b).sum(3), (0, None), array(2, 16, 16, 2, 2, 3, 3), array(16, 16, 1, 2, 1, 1))
    """,
    "the sum of a product of rank 8, in a loop": """
        def steps(x, y):
            return jax.lax.scan(lambda c, _: (c, f(c, y)), x, None, length=2)[1]
        f = jtbridge.wrap(lambda a, b: (a * b).sum((1, 4)), backend="xla")
        x, y = array(3, 3, 2, 4, 4, 4, 2, 8), array(3, 2, 4, 1, 4, 2, 1)
        got = jax.jit(steps)(x, y)
        np.testing.assert_allclose(got[1], (x * y).sum((1, 4)), rtol=1e-4, atol=1e-4)
    """,
    "a mean of squares over middle dimensions, three times batched": """
        f = jtbridge.wrap(lambda a, b: ((a - b) * b).mean((0, 2)), backend="xla")
        x, y = array(2, 3, 2, 8, 4, 8, 4), array(8, 4, 8, 1)
        for _ in range(3):
            batched = jax.jit(jax.vmap(jax.vmap(jax.vmap(f, (0, None)), (0, None)), (0, None)))(x, y)
        np.testing.assert_allclose(batched, ((x - y) * y).mean((3, 5)), rtol=1e-4, atol=1e-4)
    """,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_process_survives(name: str):
    program = PRELUDE + textwrap.dedent(PROGRAMS[name])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
