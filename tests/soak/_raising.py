"""Calls that must raise, each followed by a call of the same function that must work."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

import jtbridge
from jtbridge.errors import ArgumentError, DataDependentShapeError, DTypeError, RandomnessError

from ._function import TIGHT, Failure, Function, floats
from ._torch_code import add, around_doubled, positive

# XLA chooses between the two.
COMPILED = (jax.errors.JaxRuntimeError, ValueError)


class _PositiveInBackward(torch.autograd.Function):
    """Doubles; the backward raises where `positive` does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> torch.Tensor:
        positive(ctx.saved_tensors[0])
        return cotangents[0] * 2


def functions() -> list[Function]:
    return [*_of_torch_code(), *_of_wrong_calls(), *_of_refusals()]


def _below_zero(x: jax.Array) -> jax.Array:
    return -1 - x * x


def _of_torch_code() -> list[Function]:
    eager = jtbridge.wrap(positive)
    dlpack = jax.jit(jtbridge.wrap(positive, backend="dlpack"))
    callback = jax.jit(jtbridge.wrap(positive, backend="callback"))
    island = jax.jit(jtbridge.wrap(around_doubled, islands="needed"))
    backward = jax.grad(lambda x: jtbridge.wrap(_PositiveInBackward.apply)(x).sum())

    def positive_island(x: torch.Tensor) -> torch.Tensor:
        return torch.cos(torch.ops.soak.doubled(x)) * 0 + x * 2

    island = jax.jit(jtbridge.wrap(positive_island, islands="needed"))

    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * x * 2

    def of_square(f: Any) -> Any:
        return lambda x: f(x * x)

    def failing(name: str, weight: float, f: Any, error: Any, text: str = "the sum is negative") -> Function:
        failure = Failure(lambda x: f(_below_zero(x)), error, text)
        return Function(name, "raises", weight, of_square(f), twice, failure=failure)

    return [
        failing("torch code, eagerly", 30, eager, LookupError),
        failing("torch code, dlpack", 8, dlpack, COMPILED),
        failing("torch code, callback", 4, callback, COMPILED),
        failing("torch code, island", 4, island, COMPILED),
        Function(
            "torch code, backward",
            "raises",
            4,
            of_square(backward),
            lambda x: torch.full_like(x, 2),
            failure=Failure(lambda x: backward(_below_zero(x)), LookupError, "the sum is negative"),
        ),
    ]


def _of_wrong_calls() -> list[Function]:
    wrapped, pair = jtbridge.wrap(add), floats(("n", 4), ("n", 4))
    compiled = jax.jit(wrapped)
    four_bits = jnp.zeros(2, jnp.int4)

    def failing(name: str, weight: float, f: Any, wrong: Any, error: Any, text: str) -> Function:
        return Function(name, "raises", weight, f, add, pair, failure=Failure(wrong, error, text))

    return [
        failing("shapes", 20, wrapped, lambda x, y: wrapped(x, y[:, :3]), RuntimeError, "must match the size"),
        failing("shapes, jit", 1, compiled, lambda x, y: compiled(x, y[:, :3]), Exception, "size"),
        failing("too few arguments", 10, wrapped, lambda x, y: wrapped(x), TypeError, "missing"),
        failing("dtype", 5, wrapped, lambda x, y: wrapped(x, four_bits), DTypeError, "int4"),
        failing("unhashable", 5, wrapped, lambda x, y: wrapped(x, {1: bytearray(2)}), ArgumentError, "hash"),
    ]


def _of_refusals() -> list[Function]:
    def selected(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)

    eager_selected, eager_noisy = jtbridge.wrap(selected), jtbridge.wrap(noisy)
    refused_selected, refused_noisy = jax.jit(eager_selected), jax.jit(eager_noisy)
    negative = jtbridge.to_torch_function(_checked)
    return [
        Function(
            "shape of values",
            "raises",
            0.5,
            eager_selected,
            selected,
            failure=Failure(refused_selected, DataDependentShapeError, "depends on the values"),
        ),
        Function(
            "no key",
            "raises",
            0.5,
            lambda x: eager_noisy(x, rng=jax.random.key(0)),
            None,
            failure=Failure(refused_noisy, RandomnessError, "without a key"),
        ),
        Function(
            "JAX in torch",
            "raises",
            1,
            lambda x: negative(x, "fine"),
            lambda x: x * 2,
            tolerance=TIGHT,
            from_torch=True,
            failure=Failure(lambda x: negative(x, "bad"), LookupError, "bad was asked for"),
        ),
    ]


def _checked(x: jax.Array, what: str) -> jax.Array:
    if what == "bad":
        raise LookupError("bad was asked for")
    return x * 2
