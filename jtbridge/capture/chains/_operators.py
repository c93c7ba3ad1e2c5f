"""Fused operators: torch operators that each compute a whole chain of operators, with a backward operator.

The definition of a fused operator (:data:`FUNCTIONS`) is written in ATen overloads and rounds where the chain rounds.
Where no kernel computes the operator, the definition is translated instead, and gives the results of the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from jtbridge.core.second_gradients import as_variable, second_gradients

Tensors = tuple[torch.Tensor, ...]

_aten = torch.ops.aten

# The definitions, by the qualified names of the operators.
FUNCTIONS: dict[str, Callable[..., Any]] = {}


def operator(
    name: str, arguments: str, function: Callable[..., Tensors], fake: Callable[..., Tensors], results: int
) -> Any:
    """Register the operator ``jtbridge::name``, which returns the tensor of `function`, or a tuple of several tensors.

    Args:
        name: the name without the namespace.
        arguments: the schema of the arguments.
        function: the definition, in ATen overloads.
        fake: returns tensors of the shapes and dtypes of the results.
        results: the number of results.
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
    """Register ``jtbridge::name`` and its gradient ``jtbridge::name_backward``, which can itself be differentiated.

    Args:
        name: the name without the namespace.
        tensors: the schema of the tensor arguments, which come first.
        options: the schema of the other arguments.
        forward: ``(*tensors, *options) -> (result, *kept)``.
        backward: ``(cotangent, *tensors, *kept, *options)`` -> gradients of the differentiated tensors.
        fake: like `forward`, on fake tensors.
        differentiated: the number of differentiated tensors, which come first.
        kept: the number of residuals, which only the backward uses.
        written_out: like `forward`, in operators that torch can differentiate twice; None if `forward` has only such.
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

    def differentiate(ctx: Any, ct: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        found = gradient(ct, *ctx.saved_tensors, *ctx.options)
        missing = count - differentiated + len(ctx.options)
        return (*(found if differentiated > 1 else (found,)), *[None] * missing)

    def save_for_second(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.options = inputs[1 + count + kept :]
        ctx.save_for_backward(*inputs[: 1 + count])

    def differentiate_gradient(ctx: Any, *seconds: torch.Tensor) -> tuple[Any, ...]:
        """Compute the result again from the tensors, and let torch differentiate it twice.

        The residuals are functions of the tensors, so this includes their derivatives.
        """
        with torch.enable_grad():
            leaves = [as_variable(x) for x in ctx.saved_tensors[: 1 + differentiated]]
            constants = ctx.saved_tensors[1 + differentiated :]
            result = (written_out or forward)(*leaves[1:], *constants, *ctx.options)[0]
            found = second_gradients([result], leaves, seconds)
        return (*found, *[None] * (count - differentiated + kept + len(ctx.options)))

    whole.register_autograd(differentiate, setup_context=save)
    gradient.register_autograd(differentiate_gradient, setup_context=save_for_second)
    return whole


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a tensor to another dtype."""
    return x if x.dtype is dtype else _aten._to_copy.default(x, dtype=dtype)


def wide(x: torch.Tensor) -> torch.Tensor:
    """Convert a tensor to float32."""
    return cast(x, torch.float32)


def summed(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Sum over dimensions; without dimensions, copy."""
    return _aten.sum.dim_IntList(x, dims) if dims else _aten.clone.default(x)
