"""Tensors that a function stores in one call and uses in a later one.

Constants keep their values. Tensors that depend on arguments are kept by eager calls, and refused under a trace.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import MutationError

X = jnp.asarray([1.0, 2.0, 4.0])


@pytest.fixture(params=["auto", "dlpack", "callback"])
def backend(request):
    return request.param


class Lazy(torch.nn.Module):
    """A module that makes its buffer in the first call."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(3.0))
        self.positions = self.ones = self.scaled = None
        self.register_buffer("table", None)

    def forward(self, x):
        if self.positions is None:
            self.positions = torch.arange(3.0) + 1
            self.positions[0] = 5
            self.table = torch.outer(self.positions, self.positions)
            self.ones = [torch.ones_like(x) * 2]
            self.scaled = self.weight * self.positions
        return x * self.positions + self.table[1] * self.ones[0] + self.scaled


# Fake mode reads the `.grad` of every tensor, also of tensors that are not leaves of a graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_module_that_stores_constants(backend):
    module, other = Lazy(), Lazy()
    f = jtbridge.wrap(module, backend=backend)
    want = other(torch.tensor(np.asarray(X))).detach().numpy()
    for _ in range(2):
        np.testing.assert_allclose(f(X), want, rtol=1e-6)
        np.testing.assert_allclose(jax.jit(f)(X), want, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(X), other.positions.numpy())
    np.testing.assert_allclose(jax.vmap(f)(jnp.stack([X, X])), [want, want], rtol=1e-6)
    for name in ("positions", "table", "scaled"):
        torch.testing.assert_close(getattr(module, name), getattr(other, name))
        assert type(getattr(module, name)) is torch.Tensor
    torch.testing.assert_close(module.ones, other.ones)
    # A stored tensor that depends on a weight is still differentiated.
    module(torch.ones(3)).sum().backward()
    assert module.weight.grad == other.positions.sum()


def test_zeros_like_of_a_sparse_tensor():
    def f(x):
        return torch.zeros_like(x.to_sparse()).to_dense() + x

    np.testing.assert_array_equal(jtbridge.wrap(f, backend="dlpack")(X), X)


def test_a_function_with_a_cache(backend):
    @functools.cache
    def grid(n):
        return torch.linspace(0, 1, n)

    f = jtbridge.wrap(lambda x: x * grid(3), backend=backend)
    want = np.asarray(X) * np.float32([0, 0.5, 1])
    np.testing.assert_allclose(f(X), want)
    np.testing.assert_allclose(jax.hessian(lambda x: (f(x) ** 2).sum())(X), np.diag([0, 0.5, 2]))
    assert type(grid(3)) is torch.Tensor
    np.testing.assert_allclose(f(X), want)


def test_a_cache_that_a_backward_fills(backend):
    @functools.cache
    def factor():
        return torch.full((), 7.0)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 7 * x

        @staticmethod
        def backward(ctx, g):
            return g * factor()

    f = jtbridge.wrap(Scaled.apply, backend=backend)
    for n in (3, 4):
        np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(jnp.ones(n)), np.full(n, 7))
        np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: f(x).sum() * 2))(jnp.ones(n)), np.full(n, 14))
        assert type(factor()) is torch.Tensor


class Stateful(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        before = torch.zeros(3) if self.last is None else self.last
        self.last = x * 2
        return x + before


def test_eager_calls_update_state_that_a_trace_refuses(backend):
    module, other = Stateful(), Stateful()
    f = jtbridge.wrap(module, backend=backend)
    for scale in (1, 2, 3):
        with pytest.raises(MutationError, match=r"state from one call to the next, which a JAX program does not have"):
            jax.jit(lambda x: f(x))(X)
        # The writes of the refused trace are undone: the state is that of the eager calls alone.
        np.testing.assert_array_equal(f(scale * X), other(torch.tensor(np.asarray(scale * X))))
        torch.testing.assert_close(module.last, other.last)


def test_state_is_refused_eagerly_by_a_backend_that_translates():
    module = Stateful()
    with pytest.raises(MutationError, match=r"state from one call to the next, which a JAX program does not have"):
        jtbridge.wrap(module, backend="xla")(X)
    assert module.last is None


class Smoothed(torch.autograd.Function):
    """The square, whose backward stores the gradient."""

    before: torch.Tensor | None = None
    reads = False

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        before, Smoothed.before = Smoothed.before, 2 * x * g
        if Smoothed.reads and before is not None:
            return (Smoothed.before + before.sum()) / 2
        return Smoothed.before


@pytest.mark.parametrize("reads", [True, False])
def test_state_of_a_backward_is_refused_where_it_is_read(backend, reads, monkeypatch):
    monkeypatch.setattr(Smoothed, "before", None)
    monkeypatch.setattr(Smoothed, "reads", reads)
    f = jtbridge.wrap(Smoothed.apply, backend=backend, purity="error" if reads else "allow")
    np.testing.assert_array_equal(f(X), X**2)
    if reads:
        refused = pytest.raises(MutationError, match=r"state from one call to the next")
        with refused:
            jax.jit(jax.grad(lambda x: f(x).sum()))(X)
        assert Smoothed.before is None
        got = [jax.grad(lambda x: f(x).sum())(scale * X) for scale in (1, 2, 3)]
        kept, Smoothed.before = Smoothed.before, None
        for scale, gradient in zip((1, 2, 3), got, strict=True):
            x = torch.tensor(np.asarray(scale * X), requires_grad=True)
            Smoothed.apply(x).sum().backward()
            np.testing.assert_array_equal(gradient, x.grad)
        torch.testing.assert_close(kept, Smoothed.before)
        with refused:
            jax.jit(jax.grad(lambda x: f(x).sum()))(X)
        torch.testing.assert_close(kept, Smoothed.before)
        return
    for n in (3, 4):
        np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(jnp.ones(n)), np.full(n, 2))
    x = torch.ones(3, requires_grad=True)
    Smoothed.apply(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 2.0))


def test_ordered_effects_with_output_shapes_update_state():
    f = jtbridge.wrap(Stateful(), effects="ordered", output_shapes=jax.ShapeDtypeStruct((3,), jnp.float32))
    np.testing.assert_array_equal(jax.jit(f)(X), X)
    np.testing.assert_array_equal(jax.jit(f)(X), 3 * X)


def test_stored_tensors_that_are_never_read_are_allowed(backend):
    class Noting(torch.nn.Module):
        def forward(self, x):
            self.noted = x * 2
            return x + 1

    module = Noting()
    f = jtbridge.wrap(module, backend=backend, purity="allow")
    for _ in range(2):
        np.testing.assert_array_equal(f(X), X + 1)
        np.testing.assert_array_equal(jax.jit(f)(X), X + 1)
        np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(X), np.ones(3))
    torch.testing.assert_close(module(torch.ones(3)), torch.full((3,), 2.0))
    torch.testing.assert_close(module.noted, torch.full((3,), 2.0))


def test_tensors_stored_in_a_closure_and_never_read_are_allowed(backend):
    last = torch.zeros(1)

    def f(x):
        nonlocal last
        last = x * 2
        return x + 1

    wrapped = jtbridge.wrap(f, backend=backend, purity="allow")
    for n in (1, 2, 3):
        assert jax.eval_shape(wrapped, jnp.ones(n)).shape == (n,)
    for n in (2, 4):
        np.testing.assert_array_equal(wrapped(jnp.ones(n)), np.full(n, 2))


def test_trace_stores_no_fake_tensors():
    class Noting(torch.nn.Module):
        def forward(self, x):
            self.noted = x * 2
            return x + 1

    module = Noting()
    assert jax.eval_shape(jtbridge.wrap(module, backend="dlpack", purity="allow"), X).shape == (3,)
    assert not hasattr(module, "noted")


def test_fake_tensor_is_not_stored_in_a_cache():
    @functools.cache
    def doubled(key):
        return values.pop() * 2

    values = []

    def f(x):
        values.append(x)
        return x + 1 + 0 * doubled(0)

    assert jax.eval_shape(jtbridge.wrap(f, backend="dlpack", purity="allow"), X).shape == (3,)
    assert doubled.cache_info().currsize == 0


def test_stored_result_that_is_read_is_refused_under_a_trace():
    kept = []

    def f(x):
        kept.append(x * 2)
        return kept[0]

    wrapped = jtbridge.wrap(f)
    for count in (0, 1, 2):
        with pytest.raises(MutationError, match=r"state from one call to the next"):
            jax.jit(lambda x: wrapped(x))(X)
        assert len(kept) == count
        np.testing.assert_array_equal(wrapped(X + count), 2 * X)  # as in torch: that of the first call
    np.testing.assert_array_equal(torch.stack(kept), [2 * X, 2 * (X + 1), 2 * (X + 2)])
