"""Torch operators that are each a whole chain of others, with a backward that is one operator too.

What an operator is made of (:data:`FUNCTIONS`) is written in ATen overloads and rounds where the chain rounds: where no
kernel computes it, that is translated in its place, and gives what the chain gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]

_aten = torch.ops.aten

# By the operator's qualified name.
FUNCTIONS: dict[str, Callable[..., Any]] = {}


def operator(
    name: str, arguments: str, function: Callable[..., Tensors], fake: Callable[..., Tensors], results: int
) -> Any:
    """``jtbridge::name``, which returns what `function` does: a tensor, or a tuple of several.

    Args:
        name: without the namespace.
        arguments: their schema.
        function: in ATen overloads.
        fake: tensors of the shapes and dtypes that it returns.
        results: how many these are.
    """

    def unpacked(run: Callable[..., Tensors]) -> Callable[..., Any]:
        return lambda *args: run(*args) if results > 1 else run(*args)[0]

    returns = f"({', '.join(['Tensor'] * results)})" if results > 1 else "Tensor"
    qualified = f"jtbridge::{name}"
    FUNCTIONS[qualified] = unpacked(function)
    made = torch.library.custom_op(qualified, unpacked(function), mutates_args=(), schema=f"({arguments}) -> {returns}")
    made.register_fake(unpacked(fake))
    return made


def with_backward(
    name: str,
    tensors: str,
    options: str,
    *,
    forward: Callable[..., Tensors],
    backward: Callable[..., Tensors],
    fake: Callable[..., Tensors],
    differentiated: int,
    kept: int = 0,
    written_out: Callable[..., Tensors] | None = None,
) -> Any:
    """``jtbridge::name``, with ``jtbridge::name_backward`` as its gradient, which can be differentiated itself.

    Args:
        name: without the namespace.
        tensors: the schema of the arguments that are tensors, which come first.
        options: that of the others.
        forward: ``(*tensors, *options) -> (result, *kept)``.
        backward: ``(cotangent, *tensors, *kept, *options)`` -> gradients of the moving tensors.
        fake: as `forward`, without values.
        moving: how many tensors have a gradient: the first ones.
        kept: how many values are there for the backward alone.
        written_out: the result again, as torch is to differentiate it twice; None: by `forward`.
    """
    saved = [f"Tensor kept_{i}" for i in range(kept)]
    count = tensors.count("Tensor")

    def like_differentiated(ct: torch.Tensor, *args: Any) -> Tensors:
        return tuple(x.new_empty(x.shape) for x in args[:differentiated])

    whole = operator(name, f"{tensors}, {options}", forward, fake, 1 + kept)
    schema = ", ".join(["Tensor cotangent", tensors, *saved, options])
    gradient = operator(f"{name}_backward", schema, backward, like_differentiated, differentiated)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.options = inputs[count:]
        if kept:
            ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:count], *(output[1:] if kept else ()))

    def once(ctx: Any, ct: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        found = gradient(ct, *ctx.saved_tensors, *ctx.options)
        missing = count - differentiated + len(ctx.options)
        return (*(found if differentiated > 1 else (found,)), *[None] * missing)

    def save_for_second(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.options = inputs[1 + count + kept :]
        ctx.save_for_backward(*inputs[: 1 + count])

    def twice(ctx: Any, *seconds: torch.Tensor) -> tuple[Any, ...]:
        """What is kept is a function of the tensors, and computed again."""
        with torch.enable_grad():
            leaves = [_followed(x) for x in ctx.saved_tensors[: 1 + differentiated]]
            ct, *primals = leaves
            result = (written_out or forward)(*primals, *ctx.saved_tensors[1 + differentiated :], *ctx.options)[0]
            firsts = torch.autograd.grad(result, primals, ct, create_graph=True)
            found = torch.autograd.grad(
                firsts, leaves, seconds, create_graph=True, allow_unused=True, materialize_grads=True
            )
        return (*found, *[None] * (count - differentiated + kept + len(ctx.options)))

    whole.register_autograd(once, setup_context=save)
    gradient.register_autograd(twice, setup_context=save_for_second)
    return whole


def _followed(x: torch.Tensor) -> torch.Tensor:
    """The same tensor, of which a derivative can be taken; through it, of x too if that can be."""
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in another dtype."""
    return x if x.dtype is dtype else _aten._to_copy.default(x, dtype=dtype)


def wide(x: torch.Tensor) -> torch.Tensor:
    """A tensor in float32."""
    return cast(x, torch.float32)


def summed(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The sum over some dimensions, or over none."""
    return _aten.sum.dim_IntList(x, dims) if dims else _aten.clone.default(x)
