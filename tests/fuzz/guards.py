"""Conditions on values under which the result of a program does not depend on the order of its sums.

A program is only kept if its guards hold: no value near a kink, a tie, a rounding boundary or a singular matrix. So
two correct implementations agree to rounding, and the tolerance of the comparison can be tight.
"""

from __future__ import annotations

import torch

MARGIN = 0.01


def away(x: torch.Tensor, *points: float) -> bool:
    """No element is near one of the points."""
    return all(bool(((x - p).abs() > MARGIN).all()) for p in points)


def below(x: torch.Tensor, bound: float) -> bool:
    """The absolute value of every element is less than `bound`."""
    return bool((x.abs() < bound).all())


def above(x: torch.Tensor, bound: float) -> bool:
    """Every element is greater than `bound`."""
    return bool((x > bound).all())


def unrounded(x: torch.Tensor) -> bool:
    """No element is near an integer or a half."""
    return bool((((2 * x) - (2 * x).round()).abs() > MARGIN).all())


def apart(x: torch.Tensor, y: torch.Tensor | float) -> bool:
    """No element of `x` is near the same element of `y`."""
    return bool(((x - y).abs() > MARGIN).all())


def distinct(x: torch.Tensor, dim: int | None = None) -> bool:
    """No two elements of `x`, or of a row of it along `dim`, are near each other."""
    x = x.reshape(-1) if dim is None else x.movedim(dim, -1) if x.ndim else x.reshape(1)
    if x.shape[-1] < 2:
        return True
    return bool((x.sort(-1).values.diff(dim=-1) > MARGIN).all())


def spread(x: torch.Tensor, *dims: int) -> bool:
    """The elements of `x` vary, along `dims` together, enough to be normalised."""
    return bool((x.std(dims or None, unbiased=False) > 0.1).all())


def conditioned(x: torch.Tensor) -> bool:
    """The matrices are far from singular."""
    return bool((torch.linalg.cond(x) < 30).all())


NAMESPACE = {f.__name__: f for f in (away, below, above, unrounded, apart, distinct, spread, conditioned)}
