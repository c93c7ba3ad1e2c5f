"""Modes that avoid torch's fused CPU LSTM, whose gradient can neither be batched nor differentiated again.

Torch chooses the fused LSTM inside ``torch.lstm`` unless oneDNN is switched off for the whole process. That would also
change other threads: their convolutions would give other bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jtbridge._compat import lstm_in_operators, thread_in_forward_mode
from jtbridge.capture.rewrites.fused_lstm import called


class WithoutFusedLstm(TorchFunctionMode):
    """Traces an LSTM as the operators of its steps, on this thread.

    Args:
        only_with_projections: whether to do this only for an LSTM with `proj_size`, for which torch warns that no fused
            form exists.
    """

    def __init__(self, *, only_with_projections: bool = False):
        super().__init__()
        self._only_with_projections = only_with_projections

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The overload for packed sequences has the batch sizes as `args[1]`; torch has no fused form of it.
        if func is torch.lstm and not isinstance(args[1], torch.Tensor):
            hidden, cell = args[1]
            if hidden.shape[-1] != cell.shape[-1] or not self._only_with_projections:
                return lstm_in_operators(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class FusedGradients(TorchFunctionMode):
    """Traces a recurrent layer as one operator with a gradient that is one operator too, on this thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Torch's forward mode treats the tangents of jtbridge's operators as 0.
        found = NotImplemented if thread_in_forward_mode() else called(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if found is NotImplemented else found
