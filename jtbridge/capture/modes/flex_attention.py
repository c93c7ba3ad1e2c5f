"""`flex_attention` as operators on the whole matrix of scores: products, the user's functions and a softmax."""

from __future__ import annotations

import math
from typing import Any

import torch

from jtbridge._compat import flex_attention_scores


def attention_in_operators(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any, block_mask: tuple, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the result, and the log-sum-exp and the greatest score of each row, both divided by ``log(2)``.

    For a fully masked row, the result is 0, and the other two are -inf.
    """
    groups = query.shape[1] // key.shape[1]
    if key.shape[0] not in (1, query.shape[0]):
        raise ValueError(
            f"`flex_attention` got a `key` of batch size {key.shape[0]}, expected {query.shape[0]} as in `query`, or 1."
        )
    key, value = (x.repeat_interleave(groups, dim=1).expand(query.shape[0], -1, -1, -1) for x in (key, value))
    scores = flex_attention_scores(query, key, value, score_mod, block_mask, *rest)
    is_empty = (scores == -math.inf).all(-1)
    # The derivatives of softmax and logsumexp are NaN where all scores are -inf, also if the cotangent is 0.
    finite = scores.masked_fill(is_empty.unsqueeze(-1), 0.0)
    out = finite.softmax(-1).masked_fill(is_empty.unsqueeze(-1), 0.0).to(query.dtype) @ value.to(query.dtype)
    log_sum = finite.logsumexp(-1).masked_fill(is_empty, -math.inf)
    return _laid_out_like(query, out), log_sum / math.log(2), scores.amax(-1) / math.log(2)


def _laid_out_like(query: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return `out` in the order of dimensions that `query` has in memory: the caller may view the result."""
    order = [*sorted(range(3), key=query.stride, reverse=True), 3]
    inverse = [order.index(dimension) for dimension in range(4)]
    return out.permute(order).contiguous().permute(inverse)
