"""JAX's tools."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import torch

from ._case import V, case


@case("tools")
def jit_disabled(run):
    f = run.wrap(lambda v: v * 2 + 1)

    def call():
        with jax.disable_jit():
            return f(jnp.asarray(V.numpy()))

    yield run.either(lambda: f(V), call)


@case("tools")
def copied_before_and_after_a_call(run):
    f = run.wrap(_top_level)
    yield run(copy.deepcopy(f), V)
    yield run(f, V)
    yield run(copy.deepcopy(f), V)


def _top_level(v):
    return v * 2 + 1


@case("tools")
def pickled_before_and_after_a_call(run):
    f = run.wrap(_top_level)
    yield run(pickle.loads(pickle.dumps(f)), V)
    yield run(f, V)
    yield run(pickle.loads(pickle.dumps(f)), V)


@case("tools")
def nan_is_noticed(run):
    f = run.wrap(lambda v: torch.log(v - 3))

    def call():
        with jax.debug_nans(True):
            try:
                jax.block_until_ready(jax.jit(f)(jnp.asarray(V.numpy())))
            except FloatingPointError:
                return jnp.asarray(True)
        return jnp.asarray(False)

    yield torch.tensor(True) if run.is_torch else call()


@case("tools")
def checkpointed(run):
    f = run.wrap(lambda v: v.sin() * v)
    g = f if run.is_torch else jax.checkpoint(f)
    yield run.grad(g, V)


@case("tools")
def scanned(run):
    f = run.wrap(lambda v: (v * 0.5).sin())

    def of_torch():
        v = V
        for _ in range(3):
            v = f(v)
        return v

    def of_jax():
        return jax.lax.scan(lambda v, _: (f(v), None), jnp.asarray(V.numpy()), length=3)[0]

    yield run.either(of_torch, of_jax)


@case("tools")
def solved_by_gmres(run):
    a = torch.eye(4) * 3 + torch.ones(4, 4) * 0.5
    f = run.wrap(lambda v: a @ v)

    def of_jax():
        return jax.scipy.sparse.linalg.gmres(f, jnp.asarray(V.numpy()), tol=1e-7)[0]

    yield run.either(lambda: torch.linalg.solve(a, V), of_jax)


@case("tools")
def solved_with_a_gradient(run):
    a = torch.eye(4) * 3 + torch.ones(4, 4) * 0.5
    f = run.wrap(lambda v: a @ v)

    def of_jax():
        def solve(b):
            return jax.lax.custom_linear_solve(
                f, b, lambda mv, b: jax.scipy.sparse.linalg.cg(mv, b, tol=1e-7)[0], symmetric=True
            )

        return jax.grad(lambda b: solve(b).sum())(jnp.asarray(V.numpy()))

    yield run.either(lambda: torch.linalg.solve(a, torch.ones(4)), of_jax)


@case("tools")
def static_method(run):
    class Model:
        @staticmethod
        def f(v):
            return v * 2

    class Wrapped:
        f = run.wrap(Model.__dict__["f"]) if not run.is_torch else Model.__dict__["f"]

    yield run(Wrapped().f, V)


@case("tools")
def recursion_by_name(run):
    def f(v, n=3):
        return v if n == 0 else g(v * 2, n - 1)

    g = run.wrap(f)
    yield run(g, V)


@case("tools")
def many_python_numbers(run):
    f = run.wrap(lambda v, rate: v * rate)
    for i in range(5):
        yield run(lambda v, i=i: f(v, 0.1 * i), V)
