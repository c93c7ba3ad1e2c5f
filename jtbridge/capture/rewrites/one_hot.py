"""A replacement of ``F.one_hot``. Torch traces it as a comparison, which gives zeros for a class out of range."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from jtbridge.core.dtypes import NO_INT64


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> Any:
    if num_classes <= 0:
        return NotImplemented
    hot = (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)
    outside = (tensor < 0) | (tensor >= num_classes)  # torch raises; a graph gives `NO_INT64`
    return torch.where(outside.unsqueeze(-1), NO_INT64, hot)


REPLACEMENTS = {F.one_hot: _one_hot}
