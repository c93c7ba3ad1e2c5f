"""Derivatives by plain torch.autograd, in JAX's convention for complex numbers.

JAX transposes without conjugating, torch conjugates, so ``jax_vjp(ct) == conj(torch_vjp(conj(ct)))``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Tensors = list[torch.Tensor]
Function = Callable[..., Sequence[torch.Tensor]]


def leaves_of_graph(primals: Sequence[torch.Tensor]) -> Tensors:
    """Return the same tensors as leaves of a new autograd graph."""
    return [x.detach().clone().requires_grad_() for x in primals]


def gradients(
    outputs: Sequence[torch.Tensor],
    inputs: Tensors,
    cotangents: Sequence[torch.Tensor],
    *,
    again: bool = False,
) -> Tensors:
    """Return `torch.autograd.grad`, with zeros for an output that does not depend on an input."""
    pairs = [(y, ct) for y, ct in zip(outputs, cotangents, strict=True) if y.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(
        [y for y, _ in pairs],
        inputs,
        [ct for _, ct in pairs],
        allow_unused=True,
        retain_graph=True,
        create_graph=again,
    )
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def vjp(fn: Function, primals: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]) -> Tensors:
    """Return ``ct @ Df(x)``."""
    inputs = leaves_of_graph(primals)
    found = gradients(fn(*inputs), inputs, [ct.conj() for ct in cotangents])
    return [g.conj().resolve_conj() for g in found]


def jvp(fn: Function, primals: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> Tensors:
    """Return ``Df(x) @ dx``, one row of the Jacobian at a time, so that reverse mode is the reference."""
    inputs = leaves_of_graph(primals)
    out = []
    for y in fn(*inputs):
        parts = torch.view_as_real(y) if y.is_complex() else y
        moved = [_row(part, inputs, tangents) for part in parts.reshape(-1)]
        whole = torch.stack(moved).reshape(parts.shape) if moved else torch.zeros_like(parts)
        out.append(torch.view_as_complex(whole.contiguous()) if y.is_complex() else whole)
    return out


def jacobian(fn: Function, primals: Sequence[torch.Tensor]) -> list[Tensors]:
    """Return the Jacobian of a real function: for each output, a list over inputs of shape ``output + input``."""
    inputs = leaves_of_graph(primals)
    out = []
    for y in fn(*inputs):
        rows = [gradients([part], inputs, [torch.ones_like(part)]) for part in y.reshape(-1)]
        out.append(
            [torch.stack([r[i] for r in rows]).reshape((*y.shape, *inputs[i].shape)) for i in range(len(inputs))]
        )
    return out


def hessian(loss: Callable[..., torch.Tensor], primals: Sequence[torch.Tensor]) -> list[Tensors]:
    """Return the second derivatives of a real scalar function of real arguments."""
    inputs = leaves_of_graph(primals)
    value = loss(*inputs)
    first = gradients([value], inputs, [torch.ones_like(value)], again=True)
    rows = []
    for g in first:
        row = [gradients([part], inputs, [torch.ones_like(part)]) for part in g.reshape(-1)]
        rows.append([torch.stack([r[j] for r in row]).reshape((*g.shape, *x.shape)) for j, x in enumerate(inputs)])
    return rows


def directional(
    loss: Callable[..., torch.Tensor],
    primals: Sequence[torch.Tensor],
    directions: Sequence[Sequence[torch.Tensor]],
) -> torch.Tensor:
    """Return the repeated derivative of a real scalar function along the directions, one after another."""
    inputs = leaves_of_graph(primals)
    value = loss(*inputs)
    for direction in directions:
        value = inner(gradients([value], inputs, [torch.ones_like(value)], again=True), direction)
    return value.detach()


def inner(grads: Sequence[torch.Tensor], direction: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the derivative of a real value along a direction, from torch's gradient of the value."""
    return sum((g.conj() * d).real.sum() for g, d in zip(grads, direction, strict=True))


def _row(part: torch.Tensor, inputs: Tensors, tangents: Sequence[torch.Tensor]) -> torch.Tensor:
    return inner(gradients([part], inputs, [torch.ones_like(part)]), tangents)
