"""Translated programs: their constants, scopes, random draws and caches."""

from __future__ import annotations

import pathlib
import queue
import re
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jtbridge
from benchmarks.steady import in_jnp, in_torch

X = jnp.linspace(-1.0, 1.0, 600).reshape(2, 300)
KEY = jax.random.key(3)


def test_only_large_constants_are_arrays_of_the_jaxpr():
    big, small = torch.ones(300, 4), torch.ones(4)
    jaxpr = jax.make_jaxpr(jtbridge.wrap(lambda x: x @ big + small, backend="xla"))(X)
    assert [c.shape for c in jaxpr.consts] == [(300, 4)]


def test_one_array_for_a_weight_of_several_functions_and_signatures():
    big = torch.ones(300, 4)
    f = jtbridge.wrap(lambda x: x @ big, backend="xla")
    g = jtbridge.wrap(lambda x: (x @ big).sin(), backend="xla")
    jaxpr = jax.make_jaxpr(lambda x: (f(x), f(x[:1]), g(x), jax.grad(lambda x: g(x).sum())(x)))(X)
    assert [c.shape for c in jaxpr.consts] == [(300, 4)]
    for got, want in zip(jax.jit(lambda x: (f(x), f(x[:1]), g(x)))(X), (f(X), f(X[:1]), g(X)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_weights_that_were_written_to_are_read_again():
    layer = torch.nn.Linear(300, 2)
    f, eager = jtbridge.wrap(layer, backend="xla"), jtbridge.wrap(layer)

    def assert_matches_torch():
        want = layer(torch.tensor(np.asarray(X))).detach()
        np.testing.assert_allclose(eager(X), want, rtol=1e-4, atol=1e-5)
        for wrapped in (f, eager):
            np.testing.assert_allclose(jax.jit(lambda x, g=wrapped: g(x))(X), want, rtol=1e-4, atol=1e-5)
        f.clear_cache()
        np.testing.assert_allclose(f(X), want, rtol=1e-4, atol=1e-5)

    assert_matches_torch()
    with torch.no_grad():
        layer.weight.mul_(2)
        layer.bias.add_(1)
    assert_matches_torch()
    layer.weight = torch.nn.Parameter(torch.zeros(2, 300))
    assert_matches_torch()


def test_gradient_with_closed_over_weights():
    layer = torch.nn.Linear(300, 2)
    f = jtbridge.wrap(layer, backend="xla")
    got = jax.jit(jax.grad(lambda x: f(x).sum()))(X)
    np.testing.assert_allclose(got, np.broadcast_to(layer.weight.detach().sum(0), X.shape), rtol=1e-5)
    rows = jax.vmap(jax.grad(lambda x: f(x).sum()))(X)
    np.testing.assert_allclose(rows, got, rtol=1e-5)


def test_module_paths_and_operators_are_named_scopes():
    model = torch.nn.Sequential(torch.nn.Linear(300, 8), torch.nn.Tanh())
    params = jtbridge.to_jax(dict(model.named_parameters()))
    f = jtbridge.wrap(lambda p, x: torch.func.functional_call(model, p, x), backend="xla")
    text = jax.jit(jax.grad(lambda p: f(p, X).sum())).lower(params).as_text(debug_info=True)
    assert "Sequential/0/addmm/dot_general" in text
    assert "Sequential/1/tanh/tanh" in text
    assert "transpose(Sequential/1)/tanh_backward" in text
    assert "transpose(Sequential/0)/mm/dot_general" in text


def test_draws_differ_from_each_other_and_between_keys_and_repeat():
    f = jtbridge.wrap(lambda x: (torch.rand_like(x), torch.rand_like(x)), backend="xla")
    a, b = f(X, rng=KEY)
    assert (a != b).all()
    np.testing.assert_array_equal(f(X, rng=KEY)[0], a)
    assert (f(X, rng=jax.random.key(4))[0] != a).mean() > 0.99


@pytest.mark.parametrize("residuals", ["save", "recompute"])
@pytest.mark.parametrize("recompute_inside", [False, True])
def test_the_backward_uses_the_masks_of_the_forward(residuals: str, recompute_inside: bool):
    """d/dx of a sum of masked products is the product's mask; a checkpoint draws its masks again, the same ones."""

    def masked(x):
        return torch.nn.functional.dropout(torch.nn.functional.dropout(x, 0.5), 0.5)

    def fn(x):
        if recompute_inside:
            return torch.nn.functional.dropout(torch.utils.checkpoint.checkpoint(masked, x, use_reentrant=False), 0.1)
        return torch.nn.functional.dropout(masked(x), 0.1)

    f = jtbridge.wrap(fn, backend="xla", residuals=residuals)
    value, pullback = jax.vjp(lambda x: f(x, rng=KEY), jnp.ones((50, 40)))
    (mask,) = pullback(jnp.ones((50, 40)))
    np.testing.assert_allclose(value, mask, rtol=1e-6)
    assert 0.15 < (value > 0).mean() < 0.3  # a quarter of nine tenths


def test_vmap_draws_the_same_for_one_key_and_differently_for_many():
    f = jtbridge.wrap(lambda x: torch.rand_like(x), backend="xla")
    same = jax.vmap(lambda x: f(x, rng=KEY))(X)
    np.testing.assert_array_equal(same[0], same[1])
    other = jax.vmap(lambda x, k: f(x, rng=k))(X, jax.random.split(KEY, 2))
    assert (other[0] != other[1]).all()


def test_signature_is_captured_once_per_trace_and_eager_use():
    calls = queue.SimpleQueue()  # not seen by jtbridge, which undoes changes of state that it sees

    def fn(x):
        calls.put(tuple(x.shape))
        return x * 2

    f = jtbridge.wrap(fn, backend="xla")
    f(X)
    once = calls.qsize()
    assert once > 0
    f(X)
    assert calls.qsize() == once

    @jax.jit
    def several(x):
        y, _ = jax.lax.scan(lambda y, _: (f(y), None), f(x), length=3)
        return f(y + 1)

    for _ in range(2):
        np.testing.assert_allclose(several(X), 2 * (16 * X + 1), rtol=1e-6)
        assert calls.qsize() == 2 * once
    jax.jit(lambda x: f(x) + 1)(X)
    assert calls.qsize() == 3 * once
    f(X)
    assert calls.qsize() == 3 * once
    f(X[:1])
    assert calls.qsize() == 4 * once
    f.clear_cache()
    f(X)
    assert calls.qsize() == 5 * once


CACHED = """
import sys, jax, jax.numpy as jnp, torch, jtbridge
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
layer = torch.nn.Linear(300, 8)
with torch.no_grad():
    for p in layer.parameters():
        p.fill_(0.5)
g = jtbridge.wrap(lambda x: torch.nn.functional.dropout(layer(x)), backend="xla")
f = jax.jit(jax.grad(lambda x, k: g(x, rng=k).sum()))
x, key = jnp.ones((2, 300)), jax.random.key(0)
hits.clear()
f(x, key).block_until_ready()
print(hits.count("/jax/compilation_cache/cache_hits"), hits.count("/jax/compilation_cache/cache_misses"))
"""


def test_a_second_process_finds_the_compiled_program(tmp_path: pathlib.Path):
    def run() -> list[int]:
        done = subprocess.run(
            [sys.executable, "-c", CACHED, str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
            cwd=pathlib.Path.cwd(),
        )
        return [int(word) for word in done.stdout.split()]

    _, first_misses = run()
    assert first_misses >= 1
    hits, misses = run()
    assert misses == 0
    assert hits >= first_misses


WEIGHT = torch.ones(3)


def _compiled(fn: Callable, *args: jax.Array) -> str:
    """Return the compiled program as text, without names and source locations."""
    text = jax.jit(fn).lower(*args).compile().as_text()
    assert text is not None
    body = text[text.index("\n%") :]
    return re.sub(r", metadata=\{[^}]*\}|[.][0-9]+", "", body)


def test_compiled_program_matches_the_same_function_in_jnp():
    x = jnp.ones((8, 8))
    with jax.default_matmul_precision("highest"):  # as torch's products are
        assert _compiled(jtbridge.wrap(in_torch, backend="xla"), x, x) == _compiled(in_jnp, x, x)


def test_a_rebound_global_is_read_again(monkeypatch: pytest.MonkeyPatch):
    def fn(x):
        return x * WEIGHT

    f, eager = jtbridge.wrap(fn, backend="xla"), jtbridge.wrap(fn)

    def assert_value(value: float, before: float):
        """Assert that calls read the new value, except the cached program of `f`, which has the value of its trace."""
        want, x = [value] * 3, jnp.ones(3)
        assert eager(x).tolist() == want
        assert jax.jit(lambda x: f(x))(x).tolist() == jax.jit(lambda x: eager(x))(x).tolist() == want
        assert f(x).tolist() == [before] * 3
        f.clear_cache()
        assert f(x).tolist() == want

    monkeypatch.setitem(globals(), "WEIGHT", torch.ones(3))  # the one that is multiplied below is no other test's
    assert_value(1, before=1)
    monkeypatch.setitem(globals(), "WEIGHT", torch.full((3,), 5.0))
    assert_value(5, before=1)
    WEIGHT.mul_(2)
    assert_value(10, before=5)


def precisions(f: Callable) -> set[str]:
    """Return the precisions of the products in a program and in its gradient."""
    text = jax.jit(jax.value_and_grad(lambda x: f(x).sum())).lower(jnp.ones((3, 4, 8))).as_text()
    assert "dot_general" in text
    assert "convolution" in text
    return set(re.findall(r"(?:precision = \[|precision )([A-Z]+)", text))


def test_matmul_precision_matches_torch():
    """On a CPU this is always true. On a GPU, JAX's default would use ten bits."""
    weight, kernel = torch.randn(8, 8), torch.randn(4, 4, 3)
    f = jtbridge.wrap(lambda x: torch.conv1d(x @ weight, kernel), backend="xla")
    assert precisions(f) == {"HIGHEST"}
    with jax.default_matmul_precision("tensorfloat32"):
        assert precisions(f) == {"HIGH"}
    before = torch.get_float32_matmul_precision()
    try:
        for name, want in (("high", "HIGH"), ("medium", "DEFAULT")):
            torch.set_float32_matmul_precision(name)
            assert precisions(f) == {want}
            with jax.default_matmul_precision("float32"):
                assert precisions(f) == {"HIGHEST"}
        torch.set_float32_matmul_precision(before)
        of_gpu, of_cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
        for setting, want in ((of_gpu, "HIGH"), (of_cpu, "HIGHEST")):
            setting.fp32_precision = "tf32"  # of one backend: then torch has no answer for all
            with pytest.raises(RuntimeError, match="mix of"):
                torch.get_float32_matmul_precision()
            assert precisions(f) == {want}
            setting.fp32_precision = "none"
    finally:
        torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision(before)
    assert precisions(f) == {"HIGHEST"}


@pytest.mark.parametrize("rows", [5, 40])
def test_storage_offsets_of_closed_over_tensors(rows: int):
    """A copy of a small constant has the same storage offset."""
    weights = torch.arange(8.0 * rows).reshape(rows, 8)
    last = weights[1:, 3:]

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + last.as_strided((4,), (8,), last.storage_offset()), x * last.as_strided((4,), (1,), 16)

    f = jtbridge.wrap(fn)
    x = jnp.ones(4)
    for g, w in zip(jax.jit(f)(x), f(x), strict=True):
        np.testing.assert_array_equal(g, w)
    np.testing.assert_array_equal(f(x)[1], weights[2, :4])
