"""Layer normalization over the last dimension as Cohere's models write it out, scaled by a weight.

``h = (x - mean) * rsqrt((x - mean).pow(2).mean(-1, keepdim=True) + eps)`` in float32, then ``(weight.float() * h)``,
rounded once.
"""

from __future__ import annotations

from typing import Any

import torch

from ._matcher import Match, Matcher, NoMatch
from ._operators import cast, summed, wide, with_backward
from ._rms_norm import averaged, by_normalized, match_reciprocal_rms

_aten = torch.ops.aten


def _forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x32 = wide(x)
    mean = _row_means(x32)
    away = _aten.sub.Tensor(x32, mean)
    rstd = _aten.rsqrt.default(_aten.add.Tensor(_row_means(_aten.pow.Tensor_Scalar(away, 2)), eps))
    y = cast(_aten.mul.Tensor(wide(weight), _aten.mul.Tensor(away, rstd)), x.dtype)
    return y, rstd, mean


def _row_means(x: torch.Tensor) -> torch.Tensor:
    return _aten.mean.dim(x, [-1], True)


def _backward(
    ct: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, mean: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    away = _aten.sub.Tensor(wide(x), mean)
    by_weight = summed(_aten.mul.Tensor(wide(ct), _aten.mul.Tensor(away, rstd)), list(range(x.dim() - 1)))
    by_away = by_normalized(_aten.mul.Tensor(wide(ct), wide(weight)), away, rstd)
    by_x = _aten.sub.Tensor(by_away, _row_means(by_away))
    return cast(by_x, x.dtype), cast(by_weight, weight.dtype)


def _fake(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rstd, mean = (x.new_empty((*x.shape[:-1], 1), dtype=torch.float32) for _ in range(2))
    return torch.empty_like(x), rstd, mean


centered_norm = with_backward(
    "centered_norm",
    "Tensor x, Tensor weight",
    "float eps",
    forward=_forward,
    backward=_backward,
    fake=_fake,
    differentiated=2,
    kept=2,
)


def centered_in_float32(matcher: Matcher, out: torch.Tensor, weight: Any, h: Any) -> Match:
    """Match the chain for an x in float32.

    If x was converted from half precision, this product is only a part of the chain that `centered_rounded` matches.
    """
    x, eps = _match_centered_normalized(matcher, h)
    matcher.demand(matcher.unwidened(x) is x)
    return _centered_norm_match(matcher, x, weight, eps)


def centered_rounded(matcher: Matcher, out: torch.Tensor, product: Any) -> Match:
    """Match the chain for an x in half precision, which ends with a conversion back."""
    for h, scale in matcher.both_ways(product, "mul"):
        if matcher.sees(h, "mul"):
            x32, eps = _match_centered_normalized(matcher, h)
            x = matcher.unwidened(x32)
            matcher.demand(out.dtype is x.dtype and isinstance(scale, torch.Tensor))
            return _centered_norm_match(matcher, x, matcher.unwidened(scale), eps)
    raise NoMatch


def _centered_norm_match(matcher: Matcher, x: torch.Tensor, weight: Any, eps: float) -> Match:
    matcher.demand_norm(x, weight)
    return lambda: centered_norm(x, weight, eps)[0]


def _match_centered_normalized(matcher: Matcher, h: Any) -> tuple[torch.Tensor, float]:
    """Match ``(x - mean) * rsqrt(variance + eps)`` and return x, which is in float32, and eps."""
    for away, rstd in matcher.both_ways(h, "mul"):
        if matcher.sees(rstd, "rsqrt"):
            again, eps = match_reciprocal_rms(matcher, rstd)
            return _centered(matcher, away, again), eps
    raise NoMatch


def _centered(matcher: Matcher, away: Any, again: Any) -> torch.Tensor:
    """Return the x of ``x - mean``, which the user's function may compute once or twice."""
    once = away is again
    x, mean = matcher(away, "sub", uses=1 + once)
    if not once:
        base, same = matcher(again, "sub")
        matcher.demand(base is x and same is mean)
    matcher.demand(isinstance(x, torch.Tensor) and averaged(matcher, mean, uses=2 - once) is x)
    matcher.demand(x.dtype is torch.float32)
    return x
