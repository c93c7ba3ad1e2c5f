"""Operators that are limited by memory bandwidth: softmax, norms, SwiGLU, rotary embedding.

The score is a share of the bandwidth of a copy, which is measured in turns with the others. The bytes to move are those
of each argument and result, once in the forward and once in the backward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jtbridge import kernels

from ._arrays import angles, bytes_of, in_jax, in_jax_with_gradients, in_torch, in_torch_with_gradients, normal
from ._rows import Goal, Options, Row
from ._turns import Contestant, Contestants, attempt, milliseconds

OURS, XLA, LIGER, COPY = "jtbridge.kernels", "XLA's fusion", "Liger-Kernel", "copy"


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation.

    Args:
        ours: the function of jtbridge. Its arguments are the arrays `large` and then `small`.
        plain: the same function in jnp.
        liger: the name of Liger-Kernel's function.
        make: ``options -> (large, small)``: the arrays as large as the results, which have gradients; and the others.
        forward: how many large arrays the forward must read or write.
        both: how many large arrays the forward and the backward must read or write.
        weights: how many of the first arrays of `small` have a gradient.
        results: the number of results.
        more: further arguments of Liger-Kernel's function.
    """

    ours: Callable[..., Any]
    plain: Callable[..., Any]
    liger: str
    make: Callable[[Options], tuple[list[jax.Array], list[jax.Array]]]
    forward: int
    both: int
    weights: int = 0
    results: int = 1
    more: tuple[Any, ...] = ()


def _wide(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return a function that computes `f` in float32 and rounds the result once."""
    return lambda *xs: f(*(x.astype("float32") for x in xs)).astype(xs[0].dtype)


def _layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def _rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def _rope(q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array) -> list[jax.Array]:
    def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        first, second = jnp.split(x, 2, -1)
        return x * cos + jnp.concatenate([-second, first], -1) * sin

    return [_wide(rotated)(x, cos, sin) for x in (q, k)]


def _rows(width: int, count: int, weights: int = 0) -> Callable[[Options], tuple[list[jax.Array], list[jax.Array]]]:
    def make(options: Options) -> tuple[list[jax.Array], list[jax.Array]]:
        tokens, n = options.pick(16_384, 8), options.pick(width, 32)
        large = [normal(tokens, n, seed=i) for i in range(count)]
        return large, [1 + normal(n, seed=9 + i, scale=0.1) for i in range(weights)]

    return make


def _heads(options: Options) -> tuple[list[jax.Array], list[jax.Array]]:
    batch, heads, tokens, d = (1, 2, 8, 16) if options.dry else (4, 32, 4096, 128)
    return [normal(batch, heads, tokens, d, seed=i) for i in range(2)], angles(tokens, d)


CASES = {
    "softmax": Case(kernels.softmax, _wide(jax.nn.softmax), "liger_softmax", _rows(4096, 1), 2, 5),
    "layer-norm": Case(
        kernels.layer_norm, _wide(_layer_norm), "liger_layer_norm", _rows(4096, 1, 2), 2, 5, weights=2, more=(1e-5,)
    ),
    "rms-norm": Case(
        kernels.rms_norm, _wide(_rms_norm), "liger_rms_norm", _rows(4096, 1, 1), 2, 5, weights=1, more=(1e-6,)
    ),
    "swiglu": Case(
        kernels.swiglu, _wide(lambda gate, up: jax.nn.silu(gate) * up), "liger_swiglu", _rows(14_336, 2), 3, 8
    ),
    "rope": Case(lambda *xs: list(kernels.rope_qk(*xs)), _rope, "liger_rope", _heads, 4, 8, results=2),
}


def row(name: str, gradient: bool, options: Options) -> Row:
    """Time one operation, forward or with its gradients."""
    case = CASES[name]
    large, small = case.make(options)
    arrays, cts = [*large, *small], [normal(*large[0].shape, seed=20 + i) for i in range(case.results)]
    count = len(large) + case.weights

    def of_jax(f: Callable[..., Any]) -> Contestant:
        return in_jax_with_gradients(f, arrays, cts, count) if gradient else in_jax(f, arrays)

    def ligers() -> Contestant:
        from liger_kernel.transformers import functional

        f = getattr(functional, case.liger)
        given = [x[None] for x in small] if name == "rope" else small  # its angles have a batch

        def call(*xs: Any) -> Any:
            return f(*xs, *case.more)

        everything = [*large, *given]
        return in_torch_with_gradients(call, everything, cts, count) if gradient else in_torch(call, everything)

    contestants: Contestants = {
        OURS: attempt(lambda: of_jax(case.ours)),
        XLA: attempt(lambda: of_jax(case.plain)),
        LIGER: attempt(ligers),
        COPY: dataclasses.replace(in_jax(jnp.negative, large[:1]), checked=False),  # a copy that XLA cannot remove
    }
    cells = milliseconds(contestants, options, judge=XLA)
    moved = (case.both if gradient else case.forward) * bytes_of(large[0])
    return Row(
        key(name, gradient),
        f"{name} {'forward+backward' if gradient else 'forward'}, {' x '.join(map(str, large[0].shape))}",
        "ms",
        cells,
        (
            Goal(OURS, 0.85, (COPY,), work=moved / (2 * bytes_of(large[0]))),
            Goal(OURS, 1.0, (XLA,)),
            Goal(OURS, 1.0, (LIGER,)),
        ),
    )


def key(name: str, gradient: bool) -> str:
    return f"{name}-{'gradient' if gradient else 'forward'}"


ROWS = {key(name, gradient): functools.partial(row, name, gradient) for name in CASES for gradient in (False, True)}
