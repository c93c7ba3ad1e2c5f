"""A test for functions that catch exceptions which torch raises for some values.

A JAX program cannot raise: where torch would, for a singular matrix or an index out of range, its results are NaN. But
a function with ``try: torch.linalg.inv(x)`` and ``except torch.linalg.LinAlgError`` returns another result in torch.
The test raises an exception where torch may raise. If the function still returns a result, the result depends on
values of the arguments in a way that a trace does not show.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from jtbridge._compat import OpOverload, TorchDispatchMode, schema_of
from jtbridge.core.library_files import is_library

_MAY_RAISE = frozenset(
    {
        "_ctc_loss",
        "_embedding_bag",
        "_embedding_bag_forward_only",
        "_linalg_check_errors",
        "bernoulli",
        "binary_cross_entropy",
        "cholesky",
        "embedding",
        "gather",
        "histc",
        "index",
        "index_add",
        "index_copy",
        "index_fill",
        "index_put",
        "index_reduce",
        "index_select",
        "masked_scatter",
        "max_unpool2d",
        "max_unpool3d",
        "multi_margin_loss",
        "multilabel_margin_loss_forward",
        "multinomial",
        "nll_loss2d_forward",
        "nll_loss_forward",
        "put",
        "repeat_interleave",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "searchsorted",
        "segment_reduce",
        "take",
    }
)
_DIVISIONS = frozenset({"div", "floor_divide", "fmod", "remainder"})
_WITH_CHECKS = frozenset({"linalg_cholesky_ex", "linalg_inv_ex", "linalg_ldl_factor_ex", "linalg_lu_factor_ex"})
MOST_PLACES = 8  # at which an exception is tried


class ValueDependentError(torch.linalg.LinAlgError, IndexError):
    """The exception of the test: a subclass of the exceptions that torch may raise."""


def place_that_may_raise(fn: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the file and line where the function calls an operator that raises for some values.

    Returns None if the operator never raises, or if no frame of the user's code between the operator and
    `run_on_fakes` or `run_on_values` has an exception handler.
    """
    if fn.namespace != "aten" or not _may_raise(schema_of(fn).name.removeprefix("aten::").rstrip("_"), args, kwargs):
        return None
    place, handled = None, False
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in ("run_on_fakes", "run_on_values"):
        if not is_library(file := frame.f_code.co_filename) and not file.startswith("<frozen"):
            place = place or f"{file}:{frame.f_lineno}"
            handled = handled or bool(frame.f_code.co_exceptiontable)
        frame = frame.f_back
    return place if handled else None


def _may_raise(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in _DIVISIONS:  # of integers by a tensor, which may be zero
        tensors = [x for x in args[:2] if isinstance(x, torch.Tensor)]
        is_exact = name == "div" and kwargs.get("rounding_mode") is None
        is_of_integers = not any(x.is_floating_point() or x.is_complex() for x in tensors)
        return not is_exact and is_of_integers and isinstance(args[1], torch.Tensor)
    return name in _MAY_RAISE or (name in _WITH_CHECKS and bool(kwargs.get("check_errors")))


class RaisingAt(TorchDispatchMode):
    """Makes operators that may raise do so at one place of the function.

    Attributes:
        caught: whether one run of the function returned a result although an operator raised.
    """

    def __init__(self, place: str, call: Callable[..., Any]):
        super().__init__()
        self.caught = False
        self._raised = False
        self._place = place
        self._call = call

    def run(self, *args: Any) -> Any:
        """Call the function, and record whether it catches the exception."""
        self._raised = False
        with self:
            out = self._call(*args)
        self.caught |= self._raised  # a run on another path may not reach the place
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if place_that_may_raise(func, args, kwargs) == self._place:
            self._raised = True
            raise ValueDependentError(f"{func} raises for some values")
        return func(*args, **kwargs)
