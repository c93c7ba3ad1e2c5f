"""Wrapped functions as bodies of scan, while_loop, fori_loop, cond, switch and map."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from tests import reference
from tests.compare import assert_matches

from .problem import tensor

STEPS = 4


def step(state: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    new = torch.tanh(state * x + 0.5)
    return new, new.sum()


def unrolled(state: torch.Tensor, xs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sums = []
    for x in xs:
        state, total = step(state, x)
        sums.append(total)
    return state, torch.stack(sums)


@pytest.fixture
def data(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return rng.normal(size=(3,)), rng.normal(size=(STEPS, 3))


def scanned(state, xs):
    return jax.lax.scan(jtbridge.wrap(step), state, xs)


def test_scan(data, backend: str, x64: None):
    expected = unrolled(*map(tensor, data))
    assert_matches(scanned(*data), expected)
    assert_matches(jax.jit(scanned)(*data), expected)


def test_vjp_of_scan(data, backend: str, x64: None, rng: np.random.Generator):
    out, pullback = jax.vjp(scanned, *map(jnp.asarray, data))
    cotangents = [rng.normal(size=y.shape) for y in out]
    expected = reference.vjp(unrolled, [tensor(x) for x in data], [tensor(ct) for ct in cotangents])
    assert_matches(list(pullback(tuple(map(jnp.asarray, cotangents)))), expected)


def test_jvp_of_scan(data, backend: str, x64: None, rng: np.random.Generator):
    tangents = [rng.normal(size=x.shape) for x in data]
    moved = jax.jit(lambda x, dx: jax.jvp(scanned, x, dx)[1])(data, tuple(tangents))
    expected = reference.jvp(unrolled, [tensor(x) for x in data], [tensor(t) for t in tangents])
    assert_matches(moved, tuple(expected))


def test_hessian_of_scan(data, backend: str, x64: None):
    found = jax.jit(jax.hessian(lambda s, xs: scanned(s, xs)[1].sum()))(*map(jnp.asarray, data))
    expected = reference.hessian(lambda s, xs: unrolled(s, xs)[1].sum(), [tensor(x) for x in data])
    assert_matches(found, expected[0][0])


def test_vmap_of_scan(data, backend: str, x64: None):
    states = np.stack([data[0], -data[0]])
    out = jax.jit(jax.vmap(scanned, in_axes=(0, None)))(states, data[1])
    rows = [unrolled(tensor(state), tensor(data[1])) for state in states]
    assert_matches(out, tuple(torch.stack(column) for column in zip(*rows, strict=True)))


def test_scan_of_a_gradient(backend: str, x64: None):
    """Gradient descent whose steps are torch gradients."""
    loss = jtbridge.wrap(lambda w: ((w - 3) ** 2).sum())

    def descend(w, _):
        return w - 0.1 * jax.grad(loss)(w), loss(w)

    w, losses = jax.jit(lambda w: jax.lax.scan(descend, w, None, length=50))(jnp.zeros(2))
    np.testing.assert_allclose(w, 3 - 3 * 0.8**50, rtol=1e-12)
    np.testing.assert_allclose(losses, 18 * 0.64 ** np.arange(50), rtol=1e-12, atol=1e-14)


def test_checkpointed_scan_body(data, backend: str, x64: None):
    def total(state, xs):
        return jax.lax.scan(jax.checkpoint(jtbridge.wrap(step)), state, xs)[1].sum()

    state = tensor(data[0]).requires_grad_()
    (expected,) = torch.autograd.grad(unrolled(state, tensor(data[1]))[1].sum(), state)
    assert_matches(jax.jit(jax.grad(total))(*map(jnp.asarray, data)), expected)


def test_while_loop(backend: str):
    halve, norm = jtbridge.wrap(lambda x: x / 2), jtbridge.wrap(torch.linalg.norm)
    found = jax.jit(lambda x: jax.lax.while_loop(lambda x: norm(x) > 1, halve, x))(jnp.array([30.0, 40.0]))
    assert found.tolist() == [30 / 64, 40 / 64]


def test_jvp_of_while_loop(backend: str):
    double = jtbridge.wrap(lambda x: x * 2)
    found = jax.jvp(lambda x: jax.lax.while_loop(lambda x: x < 10, double, x), (jnp.array(1.0),), (jnp.array(1.0),))
    assert [x.tolist() for x in found] == [16, 16]


def test_vmap_of_while_loop(backend: str):
    """Each row stops independently."""
    double = jtbridge.wrap(lambda x: x * 2)
    loop = jax.vmap(lambda x: jax.lax.while_loop(lambda x: x < 10, double, x))
    assert jax.jit(loop)(jnp.array([1.0, 3.0, 20.0])).tolist() == [16, 12, 20]


def test_grad_of_fori_loop(backend: str):
    square = jtbridge.wrap(torch.square)
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: square(x), x))
    assert jax.grad(loop)(jnp.array(1.1)) == pytest.approx(8 * 1.1**7, rel=1e-5)


@pytest.mark.parametrize("flag", [False, True])
def test_cond(flag: bool, backend: str):
    sin, cos = jtbridge.wrap(torch.sin), jtbridge.wrap(torch.cos)

    @jax.jit
    def run(flag, x):
        return jax.value_and_grad(lambda x: jax.lax.cond(flag, sin, cos, x))(x)

    x = torch.tensor(0.4)
    assert_matches(run(flag, jnp.array(0.4)), (x.sin(), x.cos()) if flag else (x.cos(), -x.sin()))


def test_vmap_of_cond(backend: str):
    """With a batched predicate both branches run, and each row picks its own."""
    sin, cos = jtbridge.wrap(torch.sin), jtbridge.wrap(torch.cos)
    x = torch.tensor([0.4, 0.4])
    found = jax.jit(jax.vmap(lambda flag, x: jax.lax.cond(flag, sin, cos, x)))(
        jnp.array([True, False]), jnp.array([0.4, 0.4])
    )
    assert_matches(found, torch.where(torch.tensor([True, False]), x.sin(), x.cos()))


def test_switch(backend: str):
    branches = [jtbridge.wrap(f) for f in (torch.sin, torch.cos, torch.exp)]
    run = jax.jit(lambda i, x: jax.lax.switch(i, branches, x))
    x = torch.tensor(0.4)
    for i, expected in enumerate([x.sin(), x.cos(), x.exp()]):
        assert_matches(run(i, jnp.array(0.4)), expected)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_map(batch_size: int | None, backend: str, x64: None, rng: np.random.Generator):
    xs = rng.normal(size=(5, 3))
    f = jtbridge.wrap(lambda x: torch.softmax(x, 0))

    def total(xs):
        return jnp.sum(jax.lax.map(f, xs, batch_size=batch_size) ** 2)

    t = tensor(xs).requires_grad_()
    value = (torch.softmax(t, 1) ** 2).sum()
    assert_matches(jax.jit(total)(xs), value.detach())
    assert_matches(jax.jit(jax.grad(total))(jnp.asarray(xs)), torch.autograd.grad(value, t)[0])


def test_custom_jvp_and_custom_vjp_around(backend: str):
    """A wrapped function inside jax.custom_vjp is differentiated by that rule and not by torch."""
    sin = jtbridge.wrap(torch.sin)
    g = jax.custom_vjp(sin)
    g.defvjp(lambda x: (sin(x), None), lambda _, ct: (ct * 7,))
    assert jax.jit(jax.grad(g))(jnp.array(0.3)).tolist() == 7
