"""Eager calls of kernels: how often their programs are lowered. The interpreter stands in for the GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import jtbridge
from jtbridge.kernels import _primitive, _proofs, _tuning, softmax
from jtbridge.kernels._linear_cross_entropy import chunks, linear_cross_entropy
from jtbridge.kernels._primitive import KernelPrimitive, leading
from jtbridge.kernels._softmax.configurations import SoftmaxConfiguration

from .harness import assert_close

pytestmark = pytest.mark.cpu

WEIGHT = jnp.linspace(-1, 1, 160).reshape(10, 16)


class Doubled:
    """A kernel primitive that counts how often its kernel is lowered. The types of its results are the reference's."""

    def __init__(self):
        self.lowered = 0
        self.primitive = KernelPrimitive(functools.partial(self.reference), self.kernel, leading())

    @staticmethod
    def reference(x):
        return [2 * x]

    def kernel(self, x):
        self.lowered += 1
        return [x + x]


@pytest.fixture
def doubled(monkeypatch) -> Doubled:
    monkeypatch.setattr(_primitive, "interpreting", lambda: True)
    monkeypatch.setattr(_tuning, "_TUNED_KEYS", 0)
    return Doubled()


def test_lowered_once_per_type(doubled):
    for i in range(3):
        assert doubled.primitive(jnp.full(4, i))[0].tolist() == [2 * i] * 4
    assert doubled.lowered == 1
    assert doubled.primitive(jnp.ones((2, 3)))[0].shape == (2, 3)
    assert doubled.primitive(jnp.ones(4, "int16"))[0].dtype == "int16"
    assert doubled.lowered == 3


def test_lowered_once_per_primitive(doubled):
    other = Doubled()
    for each in (doubled, other, doubled, other):
        each.primitive(jnp.ones(4))
    assert (doubled.lowered, other.lowered) == (1, 1)


def test_lowered_once_in_derivatives_and_batches(doubled):
    for _ in range(2):
        jax.vmap(lambda x: doubled.primitive(x)[0])(jnp.ones((2, 3)))
        jax.jvp(lambda x: doubled.primitive(x)[0], (jnp.ones(4),), (jnp.ones(4),))
    assert doubled.lowered == 2


def test_lowered_again_after_tuning(doubled, tmp_path, monkeypatch):
    x = jnp.ones(4)

    def tune() -> None:
        only = SoftmaxConfiguration(tile=1, block=4, warps=1)
        _tuning._tuned(tmp_path / "doubled.json", {"kernel": "doubled"}, [only], lambda c: 1.0)

    monkeypatch.setattr(_tuning._timing, "untimed_reason", lambda: None)
    for _ in range(2):
        doubled.primitive(x)
    with jtbridge.config(tune=True):
        for _ in range(2):
            doubled.primitive(x)
            tune()
    assert doubled.lowered == 2
    for _ in range(2):
        doubled.primitive(x)
    assert doubled.lowered == 3


def test_program_depends_on_the_kernels_in_use(monkeypatch):
    rows = []
    losses = chunks.losses
    monkeypatch.setattr(chunks, "losses", lambda *args: rows.append(_proofs.kernels_in_use()) or losses(*args))
    hidden, weight, labels = jnp.ones((4, 16)), WEIGHT, jnp.arange(4)
    for _ in range(2):
        linear_cross_entropy(hidden, weight, labels)
        with _proofs.only(frozenset()):
            linear_cross_entropy(hidden, weight, labels)
    assert rows == [None, frozenset()]


def of_two_tokens(hidden: jax.Array) -> jax.Array:
    return linear_cross_entropy(hidden, WEIGHT, jnp.arange(2))


@pytest.mark.parametrize("function", [softmax, jax.jit(softmax), of_two_tokens])
def test_jaxs_debugging_switches(function):
    x, infinite = jnp.ones((2, 16)), jnp.full((2, 16), -jnp.inf)
    want = function(x)
    with jax.disable_jit():
        assert_close(function(x), want)
    with jax.debug_nans(True):
        assert_close(function(x), want)
        with pytest.raises(FloatingPointError, match=r"of `(softmax forward|linear_cross_entropy)`, a kernel"):
            function(infinite)
