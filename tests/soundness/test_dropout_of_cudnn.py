"""Dropout between the layers of a cuDNN network depends on the key. The tests replace cuDNN's operators on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge

pytestmark = pytest.mark.filterwarnings("ignore::jtbridge.errors.CalledWarning")
X = jnp.ones(3)


def times_its_state(x, weights, stride, buffer, hx, *options):
    del weights, stride, buffer
    *_, state = options
    return x * state.sum(), hx.clone(), hx.clone(), hx.new_empty(0), hx.new_empty(0, dtype=torch.uint8)


def state_of_dropout(dropout, train, seed, *, dtype=None, layout=None, device=None, pin_memory=False):
    del dropout, train, dtype, layout, device, pin_memory
    return torch.tensor([seed % 251, 1], dtype=torch.uint8)


@pytest.fixture
def cudnn_on_a_cpu() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_cudnn_rnn", times_its_state, "CPU")
    library.impl("_cudnn_init_dropout_state", state_of_dropout, "CPU")
    yield
    library._destroy()


def network(x: torch.Tensor) -> torch.Tensor:
    weights = [torch.ones(3)]
    return torch.ops.aten._cudnn_rnn(x, weights, 4, None, x, None, 2, 16, 0, 2, False, 0.5, True, False, [], None)[0]


def network_of_values(x: torch.Tensor) -> torch.Tensor:
    return network(x) if x.sum().item() > 0 else x


@pytest.mark.usefixtures("cudnn_on_a_cpu")
@pytest.mark.parametrize("function", [network, network_of_values])
@pytest.mark.parametrize("backend", ["auto", "dlpack"])
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_state_depends_only_on_the_key(function, backend: str, jitted: bool):
    f = jtbridge.wrap(function, backend=backend)
    call = (jax.jit if jitted else lambda g: g)(lambda x, seed: f(x, rng=jax.random.key(seed)))
    before = torch.get_rng_state()
    results = [np.asarray(call(X, seed)) for seed in (0, 1, 2)]
    assert len({float(result[0]) for result in results}) == 3
    np.testing.assert_array_equal(call(X, 1), results[1])
    assert torch.equal(torch.get_rng_state(), before)
