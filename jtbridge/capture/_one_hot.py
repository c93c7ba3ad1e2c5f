"""``F.one_hot``: torch traces it as a comparison, in which a class that is out of range is no class at all."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from jtbridge._dtypes import NO_INT64


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> Any:
    if num_classes <= 0:
        return NotImplemented
    hot = (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)
    outside = (tensor < 0) | (tensor >= num_classes)  # torch raises; in a graph the result is no number
    return torch.where(outside.unsqueeze(-1), NO_INT64, hot)


REPLACEMENTS = {F.one_hot: _one_hot}
