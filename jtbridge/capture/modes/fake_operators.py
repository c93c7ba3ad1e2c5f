"""A mode for operators that do something else on fake tensors than on real ones (torch 2.13)."""

from __future__ import annotations

from typing import Any

import torch

from jtbridge._compat import TorchDispatchMode


class FakeAsReal(TorchDispatchMode):
    """Traces such operators as operators that do the same on both.

    - The lazy zeros of autograd, which the gradient of ``sgn`` returns, are traced as zeros with memory. Torch traces
      operators on lazy zeros for no device.
    - ``native_dropout`` without training returns a copy. On a fake tensor it returns the tensor itself, so that a later
      write to one changes the other.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._efficientzerotensor.default:
            return torch.ops.aten.zeros.default(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_dropout.default and args[2] is False:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        return func(*args, **(kwargs or {}))
