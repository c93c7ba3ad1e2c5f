"""Torch's fused LSTM of the CPU is not traced: its gradient cannot be batched, nor differentiated again.

Torch chooses it inside ``torch.lstm`` unless oneDNN is switched off for the whole process, which other threads would
notice: their convolutions would give other bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jtbridge._compat import lstm_in_operators


class WithoutFusedLstm(TorchFunctionMode):
    """While it is active on this thread, an LSTM is traced as the operators of its steps.

    Args:
        only_with_projections: whether only one with `proj_size` is, of which torch warns that it has no fused form.
    """

    def __init__(self, *, only_with_projections: bool = False):
        super().__init__()
        self._only_with_projections = only_with_projections

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The other overload, of packed sequences, has the sizes of batches there; torch has no fused form of it.
        if func is torch.lstm and not isinstance(args[1], torch.Tensor):
            hidden, cell = args[1]
            if hidden.shape[-1] != cell.shape[-1] or not self._only_with_projections:
                return lstm_in_operators(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
