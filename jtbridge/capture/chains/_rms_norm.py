"""Root mean square normalization over the last dimension, scaled by a weight or not.

Models write ``h = x * rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)`` in float32, and then

- ``weight * h.to(x.dtype)``: Llama, which rounds before it scales, and T5, with ``h = x * rsqrt(...)`` of the x in half
  precision: the result is the same, but each part of the gradient is rounded;
- ``(h * weight.float()).to(x.dtype)``: torch's own ``rms_norm``, which rounds once;
- ``(h * (1 + weight.float())).to(x.dtype)``: Gemma;
- ``h.to(x.dtype)``: no weight, as part of one of the others or by itself.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F

from ._matcher import FLOATS, Match, Matcher, NoMatch
from ._operators import cast, summed, wide, with_backward

_aten = torch.ops.aten


def _forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, rounded: bool, factor_is_x: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    h, rstd = _wide_normalized(x, eps, factor_is_x)
    if rounded:
        return _aten.mul.Tensor(weight, cast(h, x.dtype)), rstd
    return cast(_aten.mul.Tensor(h, _offset_weight(weight, offset)), x.dtype), rstd


def _wide_normalized(x: torch.Tensor, eps: float, factor_is_x: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x32 = wide(x)
    mean = _aten.mean.dim(_aten.pow.Tensor_Scalar(x32, 2), [-1], True)
    rstd = _aten.rsqrt.default(_aten.add.Tensor(mean, eps))
    return _aten.mul.Tensor(x if factor_is_x else x32, rstd), rstd


def _offset_weight(weight: torch.Tensor, offset: float) -> torch.Tensor:
    return _aten.add.Tensor(wide(weight), offset) if offset else wide(weight)


def _backward(
    ct: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    eps: float,
    offset: float,
    rounded: bool,
    factor_is_x: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradients as torch's autograd does for the chain, operator by operator."""
    x32 = wide(x)
    h = _aten.mul.Tensor(x32, rstd)
    rows = list(range(x.dim() - 1))
    if rounded:
        by_weight = summed(_aten.mul.Tensor(ct, cast(h, x.dtype)), rows)
        by_h = wide(_aten.mul.Tensor(ct, weight))
    else:
        by_weight = cast(summed(_aten.mul.Tensor(wide(ct), h), rows), weight.dtype)
        by_h = _aten.mul.Tensor(wide(ct), _offset_weight(weight, offset))
    if not factor_is_x:
        return cast(by_normalized(by_h, x32, rstd), x.dtype), by_weight
    by_factor, by_base = (cast(part, x.dtype) for part in _gradient_terms(by_h, x32, rstd))
    return _aten.add.Tensor(by_factor, by_base), by_weight


def by_normalized(by_h: torch.Tensor, x32: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``x32 * rstd`` with respect to x32, where rstd is a function of the squares of x32."""
    return _aten.add.Tensor(*_gradient_terms(by_h, x32, rstd))


def _gradient_terms(by_h: torch.Tensor, x32: torch.Tensor, rstd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two terms of the gradient of ``x32 * rstd`` with respect to x32: for the factor x32, and for rstd."""
    by_rstd = _aten.sum.dim_IntList(_aten.mul.Tensor(by_h, x32), [-1], True)
    cube = _aten.pow.Tensor_Scalar(rstd, 3)
    by_mean = _aten.mul.Tensor(_aten.mul.Tensor(by_rstd, -0.5), cube)
    by_square = _aten.div.Tensor(by_mean, x32.shape[-1])
    return _aten.mul.Tensor(by_h, rstd), _aten.mul.Tensor(by_square, _aten.mul.Tensor(x32, 2.0))


def _fake(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


rms_norm = with_backward(
    "rms_norm",
    "Tensor x, Tensor weight",
    "float eps, float offset, bool rounded, bool factor_is_x",
    forward=_forward,
    backward=_backward,
    fake=_fake,
    differentiated=2,
    kept=1,
)


def _unscaled_forward(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    h, rstd = _wide_normalized(x, eps, factor_is_x=False)
    return cast(h, x.dtype), rstd


def _unscaled_backward(ct: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, eps: float) -> tuple[torch.Tensor]:
    return (cast(by_normalized(wide(ct), wide(x), rstd), x.dtype),)


unscaled_rms_norm = with_backward(
    "unscaled_rms_norm",
    "Tensor x",
    "float eps",
    forward=_unscaled_forward,
    backward=_unscaled_backward,
    fake=_fake,
    differentiated=1,
    kept=1,
)


def _rms_norm_match(
    matcher: Matcher,
    x: torch.Tensor,
    weight: Any,
    eps: float,
    *,
    offset: float = 0.0,
    rounded: bool = False,
    factor_is_x: bool = False,
) -> Match:
    matcher.demand_norm(x, weight)
    return lambda: rms_norm(x, weight, eps, offset, rounded, factor_is_x)[0]


def _unscaled_norm_match(matcher: Matcher, x: torch.Tensor, eps: float) -> Match:
    matcher.demand(x.dtype in FLOATS and x.numel() > 0)
    return lambda: unscaled_rms_norm(x, eps)[0]


def _match_rms_normalized(matcher: Matcher, h: Any) -> tuple[torch.Tensor, float]:
    """Match ``x * rsqrt(mean(x**2) + eps)`` and return x, which is in float32, and eps."""
    return _match_factors(matcher, *_factors(matcher, h))


def _factors(matcher: Matcher, h: Any) -> tuple[Any, Any]:
    for x, rstd in matcher.both_ways(h, "mul"):
        if matcher.sees(rstd, "rsqrt"):
            return x, rstd
    raise NoMatch


def _match_factors(matcher: Matcher, x: Any, rstd: Any) -> tuple[torch.Tensor, float]:
    """Match the factors x and ``rsqrt(mean(x**2) + eps)``; return x, which is in float32, and eps."""
    base, eps = match_reciprocal_rms(matcher, rstd)
    matcher.demand(base is x and x.dtype is torch.float32)
    return x, eps


def match_reciprocal_rms(matcher: Matcher, rstd: Any) -> tuple[torch.Tensor, float]:
    """Match ``rsqrt(mean(x**2) + eps)`` and return x and eps."""
    (shifted,) = matcher(rstd, "rsqrt")
    mean, eps = matcher(shifted, "add")
    (x,) = matcher(averaged(matcher, mean), "square")
    matcher.demand(isinstance(eps, float | int))
    return x, float(eps)


def averaged(matcher: Matcher, mean: Any, *, uses: int = 1) -> torch.Tensor:
    """Match ``x.mean(-1, keepdim=True)`` and return x."""
    x, dims, keepdim = matcher(mean, "mean", uses=uses)
    last = x.dim() - 1
    matcher.demand(last >= 0 and dims in (-1, last, [-1], (-1,), [last], (last,)) and keepdim is True)
    return x


def _weight_and_offset(matcher: Matcher, scale: Any) -> tuple[Any, float]:
    """Return the weight and 1 of ``1 + weight``, or the scale itself and 0 if it is not such a sum."""
    if not matcher.sees(scale, "add"):
        return scale, 0.0
    weight, one = matcher(scale, "add")
    weight, one = (one, weight) if isinstance(one, torch.Tensor) else (weight, one)
    matcher.demand(isinstance(weight, torch.Tensor) and isinstance(one, float | int) and one == 1)
    return weight, 1.0


def rounded_first(matcher: Matcher, out: torch.Tensor, weight: Any, h: Any) -> Match:
    """Match the norms of Llama and T5 in half precision."""
    (inner,) = matcher(h, "cast")
    factor, rstd = _factors(matcher, inner)
    x32, eps = match_reciprocal_rms(matcher, rstd)
    x = matcher.unwidened(x32)
    matcher.demand((factor is x32 or factor is x) and x32.dtype is torch.float32 and h.dtype is x.dtype)
    return _rms_norm_match(matcher, x, weight, eps, rounded=True, factor_is_x=factor is not x32)


def scaled_in_float32(matcher: Matcher, out: torch.Tensor, scale: Any, h: Any) -> Match:
    """Match any of the norms with a weight for an x in float32.

    If x was converted from half precision, this product is only a part of a chain that another function matches.
    """
    x, eps = _match_rms_normalized(matcher, h)
    matcher.demand(matcher.unwidened(x) is x)
    weight, offset = _weight_and_offset(matcher, scale)
    return _rms_norm_match(matcher, x, weight, eps, offset=offset)


def rounded_last(matcher: Matcher, out: torch.Tensor, product: Any) -> Match:
    """Match the norm of Gemma, and torch's norm written out, in half precision."""
    for h, scale in matcher.both_ways(product, "mul"):
        if matcher.sees(h, "mul"):
            x32, eps = _match_rms_normalized(matcher, h)
            x = matcher.unwidened(x32)
            weight, offset = _weight_and_offset(matcher, scale)
            matcher.demand(out.dtype is x.dtype and isinstance(weight, torch.Tensor))
            # The sum of 1 and the weight must be in float32.
            matcher.demand(not offset or weight.dtype is torch.float32)
            return _rms_norm_match(matcher, x, matcher.unwidened(weight), eps, offset=offset)
    raise NoMatch


def unscaled_in_float32(matcher: Matcher, out: torch.Tensor, a: Any, b: Any) -> Match:
    """Match the norm without a weight for an x in float32.

    If x was converted from half precision, this product is only a part of a chain that another function matches.
    """
    x, eps = _match_factors(matcher, a, b)
    matcher.demand(matcher.unwidened(x) is x)
    return _unscaled_norm_match(matcher, x, eps)


def unscaled_rounded(matcher: Matcher, out: torch.Tensor, product: Any) -> Match:
    """Match the norm without a weight, in half precision."""
    x32, eps = _match_rms_normalized(matcher, product)
    x = matcher.unwidened(x32)
    matcher.demand(out.dtype is x.dtype)
    return _unscaled_norm_match(matcher, x, eps)


def rms_norm_call(matcher: Matcher, *args: Any, **kwargs: Any) -> Match:
    """Match a call of ``torch.nn.functional.rms_norm``."""
    try:
        given = _SIGNATURE.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise NoMatch from error
    x, weight, eps = given["input"], given.get("weight"), given.get("eps")
    matcher.demand(isinstance(x, torch.Tensor) and x.dtype in FLOATS and x.dim() > 0)
    matcher.demand(list(given["normalized_shape"]) == [x.shape[-1]])
    eps = torch.finfo(torch.float32).eps if eps is None else float(eps)
    return _unscaled_norm_match(matcher, x, eps) if weight is None else _rms_norm_match(matcher, x, weight, eps)


_SIGNATURE = inspect.signature(F.rms_norm)
