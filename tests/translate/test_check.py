"""`check` compares every backend with torch, and finds differences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from jtbridge.errors import ArgumentError, EffectsError

X = jnp.linspace(0.1, 1.0, 6).reshape(2, 3)


def test_every_backend_and_mode_is_tested():
    report = jtbridge.check(lambda x, i: torch.softmax(x @ x.T, -1)[i], X, jnp.array([1, 0]))
    ran = {(each.backend, each.mode) for each in report.comparisons}
    available = [status.name for status in jtbridge.backends() if status.available]
    assert {"xla", "dlpack", "callback"} <= set(available)
    assert ran == {(b, m) for b in available for m in ("value", "vjp", "jvp", "vmap")}
    assert report.ok
    assert all(each.difference is not None and each.difference < 1e-5 for each in report.comparisons)


@torch.library.custom_op("jtbridge_check_tests::half_right", mutates_args=())
def half_right(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@half_right.register_fake
def _(x):
    return torch.empty_like(x)


half_right.register_autograd(lambda ctx, grad: grad * 2, setup_context=lambda ctx, inputs, output: None)
jtbridge.register_lowering(half_right)(lambda x: x * 2.01)


def test_a_wrong_lowering_is_found():
    report = jtbridge.check(half_right, X)
    verdicts = {(each.backend, each.mode): each.ok for each in report.comparisons}
    assert not report.ok
    assert {key for key, ok in verdicts.items() if not ok} == {("xla", "value"), ("xla", "vmap")}
    assert "DIFFERS" in str(report)


def test_refusing_backend_is_shown_but_is_not_a_failure():
    report = jtbridge.check(lambda x: x * x.sum().item(), X)
    assert report.ok
    assert {each.note[:8] for each in report.comparisons if each.backend == "xla"} == {"not run:"}


def test_random_functions_are_repeatable():
    report = jtbridge.check(lambda x: torch.nn.functional.dropout(x, 0.5), X, rng=jax.random.key(0))
    assert report.ok
    assert {each.note for each in report.comparisons} == {"draws: repeats itself"}


def test_integers_have_no_derivative():
    report = jtbridge.check(lambda i: i * 2, jnp.arange(3))
    assert report.ok
    assert {each.note for each in report.comparisons if each.mode == "vjp"} == {"nothing to differentiate"}


def test_complex_and_half_precision():
    assert jtbridge.check(lambda z: (z * z.conj()).real.sum(), X.astype(jnp.complex64) * (1 + 2j)).ok
    assert jtbridge.check(torch.tanh, X.astype(jnp.bfloat16)).ok


def test_a_function_with_ordered_effects_is_refused():
    calls = []
    f = jtbridge.wrap(lambda x: (calls.append(x), x)[1], effects="ordered")
    with pytest.raises(EffectsError, match="`check` runs a function many times"):
        jtbridge.check(f, X)
    assert not calls


def test_inconsistent_forward_derivative_is_reported():
    report = jtbridge.check(torch.linalg.cholesky, jnp.eye(3))  # along a matrix that is not symmetric
    notes = {each.note for each in report.comparisons if each.mode == "jvp"}
    assert all("torch's forward mode; its gradient differs by" in note for note in notes)
    assert report.ok
    assert {each.note for each in jtbridge.check(torch.sin, X).comparisons} == {""}


def test_torch_exception_is_shown():
    report = jtbridge.check(lambda x: torch.from_numpy(np.sin(x.numpy())), jnp.ones(3))
    shown = [line for line in str(report).splitlines() if " vjp " in line and "xla" not in line]
    assert shown
    assert all("RuntimeError: Can't call numpy() on Tensor that requires grad" in line for line in shown)


def test_an_argument_without_values_is_refused():
    with pytest.raises(ArgumentError, match=r"takes arrays, and not `jax.ShapeDtypeStruct`"):
        jtbridge.check(torch.sin, jax.ShapeDtypeStruct((3,), jnp.float32))


def test_none_as_function_is_refused():
    for report in (jtbridge.check, jtbridge.explain):
        with pytest.raises(jtbridge.errors.ArgumentError, match="Expected a function, but got None"):
            report(None, jnp.ones(3))
