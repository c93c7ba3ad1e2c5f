"""A mode that gives the lazy zeros of autograd memory: torch 2.13 traces operators on them for no device."""

from __future__ import annotations

from typing import Any

import torch

from jtbridge._compat import TorchDispatchMode


class DenseZeros(TorchDispatchMode):
    """Traces ``torch._efficientzerotensor``, which gradients such as that of ``sgn`` return, as ``torch.zeros``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = torch.ops.aten.zeros.default if func is torch.ops.aten._efficientzerotensor.default else func
        return made(*args, **(kwargs or {}))
