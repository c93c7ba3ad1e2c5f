"""Launches of functions that torch runs: from several threads, and in a backward that autograd runs."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtbridge
from tests.kernels.harness import needs_compiler, needs_triton

pytestmark = [needs_triton, needs_compiler]

X = jnp.arange(1.0, 6.0)


@pytest.mark.parametrize("derivative", [jax.grad, lambda f: jax.jit(jax.grad(jax.checkpoint(f))), jax.jacrev])
@pytest.mark.parametrize("backend", ["xla", "dlpack", "callback"])
def test_launch_in_the_backward_only(backend, derivative):
    from .kernels import Halved

    f = jtbridge.wrap(Halved.apply, backend=backend)
    np.testing.assert_array_equal(derivative(lambda x: f(x).sum())(X), np.full(5, 0.5))


@pytest.mark.parametrize("backend", ["dlpack", "callback"])
def test_functions_called_without_a_trace(backend):
    from .kernels import add

    shape = jax.ShapeDtypeStruct((5,), jnp.float32)
    f = jtbridge.wrap(lambda x: add(x, x), backend=backend, effects="ordered", output_shapes=shape)
    np.testing.assert_array_equal(jax.jit(f)(X), 2 * X)
    data = jtbridge.wrap(lambda x: add(x, x) if x.sum().item() > 1 else x, backend=backend)
    np.testing.assert_array_equal(jax.jit(data)(X), 2 * X)


def test_several_threads():
    from triton.runtime.jit import JITFunction

    from jtbridge.triton.launches._interception import _mutated_names

    from .kernels import add

    _mutated_names.cache_clear()  # each kernel is analysed while others run
    own = JITFunction.run
    f = jtbridge.wrap(lambda x: add(add(x, x), x), backend="callback")
    f(X)
    failed = []

    def work(number):
        try:
            for size in (3, 4, 5, 6) * 4:
                x = np.full(size, number, np.float32)
                np.testing.assert_array_equal(f(x), 3 * x)
        except Exception as error:  # noqa: BLE001  (of whatever type: another thread cannot raise it)
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert JITFunction.run is own
