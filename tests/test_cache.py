"""Equal programs have the same text, so that JAX's caches find them again, and nothing is traced twice."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge

X = jnp.arange(6.0).reshape(2, 3)

PROGRAMS: dict[str, Callable[[Callable], Callable]] = {
    "call": lambda f: lambda x: f(x),
    "twice": lambda f: lambda x: f(x) + f(x * 2),
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "vmap": lambda f: jax.vmap(lambda x: f(x)),
    "vmap_of_grad": lambda f: jax.vmap(jax.grad(lambda x: f(x).sum())),
    "hessian": lambda f: jax.hessian(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), c), x, None, length=3),
}


def make() -> Callable:
    return jtbridge.wrap(lambda x: torch.softmax(x, -1) * torch.sin(x))


@pytest.mark.parametrize("program", PROGRAMS)
def test_two_traces_of_one_function_give_the_same_program(program: str, backend: str):
    f = make()
    first, second = (jax.jit(PROGRAMS[program](f)).lower(X).as_text() for _ in range(2))
    assert first == second
    assert "custom_call" in first


@pytest.mark.parametrize("program", PROGRAMS)
def test_traces_of_two_equal_functions_give_the_same_program(program: str, backend: str):
    first, second = (jax.jit(PROGRAMS[program](make())).lower(X).as_text() for _ in range(2))
    assert first == second


def test_random_keys_are_not_constants_of_the_program(backend: str):
    f = jtbridge.wrap(lambda x: torch.nn.functional.dropout(x, 0.5))
    first, second = (jax.jit(lambda x, key: f(x, rng=key)).lower(X, jax.random.key(i)).as_text() for i in range(2))
    assert first == second


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())])
def test_function_is_traced_once(transform: Callable, backend: str):
    """After the first call, each call runs the function once, and never traces it."""
    runs = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        runs.append(type(x))
        return torch.sin(x)

    run = transform(jtbridge.wrap(fn, purity="allow"))
    jax.block_until_ready(run(X))
    runs.clear()
    jax.block_until_ready(run(X))
    assert not [kind for kind in runs if "Fake" in kind.__name__]


def test_jit_compiles_once(backend: str):
    f = make()
    traces = []
    run = jax.jit(lambda x: (traces.append(x), f(x))[1])
    for _ in range(3):
        run(X)
    assert len(traces) == 1
    run(X[0])
    assert len(traces) == 2


def test_program_cached_on_disk_calls_its_own_function(tmp_path: pathlib.Path):
    """The text does not identify the torch function, but a program of another function or process must not call it."""
    code = """
import gc, os, sys
import jax, jax.numpy as jnp, torch
import jtbridge
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
x = jnp.array([0.5, 1.0])
jax.jit(lambda x: jnp.sinh(x) * 3)(x).block_until_ready()
assert any("lambda" in entry for entry in os.listdir(sys.argv[1])), "the cache is off"
for backend in ("dlpack", "callback"):
    for name in sys.argv[2:]:
        fn = getattr(torch, name)
        f = jtbridge.wrap(lambda x, fn=fn: fn(x), backend=backend)
        run = jax.jit(lambda x, f=f: f(x)).lower(x).compile()
        del f
        gc.collect()
        for _ in range(2):
            assert torch.allclose(torch.tensor(run(x).tolist()), fn(torch.tensor([0.5, 1.0]))), (backend, name)
        jax.clear_caches()
"""
    for names in (("sin", "cos"), ("exp", "sin")):
        command = [sys.executable, "-c", code, tmp_path, *names]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_clear_cache_drops_jitted_calls():
    scale = [2.0]
    f = jtbridge.wrap(lambda x: x * scale[0])
    compiled, other = jax.jit(f), jax.jit(jax.grad(lambda x: f(x).sum()))
    assert (compiled(X) == 2 * X).all()
    assert (other(X) == 2).all()
    scale[0] = 5.0
    assert (jax.jit(f)(X) == 2 * X).all()  # JAX keeps traces by function
    f.clear_cache()
    assert (compiled(X) == 5 * X).all()
    assert (jax.jit(f)(X) == 5 * X).all()
    assert (other(X) == 2).all()  # the program of another function
