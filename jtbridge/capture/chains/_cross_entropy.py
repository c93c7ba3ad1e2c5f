"""Cross-entropy of rows of logits with class indices, computed in float32 for logits of any precision.

Class weights are supported without label smoothing; they have no gradient, as in torch.

The residuals of the backward are two numbers for each row: the largest logit, and the logarithm of the sum of
``exp(logit - largest)``. The logarithm of the softmax of every class is not stored.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F

from ._matcher import Match, Matcher, NoMatch
from ._operators import cast, wide, with_backward

_aten = torch.ops.aten

_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}

Maybe = torch.Tensor | None


def _forward(
    logits: torch.Tensor, target: torch.Tensor, weight: Maybe, reduction: int, ignore_index: int, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = wide(logits)
    top = _aten.amax.default(logits, [1], True)
    exponentials = _aten.exp.default(_aten.sub.Tensor(logits, top))
    log_sum = _aten.log.default(_aten.sum.dim_IntList(exponentials, [1], True))
    log_p = _log_probabilities(logits, top, log_sum)
    loss = _composite_loss(log_p, target, weight, reduction, ignore_index, smoothing)
    return loss, _aten.cat.default([top, log_sum], 1)


def _log_probabilities(logits: torch.Tensor, top: torch.Tensor, log_sum: torch.Tensor) -> torch.Tensor:
    return _aten.sub.Tensor(_aten.sub.Tensor(logits, top), log_sum)


def _composite_loss(
    log_p: torch.Tensor, target: torch.Tensor, weight: Maybe, reduction: int, ignore_index: int, smoothing: float
) -> torch.Tensor:
    """Compute the loss as torch's composite ``cross_entropy_loss`` does."""
    loss = _aten.nll_loss_forward.default(log_p, target, weight, reduction, ignore_index)[0]
    if not smoothing:
        return loss
    ignored = _aten.eq.Scalar(target, ignore_index)
    smooth = _aten.masked_fill.Scalar(_aten.neg.default(_aten.sum.dim_IntList(log_p, [1])), ignored, 0.0)
    if reduction:
        smooth = _aten.sum.default(smooth)
    if reduction == _REDUCTIONS["mean"]:
        smooth = _aten.div.Tensor(smooth, _count_not_ignored(ignored))
    smooth = _aten.mul.Tensor(smooth, smoothing / log_p.shape[1])
    return _aten.add.Tensor(_aten.mul.Tensor(loss, 1 - smoothing), smooth)


def _count_not_ignored(ignored: torch.Tensor) -> torch.Tensor:
    return _aten.sum.default(_aten.bitwise_not.default(ignored))


def _backward(
    ct: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: Maybe,
    statistics: torch.Tensor,
    reduction: int,
    ignore_index: int,
    smoothing: float,
) -> tuple[torch.Tensor]:
    top, log_sum = (_aten.slice.Tensor(statistics, 1, i, i + 1) for i in range(2))
    log_p = _log_probabilities(wide(logits), top, log_sum)
    total = _aten.nll_loss_forward.default(log_p, target, weight, reduction, ignore_index)[1]
    by_loss = _aten.mul.Tensor(ct, 1 - smoothing) if smoothing else ct
    by_p = _aten.nll_loss_backward.default(by_loss, log_p, target, weight, reduction, ignore_index, total)
    if smoothing:
        ignored = _aten.eq.Scalar(target, ignore_index)
        by_smooth = _aten.mul.Tensor(ct, smoothing / log_p.shape[1])
        if reduction == _REDUCTIONS["mean"]:
            by_smooth = _aten.div.Tensor(by_smooth, _count_not_ignored(ignored))
        rows = _aten.masked_fill.Scalar(_aten.expand.default(by_smooth, list(target.shape)), ignored, 0.0)
        by_p = _aten.add.Tensor(by_p, _aten.neg.default(_aten.unsqueeze.default(rows, 1)))
    by_logits = _aten._log_softmax_backward_data.default(by_p, log_p, 1, torch.float32)
    return (cast(by_logits, logits.dtype),)


def _fake(
    logits: torch.Tensor, target: torch.Tensor, weight: Maybe, reduction: int, ignore_index: int, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = () if reduction else tuple(target.shape)
    statistics = logits.new_empty((logits.shape[0], 2), dtype=torch.float32)
    return logits.new_empty(rows, dtype=torch.float32), statistics


def _written_out(
    logits: torch.Tensor, target: torch.Tensor, weight: Maybe, reduction: int, ignore_index: int, smoothing: float
) -> tuple[torch.Tensor]:
    """Compute the loss by the operators of torch's own implementation, which torch can differentiate."""
    log_p = _aten._log_softmax.default(wide(logits), 1, False)
    return (_composite_loss(log_p, target, weight, reduction, ignore_index, smoothing),)


cross_entropy = with_backward(
    "cross_entropy",
    "Tensor logits, Tensor target, Tensor? weight",
    "int reduction, int ignore_index, float smoothing",
    forward=_forward,
    backward=_backward,
    fake=_fake,
    differentiated=1,
    kept=1,
    written_out=_written_out,
)


def cross_entropy_call(matcher: Matcher, *args: Any, **kwargs: Any) -> Match:
    """Match a call of ``torch.nn.functional.cross_entropy``."""
    given = _bound_arguments(_CROSS_ENTROPY, args, kwargs)
    return _cross_entropy_match(matcher, given, given["input"], given["label_smoothing"])


def in_two(matcher: Matcher, *args: Any, **kwargs: Any) -> Match:
    """Match ``nll_loss`` of ``log_softmax``."""
    given = _bound_arguments(_NLL_LOSS, args, kwargs)
    logits, dim = matcher(given["input"], "log_softmax")
    matcher.demand(dim in (-1, 1))
    return _cross_entropy_match(matcher, given, logits, 0.0)


def _bound_arguments(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise NoMatch from error
    bound.apply_defaults()
    return bound.arguments


def _cross_entropy_match(matcher: Matcher, given: dict[str, Any], logits: Any, smoothing: Any) -> Match:
    """Match the loss of float32 logits; the operator takes the half-precision logits if these were converted."""
    target, ignore_index, reduction = given["target"], given["ignore_index"], given["reduction"]
    weight = given["weight"]
    matcher.demand(given["size_average"] is None and given["reduce"] is None)
    matcher.demand(isinstance(smoothing, float | int) and 0 <= smoothing <= 1 and reduction in _REDUCTIONS)
    matcher.demand(isinstance(ignore_index, int))
    matcher.demand(isinstance(logits, torch.Tensor) and isinstance(target, torch.Tensor))
    matcher.demand(logits.dim() == 2 and logits.dtype is torch.float32 and logits.numel() > 0)
    matcher.demand(target.shape == logits.shape[:1] and target.dtype is torch.int64)
    matcher.demand(weight is None or (not smoothing and _are_weights(weight, logits)))
    options = _REDUCTIONS[reduction], ignore_index, float(smoothing)
    return lambda: cross_entropy(_unwidened(matcher, logits), target, weight, *options)[0]


def _are_weights(weight: Any, logits: torch.Tensor) -> bool:
    """Return whether the weights are one constant for each class."""
    constant = isinstance(weight, torch.Tensor) and not weight.requires_grad
    return constant and weight.dtype is logits.dtype and weight.shape == logits.shape[1:]


def _unwidened(matcher: Matcher, logits: torch.Tensor) -> torch.Tensor:
    """Return the logits from before a conversion to float32, with the same reshape if one follows the conversion."""
    if matcher.sees(logits, "view"):
        base, *sizes, keywords = matcher(logits, "view", hidden=False)
        narrow = matcher.unwidened(base)
        return logits if narrow is base else narrow.reshape(*sizes, **keywords)
    return matcher.unwidened(logits)


_CROSS_ENTROPY, _NLL_LOSS = inspect.signature(F.cross_entropy), inspect.signature(F.nll_loss)
