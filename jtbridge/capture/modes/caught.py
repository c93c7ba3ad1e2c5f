"""A test for functions that catch exceptions which torch raises for some values.

A JAX program cannot raise: where torch would, for a singular matrix or an index out of range, its results are NaN. But
a function with ``try: torch.linalg.inv(x)`` and ``except torch.linalg.LinAlgError`` returns another result in torch.
The test raises an exception where torch may raise. If the function goes on, its result depends on values of the
arguments in a way that a trace does not show.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

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


class Place(NamedTuple):
    """Where a function calls an operator that raises for some values.

    Attributes:
        line: the file and the line.
        handlers: the exception handlers around it, the innermost first: the file and the first line of the function
            that a handler belongs to, and the position of the handler in its code.
    """

    line: str
    handlers: tuple[tuple[str, int, int], ...]


def with_different_handlers(places: Iterable[Place]) -> list[Place]:
    """Return one place for each set of handlers, which treat an exception alike wherever it is raised inside them."""
    return list({place.handlers: place for place in reversed(list(places))}.values())


class ValueDependentError(torch.linalg.LinAlgError, IndexError):
    """The exception of the test: a subclass of the exceptions that torch may raise."""


def place_that_may_raise(fn: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Place | None:
    """Return where the function calls an operator that raises for some values.

    Returns None if the operator never raises, or if no frame of the user's code between the operator and
    `run_on_fakes` or `run_on_values` is inside an exception handler, such as `try` or `with`.
    """
    if fn.namespace != "aten" or not _may_raise(schema_of(fn).name.removeprefix("aten::").rstrip("_"), args, kwargs):
        return None
    line, handlers = None, []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and (code := frame.f_code).co_name not in ("run_on_fakes", "run_on_values"):
        if not is_library(file := code.co_filename) and not file.startswith("<frozen"):
            line = line or f"{file}:{frame.f_lineno}"
            if code.co_exceptiontable and (handler := _handler(code, frame.f_lasti)) is not None:
                handlers.append((file, code.co_firstlineno, handler))
        frame = frame.f_back
    return Place(line, tuple(handlers)) if line is not None and handlers else None


@functools.lru_cache(maxsize=4096)
def _handler(code: types.CodeType, position: int) -> int | None:
    """Return the position of the exception handler around an instruction, if there is one."""
    numbers: list[int] = []
    is_continued = False
    # A number is a sequence of bytes: 6 bits each, bit 64 set if another byte follows (CPython, InternalDocs).
    for byte in code.co_exceptiontable:
        numbers = [*numbers[:-1], numbers[-1] << 6 | byte & 63] if is_continued else [*numbers, byte & 63]
        is_continued = bool(byte & 64)
    for start, length, target in zip(numbers[::4], numbers[1::4], numbers[2::4], strict=True):
        if start <= position // 2 < start + length:
            return target
    return None


def _may_raise(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in _DIVISIONS:  # a division of integers raises if the divisor, a tensor, is zero
        tensors = [x for x in args[:2] if isinstance(x, torch.Tensor)]
        is_exact = name == "div" and kwargs.get("rounding_mode") is None
        is_of_integers = not any(x.is_floating_point() or x.is_complex() for x in tensors)
        return not is_exact and is_of_integers and isinstance(args[1], torch.Tensor)
    return name in _MAY_RAISE or (name in _WITH_CHECKS and bool(kwargs.get("check_errors")))


class InjectedErrorMode(TorchDispatchMode):
    """Makes the operator at one place of the function raise, where torch may raise.

    Attributes:
        caught: whether the function continued in one of its runs after the operator raised: it returned a result, or
            reached the place again, as in a loop that retries. It did not if a handler called other operators, for
            example to examine the error, and then raised.
    """

    def __init__(self, place: Place, call: Callable[..., Any]):
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
            self.caught |= self._raised
            self._raised = True
            raise ValueDependentError(f"{func} raises for some values")
        return func(*args, **kwargs)
