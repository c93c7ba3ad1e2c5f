"""JAX functions in torch, beside jax2torch's way: DLPack and a `torch.autograd.Function` over `jax.vjp`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.utils.dlpack

import jtbridge
from benchmarks._contestants import to_jax
from benchmarks._measure import microseconds, milliseconds
from benchmarks._results import JAX2TORCH, JNP, REVERSE, TORCH, Calls, Options, Row, Target


def _to_torch(array: jax.Array) -> torch.Tensor:
    return torch.utils.dlpack.from_dlpack(array.__dlpack__())


def _jax2torch(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Convert a JAX function as `jax2torch.jax2torch` 0.0.7 does, for functions of tensors that return one tensor.

    The package itself calls `jax.dlpack.to_dlpack`, which JAX 0.10 no longer has.
    """

    def inner(*args: torch.Tensor) -> torch.Tensor:
        class JaxFun(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: torch.Tensor) -> torch.Tensor:
                arrays = [jax.dlpack.from_dlpack(x.detach().contiguous()) for x in args]
                result, ctx.fun_vjp = jax.vjp(fn, *arrays)
                return _to_torch(result)

            @staticmethod
            def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
                gradients = ctx.fun_vjp(jax.dlpack.from_dlpack(cotangents[0].contiguous()))
                return tuple(map(_to_torch, gradients))

        return JaxFun.apply(*args)  # type: ignore[return-value]

    return inner


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return (jnp.sin(a) * b).sum()


def call(options: Options) -> Row:
    """Time a call of a jitted JAX function with torch tensors."""
    a, b = torch.randn(16), torch.randn(16)
    x, y = to_jax(a), to_jax(b)
    fn = jax.jit(lambda a, b: jnp.sin(a) * b)
    ours, theirs = jtbridge.to_torch_function(fn), _jax2torch(fn)
    calls: Calls = {
        REVERSE: lambda: ours(a, b),
        JAX2TORCH: lambda: theirs(a, b),
        JNP: lambda: jax.block_until_ready(fn(x, y)),
        TORCH: lambda: torch.sin(a) * b,
    }
    cells = microseconds(calls, options)
    title = "a jitted JAX function in torch, 16 floats"
    return Row("reverse-call", title, "us", cells, JAX2TORCH, (Target(REVERSE, 1.0, JAX2TORCH),))


def gradient(options: Options) -> Row:
    """Time the value of a jitted JAX function and its gradient by torch's autograd."""
    a, b = torch.randn(16), torch.randn(16)
    leaf = a.clone().requires_grad_()
    x, y = to_jax(a), to_jax(b)
    fn = jax.jit(_product)
    ours, theirs = jtbridge.to_torch_function(fn), _jax2torch(fn)
    of_jax = jax.jit(jax.grad(_product))
    calls: Calls = {
        REVERSE: lambda: torch.autograd.grad(ours(leaf, b), leaf)[0],
        JAX2TORCH: lambda: torch.autograd.grad(theirs(leaf, b), leaf)[0],
        JNP: lambda: jax.block_until_ready(of_jax(x, y)),
        TORCH: lambda: torch.autograd.grad((torch.sin(leaf) * b).sum(), leaf)[0],
    }
    cells = microseconds(calls, options)
    title = "gradient of a jitted JAX function in torch, 16 floats"
    return Row("reverse-grad", title, "us", cells, JAX2TORCH, (Target(REVERSE, 1.0, JAX2TORCH),))


def training_step(width: int, batch: int, options: Options) -> Row:
    """Time one step of SGD for a Flax MLP with two hidden layers, in a torch loop and in JAX."""
    import flax.linen as nn

    rate = 1e-6  # so that the weights of all contestants stay close

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(2):
                x = nn.relu(nn.Dense(width)(x))
            return nn.Dense(10)(x)

    inputs, targets = torch.randn(batch, width), torch.randn(batch, 10)
    x, y = to_jax(inputs), to_jax(targets)
    variables = Mlp().init(jax.random.key(0), x)
    apply: Callable[..., Any] = Mlp().apply
    module = jtbridge.to_torch_module(apply, variables)
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)

    def torch_step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((module(inputs) - targets) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    @jax.jit
    def step(variables: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda v: ((apply(v, x) - y) ** 2).mean())(variables)
        return loss, jax.tree.map(lambda v, g: v - rate * g, variables, gradients)

    box = [variables]

    def jax_step() -> jax.Array:
        loss, box[0] = step(box[0])
        return jax.block_until_ready((loss, box[0]))[0]

    linears = [torch.nn.Linear(width, size) for size in (width, width, 10)]
    layers = torch.nn.Sequential(linears[0], torch.nn.ReLU(), linears[1], torch.nn.ReLU(), linears[2])
    with torch.no_grad():
        for name, layer in zip(("Dense_0", "Dense_1", "Dense_2"), linears, strict=True):
            layer.weight.copy_(module.get_parameter(f"params.{name}.kernel").T)
            layer.bias.zero_()
    optimizer_of_torch = torch.optim.SGD(layers.parameters(), lr=rate)

    def all_torch_step() -> torch.Tensor:
        optimizer_of_torch.zero_grad()
        loss = ((layers(inputs) - targets) ** 2).mean()
        loss.backward()
        optimizer_of_torch.step()
        return loss.detach()

    calls: Calls = {REVERSE: torch_step, JNP: jax_step, TORCH: all_torch_step}
    cells = milliseconds(calls, options)
    title = f"training step of a Flax MLP in a torch loop, {batch} x {width}"
    key = f"reverse-mlp-{batch}x{width}"
    return Row(key, title, "ms", cells, JNP, (Target(REVERSE, 1.3, JNP),))


ROWS = {
    "reverse-call": call,
    "reverse-grad": gradient,
    "reverse-mlp-64x128": partial(training_step, 128, 64),
    "reverse-mlp-256x512": partial(training_step, 512, 256),
    "reverse-mlp-512x1024": partial(training_step, 1024, 512),
}
