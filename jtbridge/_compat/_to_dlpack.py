"""`torch.utils.dlpack.to_dlpack`, a C function that torch's modes cannot intercept."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.dlpack


class _Observer(threading.local):
    """The function of this thread that is called with each tensor that the thread exports; None if there is none."""

    call: Callable[[torch.Tensor], None] | None = None


_HERE = _Observer()


@contextlib.contextmanager
def exports_to_dlpack_seen(call: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call a function with each tensor that this thread exports by `to_dlpack`, before it is exported.

    Tried on torch 2.13. A `TorchFunctionMode` intercepts `Tensor.__dlpack__`, but not `to_dlpack`. So `to_dlpack` is
    replaced once, in torch's modules: code that imported the function earlier keeps the original.
    """
    _replace_to_dlpack()
    outer, _HERE.call = _HERE.call, call
    try:
        yield
    finally:
        _HERE.call = outer


@functools.cache
def _replace_to_dlpack() -> None:
    original = torch.utils.dlpack.to_dlpack

    @functools.wraps(original)
    def to_dlpack(tensor: torch.Tensor) -> Any:
        if _HERE.call is not None:
            _HERE.call(tensor)
        return original(tensor)

    for module in (torch, torch.utils.dlpack):
        if getattr(module, "to_dlpack", None) is original:
            module.to_dlpack = to_dlpack  # type: ignore[attr-defined]
