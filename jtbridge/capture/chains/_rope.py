"""Rotary position embedding: ``x * cos + rotate_half(x) * sin``, where ``rotate_half((a, b)) = (-b, a)``.

Its derivative by x is the same with the other sign, so that one operator, which may be transposed, is its own gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._operators import operator
from ._steps import FLOATS, Look, Match, NoMatch

_aten = torch.ops.aten


def _turned(x: torch.Tensor, *, back: bool) -> torch.Tensor:
    """``(-b, a)`` of the halves ``(a, b)`` of the last dimension, or ``(b, -a)``."""
    half = x.shape[-1] // 2
    a, b = _aten.slice.Tensor(x, -1, 0, half), _aten.slice.Tensor(x, -1, half, 2 * half)
    return _aten.cat.default([b, _aten.neg.default(a)] if back else [_aten.neg.default(b), a], -1)


def _forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, transposed: bool) -> tuple[torch.Tensor]:
    if transposed:
        turned = _turned(_aten.mul.Tensor(x, sin), back=True)
    else:
        turned = _aten.mul.Tensor(_turned(x, back=False), sin)
    return (_aten.add.Tensor(_aten.mul.Tensor(x, cos), turned),)


def _fake(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor]:
    return (torch.empty_like(x),)


rope = operator("rope", "Tensor x, Tensor cos, Tensor sin, bool transposed", _forward, _fake, 1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, cos, sin, ctx.transposed = inputs
    ctx.save_for_backward(x if cos.requires_grad or sin.requires_grad else None, cos, sin)


def _backward(ctx: Any, ct: torch.Tensor) -> tuple[Any, ...]:
    x, cos, sin = ctx.saved_tensors
    by_x = rope(ct, cos, sin, not ctx.transposed) if ctx.needs_input_grad[0] else None
    by_cos = by_sin = None
    if ctx.needs_input_grad[1]:
        by_cos = _summed_like(_aten.mul.Tensor(ct, x), cos)
    if ctx.needs_input_grad[2]:
        turned, other = (ct, x) if ctx.transposed else (x, ct)
        by_sin = _summed_like(_aten.mul.Tensor(other, _turned(turned, back=False)), sin)
    return by_x, by_cos, by_sin, None


def _summed_like(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    dims = [i for i, size in enumerate(like.shape) if size != x.shape[i]]
    return _aten.sum.dim_IntList(x, dims, True) if dims else x


rope.register_autograd(_backward, setup_context=_save)


def embedded(look: Look, out: torch.Tensor, plain: Any, turned: Any) -> Match:
    """As models write it, of queries or keys [batch, heads, tokens, d]."""
    rotated, sin = _ordered(look, turned, lambda value: look.sees(value, "cat"))
    parts, dim = look(rotated, "cat")
    look.demand(len(parts) == 2)
    (second,) = look(parts[0], "neg")
    x, of_second = look(second, "getitem")
    base, of_first = look(parts[1], "getitem")
    look.demand(base is x and x.dim() == 4 and dim in (-1, 3))
    batch, _, tokens, d = x.shape
    look.demand(d % 2 == 0 and _is_slice(of_first, (0, None), (d // 2,)) and _is_slice(of_second, (d // 2,), (d, None)))
    _, cos = _ordered(look, plain, lambda value: value is x)
    look.demand(x.dtype in FLOATS and x.numel() > 0)
    for angle in (cos, sin):
        look.demand(isinstance(angle, torch.Tensor) and angle.dtype is x.dtype)
        look.demand(tuple(angle.shape) in ((batch, 1, tokens, d), (1, 1, tokens, d)) and angle.shape == cos.shape)
    return lambda: rope(x, cos, sin, False)


def _ordered(look: Look, product: Any, is_first: Callable[[Any], bool]) -> tuple[Any, Any]:
    """The factors of a product, the one that is looked for first."""
    for a, b in look.both_ways(product, "mul"):
        if is_first(a):
            return a, b
    raise NoMatch


def _is_slice(index: Any, starts: tuple[Any, ...], stops: tuple[Any, ...]) -> bool:
    """Whether an index is ``..., start:stop`` with one of some starts and stops."""
    if not (isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis and isinstance(index[1], slice)):
        return False
    return index[1].start in starts and index[1].stop in stops and index[1].step in (None, 1)
