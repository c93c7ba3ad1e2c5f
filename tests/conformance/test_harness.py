"""The harness finds the faults of libraries written in jnp, some of which are wrong, hang or die."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from . import known as known_failures
from .check import Checker, Outcome
from .compare import AS_EXACT, MismatchError, compare
from .exactness import as_exact
from .known import Known
from .modes import MODES
from .report import judge, table
from .runner import Runner
from .samples import SAMPLES_PER_OPERATOR, as_function, chosen_samples, operators
from .traits import traits
from .worker import Case, Result, Settings

TABLE = operators()


class Stand:
    """A library that has one operator, computed by a given JAX function."""

    name = "stand"

    def __init__(self, function: Callable[..., Any], translates: bool = False):
        self.function = function
        self.translates = translates

    def wrap(self, function: Callable[..., Any], tensors: Any, output: Any) -> Callable[..., Any]:
        return lambda *arrays, rng=None: self.function(*arrays) if rng is None else self.function(*arrays, rng=rng)


@pytest.fixture(autouse=True)
def wide_types():
    """64-bit types, as in the workers."""
    with jax.enable_x64(True):
        yield


def outcome(operator: str, mode: str, function: Callable[..., Any], dtype: torch.dtype = torch.float32) -> Outcome:
    """Return the verdict of the harness on `function` on the operator's last chosen sample with elements."""
    info = TABLE[operator]
    index, raw = [(i, raw) for i, raw in chosen_samples(info, dtype) if raw.input.numel()][-1]
    sample = as_function(info, index, raw)
    return Checker(sample, traits(sample)).check(mode, Stand(function))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("operator", "function", "dtype"),
    [
        ("sin", jnp.sin, torch.float32),
        ("sin", jnp.sin, torch.float64),
        ("sin", jnp.sin, torch.complex64),
        ("mul", jnp.multiply, torch.complex64),
        ("conj", jnp.conj, torch.complex64),
        ("real", jnp.real, torch.complex64),
        ("angle", jnp.angle, torch.complex64),
    ],
)
def test_right_library_passes(operator, function, dtype, mode):
    assert outcome(operator, mode, function, dtype) == Outcome("passed")


@pytest.mark.parametrize(
    ("mode", "function", "message"),
    [
        ("forward", lambda x: jnp.sin(x) + 1e-3, "output 0: Tensor-likes are not close!"),
        ("forward", lambda x: jnp.sin(x).astype(jnp.float64), "output 0 has dtype float64, torch's has float32"),
        ("forward", lambda x: jnp.sin(x)[None], "output 0 has shape (1, 20, 20), torch's has (20, 20)"),
        ("forward", lambda x: (jnp.sin(x),), "the result is tuple(*), torch's is *"),
        ("forward", lambda x: (jnp.sin(x), x), "2 outputs, torch has 1"),
        ("forward", lambda x: 1 // 0, "ZeroDivisionError: integer division or modulo by zero"),
        ("grad", lambda x: jnp.sin(jax.lax.stop_gradient(x)), "output 0: Tensor-likes are not close!"),
        ("vmap", lambda x: jnp.broadcast_to(jnp.sin(x[0]), x.shape), "output 0: Tensor-likes are not close!"),
        ("jvp", lambda x: jnp.sin(jax.lax.stop_gradient(x)), "output 0: Tensor-likes are not close!"),
        ("gradgrad", lambda x: _constant_gradient(x), "output 0: Tensor-likes are not close!"),
    ],
)
def test_wrong_library_fails(mode, function, message):
    found = outcome("sin", mode, function)
    assert (found.status, found.detail[: len(message)]) == ("failed", message)


@jax.custom_jvp
def _constant_gradient(x: jax.Array) -> jax.Array:
    """sin with a right first derivative that cannot be differentiated again."""
    return jnp.sin(x)


@_constant_gradient.defjvp
def _(primals, tangents):
    return jnp.sin(primals[0]), jax.lax.stop_gradient(jnp.cos(primals[0])) * tangents[0]


@pytest.mark.parametrize(
    ("translates", "factor", "status", "note"),
    [(False, 1.0, "failed", ""), (True, 1.0, "passed", AS_EXACT), (True, 1.0001, "failed", "")],
)
def test_translation_as_exact_as_torch_passes(translates, factor, status, note):
    @jax.custom_jvp
    def asin(x):
        return jnp.arcsin(x)

    # More exact than torch's 1 / sqrt(1 - x * x), which is off by more than its tolerances near 1.
    asin.defjvp(lambda primals, tangents: (asin(*primals), tangents[0] * _slope(primals[0]) * factor))
    index, raw = next(chosen_samples(TABLE["asin"], torch.float32))
    sample = as_function(TABLE["asin"], index, raw)
    found = Checker(sample, traits(sample)).check("grad", Stand(asin, translates))
    assert (found.status, found.note) == (status, note)


def _slope(x: jax.Array) -> jax.Array:
    return jax.lax.rsqrt((1 - x) * (1 + x))


EXACT = torch.tensor([1e-2, 3.0, 1000.0, 0.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("errors", "torchs_errors", "accepted"),
    [
        ((1e-9, 1e-6, 1.9e-3, 0.0), (1e-9, 1e-6, 1e-3, 0.0), True),
        # more than twice torch's, and rounding
        ((1e-9, 1e-6, 3e-3, 0.0), (1e-9, 1e-6, 1e-3, 0.0), False),
        # more than torch's in the largest element, but in one that is not
        ((1e-9, 5e-4, 1e-3, 0.0), (1e-9, 1e-6, 1e-3, 0.0), False),
        ((1e-9, 1e-6, 1e-3, 1e-2), (1e-9, 1e-6, 1e-3, 0.0), False),
        ((1e-9, 1e-6, torch.nan, 0.0), (1e-9, 1e-6, 1e-3, 0.0), False),
        ((1e-9, 1e-6, torch.inf, 0.0), (1e-9, 1e-6, 1e-3, 0.0), False),
        # right, whatever torch's is
        ((1e-9, 1e-6, 1e-4, 0.0), (torch.nan, 1.0, 1e-3, 1.0), True),
        # torch's own says nothing
        ((1e-9, 1e-6, 2.0, 0.0), (1e-9, 1e-6, 20.0, 0.0), False),
    ],
)
def test_exactness_relative_to_torch(errors, torchs_errors, accepted):
    got, torchs = ((EXACT + torch.tensor(each, dtype=torch.float64)).float() for each in (errors, torchs_errors))
    assert as_exact(got, torchs, EXACT) is accepted
    assert not as_exact(got.double(), torchs.double(), EXACT)


@pytest.mark.parametrize("phase", [-1, 1j, -0.8 + 0.6j])
def test_eigenvectors_are_compared_up_to_their_phase(phase):
    expected = torch.linalg.eigh(torch.randn(2, 3, 3, dtype=torch.complex128))
    values, vectors = (jnp.asarray(each.numpy()) for each in expected)

    def compared(operator, vectors, exact=lambda: None):
        return compare(operator, "forward", expected, [values, vectors], True, exact)

    other = vectors.at[..., :, 1].multiply(phase)
    assert compared("linalg.eigh", other) == ""
    with pytest.raises(MismatchError):
        compared("linalg.eigh", vectors.at[..., 1, :].multiply(phase))
    with pytest.raises(MismatchError):
        compared("linalg.eigh", vectors.at[..., :, 1].multiply(2 * phase))
    with pytest.raises(MismatchError):
        compared("linalg.qr", other)
    with pytest.raises(MismatchError):
        compared("linalg.eigh", other, None)


def test_gradient_in_the_wrong_complex_convention_fails():
    @jax.custom_vjp
    def function(x):
        return jnp.sin(x)

    # Torch's own gradient, without conjugation.
    function.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.conj(jnp.cos(x)),))
    assert outcome("sin", "grad", function).status == "passed"
    assert outcome("sin", "grad", function, torch.complex64).status == "failed"


@pytest.mark.parametrize(
    ("function", "detail"),
    [
        (lambda x, rng: jax.random.normal(rng, x.shape), ""),
        (lambda x, rng: jnp.zeros(x.shape), "100 other keys gave the same result as the first one"),
        (lambda x, rng: jax.random.normal(rng, x.shape, "float32"), "output 0 has dtype float32, torch's has float64"),
    ],
)
def test_random_operators_are_judged_by_their_key(function, detail):
    assert outcome("randn_like", "forward", function, torch.float64).detail == detail


def test_cases_unsupported_by_torch_are_not_applicable():
    assert outcome("isnan", "grad", jnp.isnan) == Outcome(
        "not applicable", "torch: no output has a derivative by any input"
    )
    found = outcome("bernoulli", "gradgrad", lambda x, rng: x)
    assert found.status == "not applicable"


def test_all_operators_of_the_database_are_there():
    from torch.testing._internal.common_methods_invocations import op_db

    assert len(TABLE) == len(op_db) > 600
    assert "nn.functional.conv2d" in TABLE
    assert "norm.nuc" in TABLE
    assert SAMPLES_PER_OPERATOR >= 2


class Dies:
    """A library that kills its process, or hangs, in one case of `neg`, and is right in the others."""

    name = "dies"
    translates = False
    hangs = False

    def wrap(self, function: Callable[..., Any], tensors: Any, output: Any) -> Callable[..., Any]:
        def call(x: jax.Array) -> jax.Array:
            if isinstance(x, jax.core.Tracer) and "Batch" in type(x).__name__:
                if self.hangs:
                    time.sleep(600)
                os._exit(7)
            return -x

        return call


class Hangs(Dies):
    name = "hangs"
    hangs = True


@pytest.mark.parametrize(
    ("name", "detail"), [("Dies", "the process died (exit code 7)"), ("Hangs", "no result after 5 s")]
)
def test_crashed_worker_fails_one_case(name, detail, tmp_path: Path):
    results: dict[Case, Result] = {}
    settings = Settings((f"{__name__}:{name}",), ("forward", "vmap", "grad"), None, 1, tmp_path / "log")
    Runner(settings, 2, lambda result: results.update({result.case: result}), case_seconds=5).run(["neg", "positive"])
    found = {(case.operator, case.mode): result.outcome.status for case, result in results.items()}
    assert found == {
        ("neg", "forward"): "passed",
        ("neg", "vmap"): "failed",
        ("neg", "grad"): "passed",
        ("positive", "forward"): "failed",
        ("positive", "vmap"): "failed",
        ("positive", "grad"): "failed",
    }
    assert results[Case(name.lower(), "neg", 0, "vmap")].outcome.detail == detail


def result(case: Case, status: Any, detail: str = "") -> Result:
    return Result(case, Outcome(status, detail), 0.0)


A, B, C = (Case("dlpack", name, 0, "grad") for name in "abc")


def test_the_list_of_known_failures_is_exact():
    known = Known({A: "torch cannot", B: "torch cannot"})
    verdict = judge([result(A, "failed"), result(B, "passed"), result(C, "failed")], known)
    assert [each.case for each in verdict.listed] == [A]
    assert [each.case for each in verdict.stale] == [B]
    assert [each.case for each in verdict.new] == [C]
    assert judge([result(B, "not applicable")], known).unexpected


def test_update_preserves_manual_reasons(tmp_path: Path):
    path = tmp_path / "known.toml"
    known_failures.update({A: 'said "no"', B: "said no"}, [A, B], path=path)
    path.write_text(path.read_text().replace('said \\"no\\"', "by hand"))
    # A fails again, B is mended, C is new.
    known_failures.update({A: "said no again", C: "new"}, [A, B, C], path=path)
    assert known_failures.load(path).reasons == {A: "by hand", C: "new"}
    # Neither a run of other cases nor a run with another dtype changes the entries.
    known_failures.update({}, [B], path=path)
    known_failures.update({A: "wide"}, [A, C], "float64", path)
    assert known_failures.load(path).reasons == {A: "by hand", C: "new"}
    assert known_failures.load(path, "float64").reasons == {A: "wide"}


def test_the_list_of_known_failures_is_short(tmp_path: Path):
    path = tmp_path / "known.toml"
    failed = {Case("xla", name, i, mode): "why" for name in "ab" for i in (0, 7) for mode in ("vmap", "forward")}
    failed[Case("xla", "a", 7, "grad")] = "why"
    known_failures.update(failed, list(failed), path=path)
    assert known_failures.load(path).reasons == failed
    lines = ['    "a 0 forward,vmap",', '    "a 7 forward,grad,vmap",', '    "b 0,7 forward,vmap",']
    assert path.read_text().splitlines()[-4:] == [*lines, "]"]


def test_the_checked_in_list_gives_reasons():
    for case, reason in known_failures.load().reasons.items():
        assert case.mode in MODES
        assert len(reason) > 10, case


def test_percentages_exclude_cases_that_are_not_applicable():
    results = {each.case: each for each in [result(A, "passed"), result(B, "failed"), result(C, "not applicable")]}
    assert [line.split() for line in table(results, ["grad"])[1:]] == [
        ["grad", "1", "1", "50.00", "1"],
        ["all", "modes", "1", "1", "50.00", "1"],
    ]
