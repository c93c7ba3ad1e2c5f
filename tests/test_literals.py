"""Large closed-over tensors in a program of `jit` give one warning, which says what to do."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest
import torch

import jtbridge
from jtbridge.errors import ConstantsWarning

X = jnp.ones((1, 1500))


def layers(count: int) -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(1500, 1500, bias=False) for _ in range(count)])


def test_large_module_gives_one_warning():
    f = jtbridge.wrap(layers(2))
    with pytest.warns(ConstantsWarning, match=r"`Sequential` closes over 18 MB.*net = jtbridge.module\(model\)"):
        jax.jit(f).lower(X)
    jax.jit(lambda x: f(x) + 1).lower(X)


def test_several_functions_of_one_program_count_together():
    f, g = jtbridge.wrap(layers(1)), jtbridge.wrap(layers(1))
    with pytest.warns(ConstantsWarning, match="18 MB"):
        jax.jit(lambda x: f(g(x))).lower(X)


@pytest.mark.parametrize("case", ["small", "eager", "scan", "called", "passed", "by JAX"])
def test_no_warning(case: str):
    model = layers(1 if case == "small" else 2)
    f = jtbridge.wrap(model, backend="dlpack" if case == "called" else "auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if case == "eager":
            f(X)
        elif case == "scan":
            jax.lax.scan(lambda x, _: (f(x), None), X, length=1)
        elif case == "passed":
            net = jtbridge.module(model)
            jax.jit(net).lower(*net.init(), X)
        elif case == "by JAX":
            jax.config.update("jax_use_simplified_jaxpr_constants", True)
            try:
                jax.jit(f).lower(X)
            finally:
                jax.config.update("jax_use_simplified_jaxpr_constants", False)
        else:
            jax.jit(f).lower(X)
