"""Packed sequences with known lengths under `xla`, compared with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import jtbridge
from jtbridge.errors import DataDependentShapeError

X = torch.linspace(-1, 1, 5 * 3 * 4).reshape(5, 3, 4).cos()

NETWORKS: dict[str, Callable[[], torch.nn.Module]] = {
    "lstm": lambda: torch.nn.LSTM(4, 3),
    "lstm of two layers in both directions": lambda: torch.nn.LSTM(4, 3, 2, bidirectional=True),
    "gru in both directions": lambda: torch.nn.GRU(4, 3, bidirectional=True, bias=False),
    "tanh": lambda: torch.nn.RNN(4, 3, 2),
}


def assert_matches_torch(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor = X) -> None:
    f = jtbridge.wrap(fn, backend="xla")
    given = jtbridge.to_jax(x)
    np.testing.assert_allclose(jax.jit(f)(given), fn(x).detach(), rtol=1e-5, atol=1e-6)
    wanted = x.clone().requires_grad_()
    (fn(wanted) ** 2).sum().backward()
    got = jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))(given)
    np.testing.assert_allclose(got, wanted.grad, rtol=1e-4, atol=1e-5)


def through(network: torch.nn.Module, x: torch.Tensor, lengths: Any, **options: Any) -> torch.Tensor:
    """Return all results of a network on a packed sequence, in one vector."""
    out, states = network(pack_padded_sequence(x, lengths, **options))
    y, ends = pad_packed_sequence(out, padding_value=0.5, total_length=6)
    states = states if isinstance(states, tuple) else (states,)
    return torch.cat([t.flatten() for t in (y, ends.to(y), out.data, *states)])


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("lengths", [[5, 3, 1], [4, 4, 4]])
def test_networks(name: str, lengths: list[int]):
    torch.manual_seed(0)
    network = NETWORKS[name]()
    assert_matches_torch(lambda x: through(network, x, lengths))


def test_lengths_in_any_order():
    torch.manual_seed(0)
    network = NETWORKS["lstm of two layers in both directions"]()
    assert_matches_torch(lambda x: through(network, x, [2, 5, 3], enforce_sorted=False))


def test_lengths_that_are_closed_over():
    torch.manual_seed(0)
    network, lengths = NETWORKS["gru in both directions"](), torch.tensor([4, 2, 2])
    assert_matches_torch(lambda x: through(network, x, lengths))


def test_batch_first_and_a_list_of_sequences():
    assert_matches_torch(
        lambda x: pad_packed_sequence(pack_padded_sequence(x, [3, 3, 2, 1, 1], batch_first=True), True)[0]
    )
    assert_matches_torch(lambda x: pack_sequence([x[:4, 0], x[:3, 1]]).data)


def test_a_batch_and_a_second_derivative():
    torch.manual_seed(0)
    network = NETWORKS["lstm"]()
    f = jtbridge.wrap(lambda x: through(network, x, [4, 2, 1]).sum(), backend="xla")
    xs = jtbridge.to_jax(torch.stack([X, X.flip(0)]))
    np.testing.assert_allclose(jax.vmap(f)(xs), [f(x) for x in xs], rtol=1e-5)
    got = jax.jit(jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum()))(xs[0])
    wanted = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(through(network, wanted, [4, 2, 1]).sum(), wanted, create_graph=True)
    np.testing.assert_allclose(got, torch.autograd.grad((slope**2).sum(), wanted)[0], rtol=1e-4, atol=1e-5)


def test_lengths_that_are_an_argument_are_refused_under_a_trace():
    def fn(x, lengths):
        return pack_padded_sequence(x, lengths).data

    f, x = jtbridge.wrap(fn), jtbridge.to_jax(X)
    with pytest.raises(DataDependentShapeError, match="depends on the values of its arguments"):
        jax.jit(f)(x, jnp.array([3, 2, 1]))
    for lengths in ([3, 2, 1], [5, 5, 2]):
        np.testing.assert_array_equal(f(x, jnp.array(lengths)), fn(X, torch.tensor(lengths)))


def test_a_call_of_torch_gives_the_same():
    torch.manual_seed(0)
    network = NETWORKS["lstm"]()
    f = jtbridge.wrap(lambda x: through(network, x, [4, 2, 1]), backend="dlpack")
    np.testing.assert_allclose(jax.jit(f)(jtbridge.to_jax(X)), through(network, X, [4, 2, 1]).detach(), rtol=1e-6)
    got = jax.grad(lambda x: f(x).sum())(jtbridge.to_jax(X))
    wanted = X.clone().requires_grad_()
    through(network, wanted, [4, 2, 1]).sum().backward()
    np.testing.assert_allclose(got, wanted.grad, rtol=1e-5, atol=1e-6)
