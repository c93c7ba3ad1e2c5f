"""Operators that are actually measured in torch and in XLA, with few calls."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.nn import functional

import jtbridge
from jtbridge.translate import _choice, _measure
from tests.compare import assert_matches, assert_trees_close

from .tunable import IMAGE, KERNEL, W, X, grouped, product

torch.manual_seed(0)


@pytest.fixture
def quickly(monkeypatch):
    """Measure with two calls, and measure operators of all sizes."""
    monkeypatch.setattr(_measure, "_ROUNDS", 1)
    monkeypatch.setattr(_measure, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(_measure, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(_choice, "takes_long", lambda workload, platform: True)


def test_results_and_gradients_with_real_measurements(quickly, folder):
    f = jax.jit(jax.value_and_grad(lambda x, w: jtbridge.wrap(lambda x, w: grouped(x, w).sum())(x, w), (0, 1)))
    before = f(X, W)
    with jtbridge.config(tune=True), jax.checking_leaks():
        after = f(X, W)
    assert_trees_close(after, before, 1e-3)
    leaves = [IMAGE.clone().requires_grad_(), KERNEL.clone().requires_grad_()]
    assert_matches(after[1], torch.autograd.grad(grouped(*leaves).sum(), leaves), 1e-3)
    names = {json.loads(file.read_text())["key"]["operator"] for file in folder.iterdir()}
    assert names == {"aten.convolution.default", "aten.convolution_backward.default"}


def test_a_batch_is_measured_as_a_whole(quickly, folder):
    f = jax.jit(jax.vmap(jtbridge.wrap(grouped), in_axes=(0, None)))
    images = torch.stack([IMAGE, 2 * IMAGE])
    with jtbridge.config(tune=True):
        results = f(jnp.asarray(images.numpy()), W)
    assert_matches(results, torch.stack([grouped(x, KERNEL) for x in images]), 1e-4)
    (file,) = folder.iterdir()
    key = json.loads(file.read_text())["key"]
    assert key["inputs"][0] == "float32[2, 2, 32, 56, 56]"
    assert key["batches"] == [[2, [0, None]]]


def test_a_program_is_measured_while_another_one_is_traced(quickly, folder):
    inner = jax.jit(jtbridge.wrap(product))

    @jax.jit
    def outer(x):
        with jax.ensure_compile_time_eval():
            known = inner(jnp.ones((64, 64)))
        inner.lower(x)
        return inner(x) + known[0, 0]

    x = torch.randn(64, 64)
    with jtbridge.config(tune=True), jax.checking_leaks():
        y = outer(jnp.asarray(x.numpy()))
    assert_matches(y, product(x) + torch.tensor(64.0).sin(), 1e-4)
    assert len(list(folder.iterdir())) == 1


def test_tuning_block_entered_during_a_trace(quickly, folder):
    f = jtbridge.wrap(product)
    x = torch.randn(64, 64)

    @jax.jit
    def program(x):
        with jtbridge.config(tune=True):
            return f(x) + jax.jit(f).lower(x).as_text().count("no such text")

    jax.jit(f)(jnp.ones((64, 64)))  # a program that is compiled again
    with jax.checking_leaks():
        y = program(jnp.asarray(x.numpy()))
    assert_matches(y, product(x), 1e-4)
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (lambda x, i: x.index_select(0, i), (torch.randn(5, 70), torch.tensor([4, 0, 3]))),
        (lambda x, i: x[:, i], (torch.randn(70, 5), torch.tensor([4, 0, 3]))),
        (lambda x, i: x.gather(1, i), (torch.randn(70, 5), torch.randint(5, (70, 9)))),
        (lambda x, i: x.index_add(0, i, x[:3]), (torch.randn(5, 70), torch.tensor([4, 0, 3]))),
        (lambda x, i: x.scatter_reduce(0, i, x, "amax"), (torch.randn(5, 70), torch.randint(5, (5, 70)))),
        (lambda x, i: functional.embedding(i, x), (torch.randn(5, 70), torch.randint(5, (90,)))),
        (lambda x: functional.max_pool2d(x, 3, 2, 1), (torch.randn(1, 3, 4, 9),)),
        (lambda x, y: torch.searchsorted(x.sort().values, y), (torch.randn(20), torch.randn(9))),
        (lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(6)), (torch.randn(6, 6),)),
        (lambda x, y: torch.linalg.solve(x, y), (torch.randn(2, 6, 6), torch.randn(2, 6, 3))),
        (lambda x: torch.fft.irfft(torch.fft.rfft(x)), (torch.randn(4, 16),)),
        (lambda x: x.sort(dim=0).values, (torch.randint(99, (50, 4)),)),
        (lambda x: functional.scaled_dot_product_attention(x, x, x), (torch.randn(1, 2, 64, 16),)),
        (lambda x: functional.softmax(x.bfloat16() @ x.bfloat16().mT, -1).float(), (torch.randn(64, 64),)),
        (
            lambda x, g: functional.grid_sample(x, g.sin(), align_corners=False),
            (torch.randn(1, 2, 6, 6), torch.randn(1, 5, 5, 2)),
        ),
    ],
    ids=range(15),
)
def test_operands_are_made_for_every_operator(quickly, function, tensors):
    arrays = [jnp.asarray(t.numpy()) for t in tensors]

    def gradient(*arrays):
        results, pull = jax.vjp(jtbridge.wrap(function), *arrays)
        return results, pull(results) if jnp.issubdtype(results.dtype, jnp.floating) else None

    with jtbridge.config(tune=True):  # a warning is an error
        results, _ = jax.jit(gradient)(*arrays)
    assert_matches(results, function(*tensors), 5e-2 if "bfloat16" in str(function) else 1e-3)
    assert _choice._FOUND
    assert all(_choice._FOUND.values())
