"""Small integer arrays whose values are known during a trace become constants if a function needs their values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import DataDependentShapeError

X = jnp.arange(6.0)
N = jnp.asarray(2)


@jtbridge.wrap
def rows(x, n):
    return x[: int(n)] * 2


@pytest.mark.parametrize("n", [N, np.int64(2), np.array(2), torch.tensor(2), jnp.uint8(2), np.array(2, "int16")])
def test_a_size_from_an_array_that_is_closed_over(n):
    assert jax.jit(lambda x: rows(x, n))(X).tolist() == [0.0, 2.0]
    assert "callback" not in jax.jit(lambda x: rows(x, n)).lower(X).as_text()


def test_an_argument_of_jit_has_no_value():
    with pytest.raises(DataDependentShapeError, match="If an integer argument gives a size, close over it"):
        jax.jit(rows)(X, N)


def test_each_value_has_its_own_translation():
    @jax.jit
    def f(x):
        return [rows(x, np.int32(n)) for n in (1, 3, 0, 1)]

    assert [r.tolist() for r in f(X)] == [[0.0], [0.0, 2.0, 4.0], [], [0.0]]


def test_known_values_under_transformations():
    x = X.reshape(2, 3)
    assert jax.jit(jax.grad(lambda x: rows(x, N).sum()))(X).tolist() == [2.0, 2.0, 0.0, 0.0, 0.0, 0.0]
    assert jax.jit(jax.vmap(lambda x: rows(x, N)))(x).tolist() == [[0.0, 2.0], [6.0, 8.0]]
    assert jax.jit(lambda x: jax.vmap(rows, in_axes=(0, None))(x, N))(x).tolist() == [[0.0, 2.0], [6.0, 8.0]]
    assert jax.lax.scan(lambda c, x: (c, rows(x, N)), 0.0, x)[1].tolist() == [[0.0, 2.0], [6.0, 8.0]]
    assert jax.jit(lambda x: jax.checkpoint(lambda x: rows(x, N))(x))(X).tolist() == [0.0, 2.0]


def test_a_list_of_sizes_and_a_branch():
    reshape = jtbridge.wrap(lambda x, sizes: x.reshape(sizes.tolist()))
    assert jax.jit(lambda x: reshape(x, np.array([3, 2])))(X).shape == (3, 2)
    branch = jtbridge.wrap(lambda x, flag: x * 2 if flag else x.sum())
    assert jax.jit(lambda x: branch(x, np.bool_(False)))(X).tolist() == 15.0
    assert jax.jit(lambda x: branch(x, np.bool_(True)))(X).tolist() == (X * 2).tolist()


def test_a_value_that_is_not_needed_stays_an_argument():
    scale = jtbridge.wrap(lambda x, n: x * n)
    (equation,) = jax.make_jaxpr(lambda x: scale(x, N))(X).eqns
    assert len(equation.invars) == 2


def test_dtypes_are_those_of_an_argument():
    def f(x, n):
        return x[: int(n)].to(n.dtype)

    assert jax.jit(lambda x: jtbridge.wrap(f)(x, np.uint8(2)))(X).dtype == "uint8"
    assert jax.jit(lambda x: jtbridge.wrap(f)(x, np.int16(2)))(X).dtype == "int16"

    def g(x, n):
        return x[: int(n)] * torch.iinfo(n.dtype).bits

    assert jax.jit(lambda x: jtbridge.wrap(g)(x, N))(X).tolist() == [0.0, 64.0]
    assert jax.jit(lambda x: jtbridge.wrap(g, int32="keep")(x, N))(X).tolist() == [0.0, 32.0]


def test_write_to_a_known_value_does_not_change_the_argument():
    def f(x, n):
        return x[: int(n.add_(1))]

    n = np.array(2)
    with pytest.raises(DataDependentShapeError):
        jax.jit(lambda x: jtbridge.wrap(f)(x, n))(X)
    assert n == 2


def test_large_arrays_stay_arguments():
    f = jtbridge.wrap(lambda x, n: x[: int(n.sum())])
    with pytest.raises(DataDependentShapeError):
        jax.jit(lambda x: f(x, np.zeros(65, int)))(X)
    assert jax.jit(lambda x: f(x, np.ones(5, int)))(X).shape == (5,)


def test_a_backend_by_name_needs_a_trace():
    f = jtbridge.wrap(rows.function, backend="xla")
    assert jax.jit(lambda x: f(x, N))(X).tolist() == [0.0, 2.0]
    with pytest.raises(DataDependentShapeError):
        f(X, N)  # as `jax.jit(f)(X, N)`


def test_a_function_that_is_called_with_its_known_values():
    f = jtbridge.wrap(lambda x, n: torch.from_numpy(np.sin(x.numpy()))[: int(n)], backend="dlpack")
    np.testing.assert_allclose(jax.jit(lambda x: f(x, N))(X), np.sin([0.0, 1.0]), rtol=1e-6)


def test_packed_sequences_of_known_lengths():
    lstm = torch.nn.LSTM(1, 2, batch_first=True).requires_grad_(False)

    def last(x, lengths):
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return torch.nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)[0]

    x = np.random.default_rng(0).normal(size=(2, 6, 1)).astype("float32")
    f = jtbridge.wrap(last, backend="dlpack")
    got = jax.jit(lambda x: f(x, np.array([2, 4])))(x)
    np.testing.assert_allclose(got, last(torch.from_numpy(x), torch.tensor([2, 4])), rtol=1e-5, atol=1e-6)


def test_random_key_is_not_a_known_value():
    key = jax.random.key(0)
    with pytest.raises(jtbridge.errors.DTypeError, match="rng="):
        jax.jit(lambda x: jtbridge.wrap(lambda x, k: x * 2)(x, key))(X)


def test_a_trace_remembers_that_a_function_needs_values():
    runs = []
    f = jtbridge.wrap(lambda x, n: (print(end="", file=log), x[: int(n)])[1], purity="allow")

    class Log:
        def write(self, text):
            runs.append(text)

    log = Log()
    jax.make_jaxpr(lambda x: [f(x, np.int32(3)) for _ in range(2)])(X)
    first = len(runs)
    jax.make_jaxpr(lambda x: [f(x, np.int32(3)) for _ in range(20)])(X)
    assert len(runs) <= 2 * first


class Padded(torch.nn.Module):
    """A module with a size in a buffer, like the convolutions of EnCodec."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("padding", torch.tensor(2), persistent=False)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return torch.nn.functional.pad(self.linear(x), (int(self.padding), self.padding - 1))


def test_a_module_with_sizes_in_its_state():
    module = Padded()
    x = torch.randn(2, 3)
    want = module.eval()(x)
    net = jtbridge.module(module)
    params, state = net.init()
    out, _ = jax.jit(lambda params, x: net(params, state, x))(params, x.numpy())
    np.testing.assert_allclose(out, want.detach(), rtol=1e-5, atol=1e-6)
    out, _ = net(params, state | {"padding": jnp.asarray(3)}, x.numpy())
    assert out.shape == (2, 8)
    with pytest.raises(DataDependentShapeError, match="If an integer argument gives a size, close over it"):
        jax.jit(net)(params, state, x.numpy())
    out, changed = jax.jit(lambda params, calls, x: net(params, state | {"calls": calls}, x, train=True))(
        params, state["calls"], x.numpy()
    )
    assert int(changed["calls"]) == 1
    gradient = jax.jit(jax.grad(lambda params, x: net(params, state, x)[0].sum()))(params, x.numpy())
    assert gradient["linear.bias"].tolist() == [2.0, 2.0, 2.0]
