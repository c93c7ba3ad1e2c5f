"""Recurrent layers as loops: the same as torch's, which are traced step by step."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

import jtbridge
from jtbridge.capture.modes.overrides import OverrideMode

from .harness import check

TIGHT: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def _replaced(function):
    """Return a function that uses `OverrideMode` only during a trace, so that the expected values are torch's own."""

    def run(*args):
        traced = _get_current_dispatch_mode() is not None
        with OverrideMode() if traced else contextlib.nullcontext():
            return function(*args)

    return run


def _leaves(out):
    y, states = out
    return [y, *states] if isinstance(states, tuple) else [y, states]


NETWORKS = {
    "lstm": (torch.nn.LSTM, {}),
    "lstm of two layers in both directions": (torch.nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "lstm with projections": (torch.nn.LSTM, {"proj_size": 2, "num_layers": 2, "bidirectional": True}),
    "lstm with projections, without biases": (torch.nn.LSTM, {"proj_size": 2, "bias": False}),
    "lstm without biases": (torch.nn.LSTM, {"bias": False, "batch_first": True}),
    "gru of two layers": (torch.nn.GRU, {"num_layers": 2}),
    "gru in both directions": (torch.nn.GRU, {"bidirectional": True, "bias": False}),
    "tanh": (torch.nn.RNN, {}),
    "relu in both directions": (torch.nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_values_and_gradients(name):
    kind, options = NETWORKS[name]
    torch.manual_seed(0)
    network = kind(3, 4, **options)
    check(_replaced(lambda x: _leaves(network(x))), torch.randn(5, 2, 3), grad=True, **TIGHT)


def test_gradients_of_weights_and_states():
    torch.manual_seed(0)
    network = torch.nn.LSTM(3, 4)
    names = [name for name, _ in network.named_parameters()]

    def run(x, h, c, *weights):
        return _leaves(torch.func.functional_call(network, dict(zip(names, weights, strict=True)), (x, (h, c))))

    weights = [p.detach() for p in network.parameters()]
    check(
        _replaced(run), torch.randn(5, 2, 3), torch.randn(1, 2, 4), torch.randn(1, 2, 4), *weights, grad=True, **TIGHT
    )


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_second_derivative(kind):
    torch.manual_seed(0)
    network = kind(2, 2).double()

    def slope(x):
        x = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(network(x)[0].square().sum(), x, create_graph=True)[0]

    check(_replaced(slope), torch.randn(2, 1, 2, dtype=torch.float64), grad=True)


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"batch_first": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.nn.GRU, torch.nn.RNN])
def test_derivatives_after_a_write_to_the_result(kind: Any, options: dict[str, Any]):
    network = kind(3, 4, **options)

    def loss(x):
        y, _ = network(x)
        y[:, 0] = 1.0
        y[1] *= 2
        return y.sin().sum()

    x = torch.randn(5, 2, 3).requires_grad_()
    (want,) = torch.autograd.grad(loss(x), x)
    f, at = jtbridge.wrap(loss, backend="xla"), jnp.array(x.detach().numpy())
    np.testing.assert_allclose(jax.jit(jax.grad(f))(at), want, **TIGHT)
    _, tangent = jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(at)
    np.testing.assert_allclose(tangent, (want * x.detach()).sum(), **TIGHT)
    hessian = torch.func.hessian(loss)(x.detach()).detach()
    np.testing.assert_allclose(jax.jit(jax.hessian(f))(at), hessian, **TIGHT)


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@pytest.mark.parametrize("derive", [jax.grad, lambda f: jax.grad(lambda x: jax.grad(f)(x).sum())])
def test_programs_do_not_grow_with_the_sequence(kind, derive):
    network = kind(3, 4)
    translated = jtbridge.wrap(lambda x: network(x)[0].square().sum(), backend="xla")
    short, long = (jax.jit(derive(translated)).lower(jax.numpy.zeros((n, 2, 3))).as_text() for n in (3, 12))
    assert len(long) < 1.1 * len(short)


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_bfloat16(kind):
    torch.manual_seed(0)
    network = kind(3, 4, bidirectional=True).bfloat16()
    x = torch.randn(5, 2, 3, dtype=torch.bfloat16)
    check(lambda x: _leaves(network(x)), x, grad=True, rtol=0.05, atol=0.05)


def test_unbatched_and_batched_by_jax():
    network = torch.nn.GRU(3, 4)
    check(_replaced(lambda x: network(x)[0]), torch.randn(5, 3), grad=True, **TIGHT)
    translated = jtbridge.wrap(_replaced(lambda x: network(x)[0]), backend="xla")
    x = torch.randn(6, 5, 2, 3)
    expected = torch.stack([network(row)[0] for row in x]).detach()
    torch.testing.assert_close(jtbridge.to_torch(jax.vmap(translated)(jtbridge.to_jax(x))), expected, **TIGHT)


def test_arguments_by_name():
    torch.manual_seed(0)
    x, h, weights = torch.randn(3, 2, 3), torch.zeros(1, 2, 4), [torch.randn(4, 3), torch.randn(4, 4)]

    def named(x, h, *params):
        how = {"has_biases": False, "num_layers": 1, "dropout": 0.0, "train": False, "bidirectional": False}
        return torch.rnn_tanh(input=x, hx=h, params=list(params), batch_first=False, **how)

    check(_replaced(named), x, h, *weights, **TIGHT)


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_operators_in_torch(kind):
    torch.manual_seed(0)
    network = kind(3, 2, num_layers=2, bidirectional=True).double()
    x = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)

    def run(x):
        with OverrideMode():
            return network(x)[0]

    expected = network(x)[0]
    torch.testing.assert_close(run(x), expected)
    wanted = torch.autograd.grad(expected.square().sum(), (x, *network.parameters()))
    torch.testing.assert_close(torch.autograd.grad(run(x).square().sum(), (x, *network.parameters())), wanted)
    torch.autograd.gradgradcheck(run, x[:2, :1].detach().requires_grad_())


def test_tangents_are_computed_by_torch():
    torch.manual_seed(0)
    network = torch.nn.GRU(3, 4)
    x, dx = torch.randn(2, 2, 1, 3)

    def run(x):
        with OverrideMode():
            return network(x)[0]

    expected = torch.func.jvp(lambda x: network(x)[0], (x,), (dx,))[1]
    assert expected.abs().sum() > 0
    torch.testing.assert_close(torch.func.jvp(run, (x,), (dx,))[1], expected)


CALLED = {
    "lstm": lambda: torch.nn.LSTM(3, 4),
    "lstm of two layers in both directions": lambda: torch.nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True),
    "lstm without biases": lambda: torch.nn.LSTM(3, 4, bias=False),
    "lstm in float64": lambda: torch.nn.LSTM(3, 4).double(),
    "gru": lambda: torch.nn.GRU(3, 4),
    "tanh": lambda: torch.nn.RNN(3, 4),
}


def _called(name):
    """Return a called function of x and the weights of a network, the same in torch, and its arguments."""
    torch.manual_seed(0)
    network = CALLED[name]()
    names, weights = zip(*network.named_parameters(), strict=True)

    def loss(x, *weights):
        y, states = torch.func.functional_call(network, dict(zip(names, weights, strict=True)), (x,))
        states = states if isinstance(states, tuple) else (states,)
        return y.square().sum() + sum(state.sin().sum() for state in states)

    x = torch.randn(5, 2, 3, dtype=weights[0].dtype)
    return jtbridge.wrap(loss, backend="dlpack"), loss, [x, *(w.detach() for w in weights)]


@pytest.mark.parametrize("name", CALLED)
def test_gradients_of_called_layers(name):
    with jax.enable_x64(True):
        wrapped, loss, tensors = _called(name)
        leaves = [t.clone().requires_grad_() for t in tensors]
        expected = torch.autograd.grad(loss(*leaves), leaves)
        positions = tuple(range(len(tensors)))
        found = jax.jit(jax.grad(wrapped, positions))(*jtbridge.to_jax(tensors))
        for array, tensor in zip(found, expected, strict=True):
            torch.testing.assert_close(jtbridge.to_torch(array), tensor, **TIGHT)


def test_gradient_of_a_called_lstm_matches_the_torch_kernel():
    wrapped, loss, tensors = _called("lstm of two layers in both directions")
    leaves = [t.clone().requires_grad_() for t in tensors]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    found = jax.jit(jax.grad(wrapped, tuple(range(len(tensors)))))(*jtbridge.to_jax(tensors))
    assert all(torch.equal(jtbridge.to_torch(a), b) for a, b in zip(found, expected, strict=True))


def test_batches_and_second_derivatives_of_called_gradients():
    wrapped, loss, (x, *weights) = _called("lstm")
    weights = jtbridge.to_jax(weights)
    rows = torch.stack([x, 2 * x])

    def slope(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(loss(x, *jtbridge.to_torch(weights)), x)[0]

    found = jax.jit(jax.vmap(jax.grad(wrapped), in_axes=(0, *[None] * len(weights))))(jtbridge.to_jax(rows), *weights)
    torch.testing.assert_close(jtbridge.to_torch(found), torch.stack([*map(slope, rows)]), **TIGHT)
    along = torch.randn_like(x)
    second = jax.jit(jax.grad(lambda x, dx: (jax.grad(wrapped)(x, *weights) * dx).sum()))
    step = 1e-2
    expected = (slope(x + step * along) - slope(x - step * along)) / (2 * step)  # the Hessian is symmetric
    found = jtbridge.to_torch(second(*jtbridge.to_jax([x, along])))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"proj_size": proj, "bidirectional": both, "num_layers": layers, "batch_first": both}
        for proj, both, layers in [(0, False, 2), (0, True, 3), (2, False, 3), (2, True, 2)]
    ],
    ids=str,
)
def test_dropout_between_the_layers_of_an_lstm(options: dict[str, Any]):
    """Each derivative belongs to the value that the same key gives."""
    torch.manual_seed(0)
    network = torch.nn.LSTM(2, 3, dropout=0.5, **options).double().train()
    before = torch.get_rng_state()
    with jax.enable_x64(True):
        f = jtbridge.wrap(lambda x: network(x)[0].sum())
        x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3, 2)))
        step, key = jnp.cos(x), jax.random.key(7)

        def of(x):
            return f(x, rng=key)

        value = jax.jit(of)
        assert value(x) == value(x)
        assert value(x) != jax.jit(lambda x: f(x, rng=jax.random.key(8)))(x)
        by_difference = (value(x + 1e-6 * step) - value(x - 1e-6 * step)) / 2e-6
        by_gradient = (jax.jit(jax.grad(of))(x) * step).sum()
        tangent = jax.jit(lambda x: jax.jvp(of, (x,), (step,))[1])(x)
        linear = jax.jit(lambda x: jax.linearize(of, x)[1](step))(x)
        np.testing.assert_allclose([by_gradient, tangent, linear], [by_difference] * 3, rtol=1e-6)
        with pytest.raises(jtbridge.errors.RandomnessError):
            jax.jit(f)(x)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"proj_size": 2}], ids=str)
@pytest.mark.parametrize("by", ["auto", "xla", "dlpack"])
def test_lstm_under_autocast_matches_torch(by: str, options: dict[str, Any]):
    layer = torch.nn.LSTM(3, 4, **options)
    x = torch.randn(5, 2, 3)

    def fn(t: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(t)[0]

    try:
        wanted = fn(x)
    except RuntimeError as error:
        if "could not create a primitive descriptor" not in str(error):
            raise
        pytest.skip("torch has no LSTM of bfloat16 on this processor")
    f = jtbridge.wrap(fn, backend=by)
    got = jax.jit(f)(jnp.asarray(x.numpy()))
    assert str(got.dtype) == str(wanted.dtype).removeprefix("torch.")
    np.testing.assert_allclose(np.asarray(got, np.float32), wanted.detach().float(), rtol=0, atol=8e-3)
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad((fn(leaf).float() ** 2).sum(), leaf)
    gradient = jax.jit(jax.grad(lambda v: (f(v).astype(jnp.float32) ** 2).sum()))(jnp.asarray(x.numpy()))
    np.testing.assert_allclose(gradient, slope, rtol=0, atol=0.02 * float(slope.abs().max()))
