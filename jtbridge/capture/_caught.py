"""Exceptions that torch raises for some values, where the function catches them.

A JAX program cannot raise: where torch would, for a singular matrix or an index out of range, its results are NaN. But
``try: torch.linalg.inv(x)`` with ``except torch.linalg.LinAlgError`` goes on in torch, with other results. Such a
function is found by raising where torch may raise: if it returns a result, it depends on the values of its arguments.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from jtbridge._compat import OpOverload, TorchDispatchMode, schema_of

from ._frames import is_library

_MAY_RAISE = frozenset(
    {
        "_linalg_check_errors",
        "embedding",
        "gather",
        "index",
        "index_add",
        "index_copy",
        "index_fill",
        "index_put",
        "index_select",
        "nll_loss2d_forward",
        "nll_loss_forward",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "take",
    }
)
MOST_PLACES = 8  # at which it is tried


class ValueDependentError(torch.linalg.LinAlgError, IndexError):
    """Raised where torch may raise one of these."""


def place_that_may_raise(fn: OpOverload) -> str | None:
    """Where the function calls an operator that raises for some values; None if nothing can catch it, or it never does.

    Only frames that have exception handlers count: between the operator and what traces the function.
    """
    if fn.namespace != "aten" or schema_of(fn).name.removeprefix("aten::").rstrip("_") not in _MAY_RAISE:
        return None
    place, handled = None, False
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in ("run_on_fakes", "run_on_values"):
        if not is_library(file := frame.f_code.co_filename) and not file.startswith("<frozen"):
            place = place or f"{file}:{frame.f_lineno}"
            handled = handled or bool(frame.f_code.co_exceptiontable)
        frame = frame.f_back
    return place if handled else None


class RaisingAt(TorchDispatchMode):
    """While it is active, operators that may raise do so at one place of the function.

    Attributes:
        caught: whether the function returned a result nevertheless, in one of its runs.
    """

    def __init__(self, place: str, call: Callable[..., Any]):
        super().__init__()
        self.caught = False
        self._raised = False
        self._place = place
        self._call = call

    def run(self, *args: Any) -> Any:
        """Call the function."""
        self._raised = False
        with self:
            out = self._call(*args)
        self.caught |= self._raised  # it may go a way on which nothing is raised
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if place_that_may_raise(func) == self._place:
            self._raised = True
            raise ValueDependentError(f"{func} raises for some values")
        return func(*args, **(kwargs or {}))
