"""Eager calls: the cost that jtbridge adds to torch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch

import jtbridge
from benchmarks._contestants import to_jax
from benchmarks._measure import microseconds, milliseconds
from benchmarks._networks import named
from benchmarks._results import EAGER, JNP, TORCH, Calls, Options, Row, Target


def _waiting(call: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(call(*args))


def add(options: Options) -> Row:
    """Time an eager `a + b`."""
    a, b = torch.randn(16), torch.randn(16)
    x, y = to_jax(a), to_jax(b)
    calls: Calls = {
        EAGER: _waiting(jtbridge.wrap(lambda a, b: a + b), x, y),
        JNP: _waiting(lambda a, b: a + b, x, y),
        TORCH: lambda: a + b,
    }
    cells = microseconds(calls, options)
    return Row("eager-add", "eager a + b, 16 floats", "us", cells, JNP, (Target(EAGER, 40),))


def gradient(options: Options) -> Row:
    """Time the gradient of `sum(sin(a) * b)`, beside the same function written in jnp."""
    a, b = torch.randn(16), torch.randn(16)
    leaf = a.clone().requires_grad_()
    x, y = to_jax(a), to_jax(b)
    calls: Calls = {
        EAGER: _waiting(jax.grad(jtbridge.wrap(lambda a, b: (torch.sin(a) * b).sum())), x, y),
        JNP: _waiting(jax.grad(lambda a, b: (jnp.sin(a) * b).sum()), x, y),
        TORCH: lambda: torch.autograd.grad((torch.sin(leaf) * b).sum(), leaf),
    }
    title = "eager grad(sum(sin(a) * b)), 16 floats"
    return Row("eager-grad", title, "us", microseconds(calls, options), JNP, (Target(EAGER, 0.8, JNP),))


def gradients_of_rows(batch: int, width: int, options: Options) -> Row:
    """Time `vmap(grad(f))` of an MLP with two layers, beside `torch.func`."""
    weights = [torch.randn(width, 2 * width) / width**0.5, torch.randn(2 * width, 1)]
    arrays = [to_jax(weight) for weight in weights]
    rows = torch.randn(batch, width)
    x = to_jax(rows)

    def of_torch(row: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(row @ weights[0]) @ weights[1]).sum()

    def of_jax(row: jax.Array) -> jax.Array:
        return (jnp.tanh(row @ arrays[0]) @ arrays[1]).sum()

    calls: Calls = {
        EAGER: _waiting(jax.vmap(jax.grad(jtbridge.wrap(of_torch))), x),
        JNP: _waiting(jax.vmap(jax.grad(of_jax)), x),
        TORCH: lambda: torch.func.vmap(torch.func.grad(of_torch))(rows),
    }
    title = f"eager vmap(grad(MLP)), {batch} x {width}"
    key = f"eager-vmap-grad-{batch}x{width}"
    return Row(key, title, "us", microseconds(calls, options), TORCH, (Target(EAGER, 1.5, TORCH),))


def bert(of_gradient: bool, options: Options) -> Row:
    """Time four layers of BERT-base's width on 8 x 128 tokens, or their gradient with respect to every parameter."""
    model = named("bert")
    arrays = jax.tree.map(to_jax, (model.parameters, *model.inputs))
    names = sorted(model.parameters)  # the order in which JAX flattens a dict

    def torch_forward() -> torch.Tensor:
        return model.call(model.parameters, *model.inputs)

    def torch_gradient() -> list[torch.Tensor]:
        loss = model.loss(model.parameters, *model.inputs)
        return list(torch.autograd.grad(loss, [model.parameters[name] for name in names]))

    if of_gradient:
        calls: Calls = {EAGER: _waiting(jax.grad(jtbridge.wrap(model.loss)), *arrays), TORCH: torch_gradient}
    else:
        # JAX computes no gradient here, but torch's parameters require one, so torch runs under `no_grad`.
        calls = {EAGER: _waiting(jtbridge.wrap(model.call), *arrays), TORCH: torch.no_grad()(torch_forward)}
    cells = milliseconds(calls, options)
    what = "gradient" if of_gradient else "forward"
    title = f"eager BERT width, 4 layers, 8 x 128: {what}"
    return Row(f"eager-bert-{what}", title, "ms", cells, TORCH, (Target(EAGER, 1.03, TORCH),))


ROWS = {
    "eager-add": add,
    "eager-grad": gradient,
    "eager-vmap-grad-64x32": partial(gradients_of_rows, 64, 32),
    "eager-vmap-grad-512x256": partial(gradients_of_rows, 512, 256),
    "eager-bert-forward": partial(bert, False),
    "eager-bert-gradient": partial(bert, True),
}
