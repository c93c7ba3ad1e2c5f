"""Rotary position embedding: ``x * cos + turned(x) * sin``.

In ``turned((a, b)) = (-b, a)``, a and b are the halves of x, or neighbours: the elements at even and odd positions.
Models compute the embedding in the precision of x, so that each product is rounded, or in float32, rounded once. Llama
4 treats neighbours as complex numbers, and multiplies them by ``cos + i sin``.

The gradient of x is the embedding with the opposite rotation. One operator with a `transposed` option is therefore also
its own gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._matcher import FLOATS, Match, Matcher, NoMatch
from ._operators import cast, operator, wide

_aten = torch.ops.aten


def _turned_tensor(x: torch.Tensor, *, back: bool, interleaved: bool) -> torch.Tensor:
    """Return ``(-b, a)``, or ``(b, -a)`` if `back`, of the halves ``(a, b)`` or neighbours in the last dimension."""
    d = x.shape[-1]
    if interleaved:
        a, b = (_aten.slice.Tensor(x, -1, start, d, 2) for start in range(2))
    else:
        a, b = _aten.slice.Tensor(x, -1, 0, d // 2), _aten.slice.Tensor(x, -1, d // 2, d)
    parts = [b, _aten.neg.default(a)] if back else [_aten.neg.default(b), a]
    if interleaved:
        return _aten.view.default(_aten.stack.default(parts, -1), list(x.shape))
    return _aten.cat.default(parts, -1)


def _product_with_angle(x: torch.Tensor, angle: torch.Tensor, rounded: bool) -> torch.Tensor:
    """Multiply x by cos or sin, in the precision of x (`rounded`) or in float32."""
    return cast(_aten.mul.Tensor(x, angle), x.dtype) if rounded else _aten.mul.Tensor(wide(x), angle)


def _forward(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    transposed: bool,
    interleaved: bool,
    rounded: bool,
    rounded_back: bool,
) -> tuple[torch.Tensor]:
    if transposed:
        turned = _turned_tensor(_product_with_angle(x, sin, rounded), back=True, interleaved=interleaved)
    else:
        turned = _product_with_angle(_turned_tensor(x, back=False, interleaved=interleaved), sin, rounded)
    return (cast(_aten.add.Tensor(_product_with_angle(x, cos, rounded), turned), x.dtype),)


def _fake(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor]:
    return (torch.empty_like(x),)


rope = operator(
    "rope",
    # `rounded`: products are rounded in this operator. `rounded_back`: products are rounded in its gradient.
    "Tensor x, Tensor cos, Tensor sin, bool transposed, bool interleaved, bool rounded, bool rounded_back",
    _forward,
    _fake,
    1,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, cos, sin, *ctx.options = inputs
    ctx.save_for_backward(x if cos.requires_grad or sin.requires_grad else None, cos, sin)


def _backward(ctx: Any, ct: torch.Tensor) -> tuple[Any, ...]:
    x, cos, sin = ctx.saved_tensors
    transposed, interleaved, rounded, rounded_back = ctx.options
    by_x = by_cos = by_sin = None
    if ctx.needs_input_grad[0]:
        by_x = rope(ct, cos, sin, not transposed, interleaved, rounded_back, rounded)
    if ctx.needs_input_grad[1]:
        by_cos = _summed_like(_product_with_angle(ct, x if rounded else wide(x), rounded), cos)
    if ctx.needs_input_grad[2]:
        turned, other = (ct, x) if transposed else (x, ct)
        turned = _turned_tensor(turned, back=False, interleaved=interleaved)
        by_sin = _summed_like(_product_with_angle(other, turned if rounded else wide(turned), rounded), sin)
    return by_x, by_cos, by_sin, None, None, None, None


def _summed_like(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    dims = [i for i, size in enumerate(like.shape) if size != x.shape[i]]
    return cast(_aten.sum.dim_IntList(x, dims, True) if dims else x, like.dtype)


rope.register_autograd(_backward, setup_context=_save)


def embedded(matcher: Matcher, out: torch.Tensor, plain: Any, turned: Any) -> Match:
    """Match the chain in the precision of x, of shape [batch, heads, tokens, d] or [batch, tokens, heads, d]."""
    rotated, sin = _ordered(matcher, turned, lambda value: _is_turned(matcher, value))
    x, interleaved = _unturned(matcher, rotated)
    _, cos = _ordered(matcher, plain, lambda value: value is x)
    matcher.demand(_are_angles(x, cos, sin) and cos.dtype is sin.dtype is x.dtype)
    return lambda: rope(x, cos, sin, False, interleaved, True, True)


def through_float32(matcher: Matcher, out: torch.Tensor, total: Any) -> Match:
    """Match the chain for an x in half precision that is converted to float32, before it is turned or after."""
    plain, rotated, sin = _split_rotary_sum(matcher, total)
    if after := matcher.sees(rotated, "cast"):
        (rotated,) = matcher(rotated, "cast")
    inner, interleaved = _unturned(matcher, rotated)
    x = inner if after else matcher.unwidened(inner)
    factor, cos = _ordered(matcher, plain, lambda value: matcher.unwidened(value) is x)
    matcher.demand(factor is not x and (after or inner is not x))  # both products must be in float32
    matcher.demand(out.dtype is x.dtype and _are_angles(x, cos, sin))
    # If x is converted twice, the gradient of each conversion is rounded separately.
    return lambda: rope(x, cos, sin, False, interleaved, False, factor is not inner)


def complex_in_float32(matcher: Matcher, out: torch.Tensor, *flattened: Any) -> Match:
    """Match the chain that treats neighbours as complex numbers, for an x in float32.

    If x was converted from half precision, this is only a part of the chain that `complex_rounded` matches.
    """
    inner, angles = _of_complex(matcher, *flattened)
    matcher.demand(matcher.unwidened(inner) is inner)
    return _rotation_match(matcher, inner, angles)


def complex_rounded(matcher: Matcher, out: torch.Tensor, flat: Any) -> Match:
    """Match the chain that treats neighbours as complex numbers, for an x in half precision."""
    inner, angles = _of_complex(matcher, *matcher(flat, "flatten"))
    x = matcher.unwidened(inner)
    matcher.demand(out.dtype is x.dtype)
    return _rotation_match(matcher, x, angles)


def _of_complex(matcher: Matcher, pairs: Any, first_dim: Any, last_dim: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Match ``view_as_real(view_as_complex(pairs of x) * angles).flatten()``; return x, in float32, and the angles."""
    matcher.demand(first_dim in (-2, 3) and last_dim in (-1, 4))
    (product,) = matcher(pairs, "view_as_real")
    rotated, angles = _ordered(matcher, product, lambda value: matcher.sees(value, "view_as_complex"))
    (split,) = matcher(rotated, "view_as_complex")
    x, *_ = matcher(split, "view")
    matcher.demand(x.dim() == 4 and x.dtype is split.dtype is torch.float32)
    matcher.demand(split.shape == (*x.shape[:-1], x.shape[-1] // 2, 2))
    return x, angles


def _rotation_match(matcher: Matcher, x: torch.Tensor, angles: Any) -> Match:
    matcher.demand(isinstance(angles, torch.Tensor) and angles.dtype is torch.complex64)
    matcher.demand(x.dtype in FLOATS and x.numel() > 0 and _is_of_tokens(x, angles.shape, x.shape[-1] // 2))

    def operator() -> torch.Tensor:
        cos, sin = (part.repeat_interleave(2, -1) for part in torch.view_as_real(angles).unbind(-1))
        return rope(x, cos, sin, False, True, False, False)

    return operator


def _split_rotary_sum(matcher: Matcher, total: Any) -> tuple[Any, torch.Tensor, Any]:
    """Split a sum into the product with cos, the turned tensor, which may be converted, and sin."""
    for plain, turned in matcher.both_ways(total, "add"):
        if matcher.sees(turned, "mul"):
            for rotated, sin in matcher.both_ways(turned, "mul"):
                if isinstance(rotated, torch.Tensor) and _is_turned(matcher, matcher.unwidened(rotated)):
                    return plain, rotated, sin
    raise NoMatch


def _ordered(matcher: Matcher, product: Any, is_first: Callable[[Any], bool]) -> tuple[Any, Any]:
    """Return the two factors of a product, with the factor for which `is_first` is true as the first."""
    for a, b in matcher.both_ways(product, "mul"):
        if isinstance(a, torch.Tensor) and is_first(a):
            return a, b
    raise NoMatch


def _is_turned(matcher: Matcher, value: Any) -> bool:
    return matcher.sees(value, "cat") or matcher.sees(value, "flatten")


def _unturned(matcher: Matcher, rotated: Any) -> tuple[torch.Tensor, bool]:
    """Return the tensor that was turned, and whether its neighbours were turned instead of its halves."""
    interleaved = matcher.sees(rotated, "flatten")
    if interleaved:
        stacked, first_dim, last_dim = matcher(rotated, "flatten")
        matcher.demand(first_dim in (-2, 3) and last_dim in (-1, 4))
        parts, dim = matcher(stacked, "stack")
    else:
        parts, dim = matcher(rotated, "cat")
    matcher.demand(len(parts) == 2)
    (second,) = matcher(parts[0], "neg")
    x, of_second = matcher(second, "getitem")
    base, of_first = matcher(parts[1], "getitem")
    matcher.demand(base is x and x.dim() == 4 and x.shape[-1] % 2 == 0)
    d = x.shape[-1]
    if interleaved:
        matcher.demand(dim in (-1, 4) and _is_slice(of_first, (0, None), (d, None), (2,)))
        matcher.demand(_is_slice(of_second, (1,), (d, None), (2,)))
    else:
        matcher.demand(dim in (-1, 3) and _is_slice(of_first, (0, None), (d // 2,), (1, None)))
        matcher.demand(_is_slice(of_second, (d // 2,), (d, None), (1, None)))
    return x, interleaved


def _are_angles(x: torch.Tensor, cos: Any, sin: Any) -> bool:
    """Return whether cos and sin have a shape and dtype of angles for x.

    All heads share their angles. The heads are one of the two middle dimensions of x.
    """
    if not (isinstance(cos, torch.Tensor) and isinstance(sin, torch.Tensor)):
        return False
    floats = x.dtype in FLOATS and cos.dtype in FLOATS and sin.dtype in FLOATS
    return floats and x.numel() > 0 and cos.shape == sin.shape and _is_of_tokens(x, cos.shape, x.shape[-1])


def _is_of_tokens(x: torch.Tensor, shape: Sequence[int], last: int) -> bool:
    """Return whether a tensor of this shape can have the angles for x, with `last` angles for each token."""
    batch, one, other, _ = x.shape
    return tuple(shape) in [(rows, *middle, last) for rows in (batch, 1) for middle in ((1, other), (one, 1))]


def _is_slice(index: Any, starts: Sequence[Any], stops: Sequence[Any], steps: Sequence[Any]) -> bool:
    """Return whether an index is ``..., start:stop:step`` with one of the given starts, stops and steps."""
    if not (isinstance(index, tuple) and len(index) in (2, 4) and isinstance(index[-1], slice)):
        return False
    *leading, last = index
    ellipsis = len(leading) == 1 and leading[0] is Ellipsis
    if not ellipsis and not (len(leading) == 3 and all(_is_whole(i) for i in leading)):
        return False
    return last.start in starts and last.stop in stops and last.step in steps


def _is_whole(index: Any) -> bool:
    return isinstance(index, slice) and index.start is None and index.stop is None and index.step is None
