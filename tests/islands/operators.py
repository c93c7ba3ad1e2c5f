"""Custom operators without a lowering, and functions in which each of them is one of many operators."""

from __future__ import annotations

import numpy as np
import torch

_NAME = "jtbridge_island_tests"


@torch.library.custom_op(f"{_NAME}::bent", mutates_args=())
def bent(x: torch.Tensor, by: float) -> torch.Tensor:
    """Return ``x**3 * by``. The operator has gradients of any order, and no batching rule."""
    return x**3 * by


@bent.register_fake
def _(x, by):
    return torch.empty_like(x)


@torch.library.custom_op(f"{_NAME}::bent_backward", mutates_args=())
def bent_backward(grad: torch.Tensor, x: torch.Tensor, by: float) -> torch.Tensor:
    return 3 * (x**2).conj() * grad * by


@bent_backward.register_fake
def _(grad, x, by):
    return torch.empty_like(grad)


def _save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.by = inputs[1]


bent.register_autograd(lambda ctx, grad: (bent_backward(grad, ctx.saved_tensors[0], ctx.by), None), setup_context=_save)


def _save_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.by = inputs[2]


def _second(ctx, grad):
    g, x = ctx.saved_tensors
    return bent_backward(grad, x, ctx.by), 6 * x * g * grad * ctx.by, None


bent_backward.register_autograd(_second, setup_context=_save_backward)


@torch.library.custom_op(f"{_NAME}::largest", mutates_args=())
def largest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the largest element of each row, its position, and the mean of the row."""
    values, indices = x.max(-1)
    return values.clone(), indices.clone(), x.mean(-1)


@largest.register_fake
def _(x):
    rows = x.shape[:-1]
    return x.new_empty(rows), x.new_empty(rows, dtype=torch.int64), x.new_empty(rows)


@torch.library.custom_op(f"{_NAME}::strides", mutates_args=())
def strides(x: torch.Tensor) -> torch.Tensor:
    """Return the strides of a tensor, which XLA's arrays do not have."""
    return torch.tensor(x.stride())


@strides.register_fake
def _(x):
    return torch.empty(x.dim(), dtype=torch.int64)


@torch.library.custom_op(f"{_NAME}::noisy", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded])
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


@noisy.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op(f"{_NAME}::double_", mutates_args=("x",))
def double_(x: torch.Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op(f"{_NAME}::lies", mutates_args=())
def lies(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0)


@lies.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op(f"{_NAME}::raises", mutates_args=())
def raises(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("the operator does not like this")


@raises.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op(f"{_NAME}::joined", mutates_args=())
def joined(parts: list[torch.Tensor], extra: torch.Tensor | None, name: str) -> list[torch.Tensor]:
    """Take a list of tensors, an optional tensor and a string, and return a list of tensors."""
    total = torch.stack(parts).sum(0, dtype=parts[0].dtype)
    total = total if extra is None else total + extra
    return [total * len(name), total - 1]


@joined.register_fake
def _(parts, extra, name):
    return [torch.empty_like(parts[0]), torch.empty_like(parts[0])]


def around(operator, *args):
    """Return a function that runs an operator between others, so that most of its operators have a lowering."""

    def function(x):
        x = torch.sin(x) * 2 + x
        return (operator(x, *args).cos() * 0.5 + x).sum(-1)

    return function


@torch.library.custom_op(f"{_NAME}::scratching", mutates_args=())
def scratching(x: torch.Tensor) -> torch.Tensor:
    """Write to the argument, which the schema does not declare."""
    return x.exp_().sum(-1)


@scratching.register_fake
def _(x):
    return x.new_empty(x.shape[:-1])


@torch.library.custom_op(f"{_NAME}::scratching_numpy", mutates_args=())
def scratching_numpy(x: torch.Tensor) -> torch.Tensor:
    """Write to the argument through NumPy: torch does not count the write."""
    memory = x.numpy()
    np.exp(memory, out=memory)
    return torch.from_numpy(memory.sum(-1))


@scratching_numpy.register_fake
def _(x):
    return x.new_empty(x.shape[:-1])
