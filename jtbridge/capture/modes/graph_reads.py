"""A mode that detects whether a function reads the autograd graph, or hooks into it.

Torch's forward mode has no such graph: a hook is never called, and ``x.requires_grad`` is false. So derivatives of such
a function use reverse mode alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jtbridge.core.inner_autograd import HOOKING

_READS = HOOKING | frozenset(
    {
        torch.Tensor.retain_grad,
        torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        torch.Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
        torch.Tensor.output_nr.__get__,  # type: ignore[attr-defined]
    }
)


class GraphReads(TorchFunctionMode):
    """Mode that records whether a function uses the autograd graph.

    Attributes:
        found: whether the function read the graph or hooked into it.
        hooks: whether the function hooked into the graph, or may have done so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False
        self.hooks = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or func in _READS
        self.hooks = self.hooks or func in HOOKING
        return func(*args, **(kwargs or {}))
