"""What a translated program is made of: constants, scopes, random draws, and what is cached."""

from __future__ import annotations

import pathlib
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


def test_big_constants_are_arrays_of_the_jaxpr_and_small_ones_are_not():
    big, small = torch.ones(300, 4), torch.ones(4)
    jaxpr = jax.make_jaxpr(jtbridge.wrap(lambda x: x @ big + small, backend="xla"))(X)
    assert [c.shape for c in jaxpr.consts] == [(300, 4)]


def test_one_array_for_a_weight_of_several_functions_and_signatures():
    big = torch.ones(300, 4)
    f = jtbridge.wrap(lambda x: x @ big, backend="xla")
    g = jtbridge.wrap(lambda x: (x @ big).sin(), backend="xla")
    (first,), (second,), (third,) = (
        jax.make_jaxpr(f)(X).consts,
        jax.make_jaxpr(f)(X[:1]).consts,
        jax.make_jaxpr(g)(X).consts,
    )
    assert first is second is third


def test_weights_that_were_written_to_are_read_again():
    layer = torch.nn.Linear(300, 2)
    f = jtbridge.wrap(layer, backend="xla")

    def assert_as_torch():
        np.testing.assert_allclose(f(X), layer(torch.tensor(np.asarray(X))).detach(), rtol=1e-4, atol=1e-5)

    assert_as_torch()
    with torch.no_grad():
        layer.weight.mul_(2)
        layer.bias.add_(1)
    assert_as_torch()
    layer.weight = torch.nn.Parameter(torch.zeros(2, 300))
    assert_as_torch()


def test_gradient_with_closed_over_weights():
    layer = torch.nn.Linear(300, 2)
    f = jtbridge.wrap(layer, backend="xla")
    got = jax.jit(jax.grad(lambda x: f(x).sum()))(X)
    np.testing.assert_allclose(got, np.broadcast_to(layer.weight.detach().sum(0), X.shape), rtol=1e-5)
    rows = jax.vmap(jax.grad(lambda x: f(x).sum()))(X)
    np.testing.assert_allclose(rows, got, rtol=1e-5)


def test_module_paths_and_operators_are_named_scopes_forward_and_backward():
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


def test_a_signature_is_captured_once():
    calls = []

    def fn(x):
        calls.append(tuple(x.shape))
        return x * 2

    f = jtbridge.wrap(fn, backend="xla")
    f(X)
    traced = len(calls)
    f(X)
    jax.jit(f)(X)
    jax.jit(lambda x: f(x) + 1)(X)
    assert len(calls) == traced
    f(X[:1])
    assert len(calls) > traced


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
    """What XLA made of it, without names and where they come from."""
    text = jax.jit(fn).lower(*args).compile().as_text()
    assert text is not None
    body = text[text.index("\n%") :]
    return re.sub(r", metadata=\{[^}]*\}|[.][0-9]+", "", body)


def test_the_compiled_program_is_that_of_the_function_written_in_jnp():
    x = jnp.ones((8, 8))
    with jax.default_matmul_precision("highest"):  # as torch's products are
        assert _compiled(jtbridge.wrap(in_torch, backend="xla"), x, x) == _compiled(in_jnp, x, x)


def test_a_rebound_global_is_read_again(monkeypatch: pytest.MonkeyPatch):
    f = jtbridge.wrap(lambda x: x * WEIGHT, backend="xla")
    assert f(jnp.ones(3)).tolist() == [1, 1, 1]
    monkeypatch.setitem(globals(), "WEIGHT", torch.full((3,), 5.0))
    assert f(jnp.ones(3)).tolist() == [5, 5, 5]
    WEIGHT.mul_(2)
    assert f(jnp.ones(3)).tolist() == [10, 10, 10]


def precisions(f: Callable) -> set[str]:
    """Those of the products in a program, and of its gradient."""
    text = jax.jit(jax.value_and_grad(lambda x: f(x).sum())).lower(jnp.ones((3, 4, 8))).as_text()
    assert "dot_general" in text
    assert "convolution" in text
    return set(re.findall(r"(?:precision = \[|precision )([A-Z]+)", text))


def test_products_are_as_precise_as_torchs():
    """On a CPU that is always so. On a GPU, JAX's default would have ten bits."""
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
