"""Embeddings with `padding_idx`, whose row for padding has no gradient, also where torch gives it one (torch 2.13).

Under torch.vmap the tables of a batch become one table, and only in the first table the row for padding has no
gradient. Torch's forward mode ignores `padding_idx`, so its tangents would not match the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def _functional_embedding(
    input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any
) -> torch.Tensor:
    if padding_idx is None or not -len(weight) <= padding_idx < len(weight):
        return F.embedding(input, weight, padding_idx, *args, **kwargs)
    return _masked(F.embedding(input, weight, None, *args, **kwargs), input, padding_idx % len(weight))


def _embedding(
    weight: torch.Tensor, indices: torch.Tensor, padding_idx: int = -1, *args: Any, **kwargs: Any
) -> torch.Tensor:
    found = torch.embedding(weight, indices, -1, *args, **kwargs)
    return _masked(found, indices, padding_idx) if padding_idx >= 0 else found


def _masked(found: torch.Tensor, indices: torch.Tensor, padding_idx: int) -> torch.Tensor:
    return torch.where((indices == padding_idx).unsqueeze(-1), found.detach(), found)


# Functions that leave out the gradient and the tangent of the row for padding themselves.
PADDED = {F.embedding: _functional_embedding, torch.embedding: _embedding}
