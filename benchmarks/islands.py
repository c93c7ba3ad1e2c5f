"""A transformer with a custom operator in each layer: as islands, translated by a lowering, and called as a whole.

The operator is a gated activation with a gradient. A second operator computes the same and has a lowering, so the
difference between the two programs is the cost of the islands.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import torch

import jtbridge
from benchmarks._contestants import to_jax
from benchmarks._measure import milliseconds
from benchmarks._results import DLPACK, ISLANDS, TORCH, XLA, Calls, Options, Row, Target

_LAYERS, _WIDTH, _HEADS = 12, 128, 4


def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a custom operator ``x * sigmoid(x)`` with a gradient."""

    @torch.library.custom_op(f"jtbridge_bench::{name}", mutates_args=())
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)

    @torch.library.custom_op(f"jtbridge_bench::{name}_backward", mutates_args=())
    def backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        s = torch.sigmoid(x)
        return grad * s * (1 + x * (1 - s))

    forward.register_fake(torch.empty_like)
    backward.register_fake(lambda grad, x: torch.empty_like(grad))
    forward.register_autograd(
        lambda ctx, grad: backward(grad.contiguous(), ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    return forward


@dataclass(frozen=True)
class _Operators:
    without: Callable[[torch.Tensor], torch.Tensor]
    lowered: Callable[[torch.Tensor], torch.Tensor]


@cache
def _operators() -> _Operators:
    without, lowered = _activation("without"), _activation("lowered")

    @jtbridge.register_lowering(torch.ops.jtbridge_bench.lowered.default)
    def _(x: jax.Array) -> jax.Array:
        return x * jax.nn.sigmoid(x)

    @jtbridge.register_lowering(torch.ops.jtbridge_bench.lowered_backward.default)
    def _(grad: jax.Array, x: jax.Array) -> jax.Array:
        s = jax.nn.sigmoid(x)
        return grad * s * (1 + x * (1 - s))

    return _Operators(without, lowered)


class _Layer(torch.nn.Module):
    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(_WIDTH) for _ in range(2)])
        self.qkv, self.out = torch.nn.Linear(_WIDTH, 3 * _WIDTH), torch.nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = torch.nn.Linear(_WIDTH, 4 * _WIDTH), torch.nn.Linear(4 * _WIDTH, _WIDTH)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, _WIDTH))
        return x + self.down(self.activation(self.up(self.norms[1](x))))


def _model(activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[_Layer(activation) for _ in range(_LAYERS)])


def transformer(gradient: bool, batch: int, length: int, options: Options) -> Row:
    """Time the forward, or the gradient with respect to all parameters."""
    operators = _operators()
    plain, twin = _model(operators.without), _model(operators.lowered)
    tokens = torch.randn(batch, length, _WIDTH)
    nets = {
        ISLANDS: jtbridge.module(plain, islands="auto"),
        XLA: jtbridge.module(twin, backend="xla"),
        DLPACK: jtbridge.module(plain, backend="dlpack"),
    }
    calls: Calls = {}
    for name, net in nets.items():
        params, state = net.init()
        run = _run(net, state, gradient)
        calls[name] = lambda run=run, params=params: jax.block_until_ready(run(params, to_jax(tokens)))
    calls[TORCH] = lambda: _by_torch(plain, tokens, gradient)
    cells = milliseconds(calls, options)
    kind = "gradient" if gradient else "forward"
    return Row(
        f"islands-{kind}-{batch}x{length}",
        f"transformer, {_LAYERS} layers of width {_WIDTH}, one custom operator in each, {batch} x {length}: {kind}",
        "ms",
        cells,
        DLPACK,
        (Target(ISLANDS, 1.2, XLA), Target(ISLANDS, 0.7, DLPACK)),
    )


def _run(net: Any, state: Any, gradient: bool) -> Callable[..., Any]:
    def forward(params: Any, x: jax.Array) -> jax.Array:
        return net(params, state, x)[0]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.sin(forward(params, x)))

    return jax.jit(jax.grad(loss) if gradient else forward)


def _by_torch(model: torch.nn.Module, x: torch.Tensor, gradient: bool) -> Any:
    if not gradient:
        with torch.no_grad():
            return model(x)
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(model(x).sin().mean(), list(parameters.values()))
    return dict(sorted(zip(parameters, found, strict=True)))


ROWS = {
    "islands-forward-4x64": lambda options: transformer(False, 4, 64, options),
    "islands-gradient-4x64": lambda options: transformer(True, 4, 64, options),
    "islands-forward-1x16": lambda options: transformer(False, 1, 16, options),
    "islands-gradient-1x16": lambda options: transformer(True, 1, 16, options),
}
