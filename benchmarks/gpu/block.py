"""A block of a Llama in torch: translated to XLA alone, translated with Triton kernels, and compiled by torch."""

from __future__ import annotations

import math
from typing import Any

import jax
import torch
import torch.nn.functional as F

import jtbridge

from ._arrays import angles, normal, tensors
from ._rows import Goal, Options, Row
from ._turns import Contestant, attempt, milliseconds

TRITON, XLA, COMPILE, EAGER = "jtbridge triton", "jtbridge xla", "torch.compile", "torch"
_EPS = 1e-5


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def block(weights: dict[str, torch.Tensor], x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply attention and a gated layer to ``x[batch, tokens, width]``. The size of a head is that of the angles."""
    batch, tokens, width = x.shape
    d = cos.shape[-1]
    h = F.rms_norm(x, (width,), weights["norm1"], _EPS)
    q, k, v = (F.linear(h, weights[name]).view(batch, tokens, width // d, d).transpose(1, 2) for name in "qkv")
    attended = F.scaled_dot_product_attention(_rotated(q, cos, sin), _rotated(k, cos, sin), v, is_causal=True)
    x = x + F.linear(attended.transpose(1, 2).reshape(batch, tokens, width), weights["out"])
    h = F.rms_norm(x, (width,), weights["norm2"], _EPS)
    return x + F.linear(F.silu(F.linear(h, weights["gate"])) * F.linear(h, weights["up"]), weights["down"])


def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return a scalar that depends on all of the result."""
    return block(weights, x, cos, sin).float().square().mean()


def _arguments(options: Options) -> tuple[dict[str, jax.Array], list[jax.Array]]:
    tokens, width, heads, inner = (8, 32, 2, 48) if options.dry else (4096, 2048, 16, 5632)
    square, wide = (width, width), (inner, width)
    shapes = {"q": square, "k": square, "v": square, "out": square, "gate": wide, "up": wide, "down": wide[::-1]}
    weights = {
        name: normal(*shape, seed=i, scale=1 / math.sqrt(shape[1])) for i, (name, shape) in enumerate(shapes.items())
    }
    weights |= {name: 1 + normal(width, seed=20, scale=0.1) for name in ("norm1", "norm2")}
    return weights, [normal(1, tokens, width, seed=30), *angles(tokens, width // heads)]


def row(options: Options) -> Row:
    """Time the gradients by all weights and by the input: forward and backward."""
    weights, rest = _arguments(options)
    names = sorted(weights)  # the order in which JAX flattens a dict

    def translated(backend: str) -> Contestant:
        f = jtbridge.wrap(loss, backend=backend)
        gradient = jax.jit(jax.value_and_grad(f, (0, 1)))
        return Contestant(lambda: gradient(weights, *rest))

    def torchs(f: Any) -> Contestant:
        leaves = [x.requires_grad_() for x in tensors([weights[name] for name in names])]
        x, cos, sin = tensors(rest)
        x.requires_grad_()

        def call() -> Any:
            value = f(dict(zip(names, leaves, strict=True)), x, cos, sin)
            return value, torch.autograd.grad(value, [*leaves, x])

        return Contestant(call)

    contestants = {
        TRITON: attempt(lambda: translated("triton")),
        XLA: attempt(lambda: translated("xla")),
        # Without a GPU, the backend "inductor" needs a C++ compiler. A dry run only tests the benchmark's code.
        COMPILE: attempt(lambda: torchs(torch.compile(loss, backend="aot_eager" if options.dry else "inductor"))),
        EAGER: attempt(lambda: torchs(loss)),
    }
    return Row(
        "block",
        "block of a Llama forward+backward, 4k tokens, 2k wide, 16 heads, bfloat16",
        "ms",
        milliseconds(contestants, options, judge=EAGER),
        (Goal(TRITON, 1.2, (XLA,)), Goal(TRITON, 1.0, (COMPILE,))),
    )


ROWS = {"block": row}
