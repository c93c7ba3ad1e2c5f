"""Records the calls, lines, writes and draws on a thread while `purity` examines a function."""

from __future__ import annotations

import builtins
import contextlib
import datetime
import dis
import io
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from jtbridge._compat import DispatchMode, storage_id
from jtbridge.capture import draws, refuse_higher_order
from jtbridge.core import random_numbers
from jtbridge.core.definitions import module_of
from jtbridge.core.profilers import profiled
from jtbridge.core.writes import AS_NUMPY, written_tensors
from jtbridge.errors import JtbridgeError
from jtbridge.state import Change, ReachableState, WrittenValues, of_library

_TENSOR_REMEDY = (
    "Pass it as an argument, with `torch.func.functional_call` for a module, and wrap with `return_mutated=True`; or "
    "call `.eval()` on a module that keeps running statistics."
)
_CLOCKS = {
    *(getattr(time, name) for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time")),
    *(getattr(time, f"{name}_ns") for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time")),
    *(time.localtime, time.gmtime, time.ctime, time.strftime),
}
_STANDARD = frozenset(sys.stdlib_module_names - {"importlib", "linecache", "inspect", "tokenize"})
_QUIET = _STANDARD - {"logging", "warnings"}  # these two print and read the clock as part of their work
_DATES = {"now", "utcnow", "today"}


class InputWanted(BaseException):
    """Exception that ends a run which asks the user for input."""


class Watch:
    """Recorder of the calls and lines that run on this thread."""

    def __init__(self, note: Callable[[str, str, str], None]):
        self._note_line = note
        self._codes: set[types.CodeType] = set()
        self.lines: dict[str, str] = {}  # for each changed piece of state, the line that changed it

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        """Record each call inside the block.

        Raises:
            JtbridgeError: a profiler runs that would not go on afterwards.
        """
        with profiled(self._see) as is_seen:
            if not is_seen:
                raise JtbridgeError(
                    f"`jtbridge.purity` needs the profiler of this thread, which a `{type(sys.getprofile()).__name__}` "
                    "has: leave `torch.profiler` with `with_stack=True` before the call."
                )
            yield

    @contextlib.contextmanager
    def lines_of(self, *parts: ReachableState) -> Iterator[None]:
        """Find the lines that change these states: after each line of the user's code, compare the states."""
        last = [""]

        def check() -> None:
            for part in parts:
                for change in part.differences():
                    self.lines.setdefault(str(change), last[0])

        def trace_lines(frame: Any, event: str, _: Any) -> Any:
            check()
            last[0] = _line_of_frame(frame)
            return trace_lines

        def trace(frame: Any, event: str, _: Any) -> Any:
            return trace_lines if _is_users_frame(frame) else None

        outer = sys.gettrace()
        sys.settrace(trace)
        try:
            yield
            check()
        finally:
            sys.settrace(outer)

    def _see(self, frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            self._see_code(frame)
        elif event == "c_call":
            self._see_builtin(frame, arg)

    def _see_code(self, frame: Any) -> None:
        code, module = frame.f_code, frame.f_globals.get("__name__")
        if module == "logging" and code.co_name == "handle":
            self._note("output", "logging", frame, through=_STANDARD)
        if module == "torch.random" and code.co_name in ("manual_seed", "seed"):
            self._note("random numbers", f"`torch.{code.co_name}`", frame, through=_QUIET | {"torch"})
        if module == "os" and code.co_qualname == "_Environ.__getitem__":
            self._note("state read", "the environment", frame)
        if not _is_users_frame(frame) or code in self._codes or _imports(frame):
            return
        self._codes.add(code)
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                value, what = frame.f_globals.get(name), f"global `{name}`"
            elif instruction.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF") and name in code.co_freevars:
                value, what = frame.f_locals.get(name), f"`{name}`"
            else:
                continue
            if _is_data(value):
                line = instruction.positions.lineno if instruction.positions else frame.f_lineno
                self._note_line("state read", what, f"{code.co_filename}:{line}")

    def _see_builtin(self, frame: Any, called: Any) -> None:
        owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
        module = getattr(called, "__module__", "")
        if called is builtins.input:
            self._note("input", "`input`", frame)
            raise InputWanted
        if called is builtins.print:
            self._note("output", "`print`", frame)
        elif called is io.open:
            self._note("file", "`open`", frame, through=_STANDARD | {"numpy", "torch"})
        elif module == "time" and called in _CLOCKS:
            self._note("clock", f"`time.{name}`", frame)
        elif name in _DATES and isinstance(owner, type) and issubclass(owner, datetime.date):
            self._note("clock", f"`{owner.__name__}.{name}`", frame)
        elif name == "warn" and module == "_warnings":
            self._note("output", "`warnings.warn`", frame)
        elif name == "write" and (owner is sys.stdout or owner is sys.stderr):
            self._note("output", "`write`", frame)
        elif name == "urandom" and module == "posix":
            self._note("random numbers", "the system's generator", frame)

    def _note(self, kind: str, what: str, frame: Any, *, through: frozenset[str] = _QUIET) -> None:
        """Record a side effect if the user's code causes it, itself or through calls of the libraries `through`."""
        while frame is not None and not _is_users_frame(frame):
            if (frame.f_globals.get("__name__") or "").partition(".")[0] not in through:
                return
            frame = frame.f_back
        if frame is not None and not _imports(frame):
            self._note_line(kind, what, _line_of_frame(frame))


class TakenArrays(TorchFunctionMode):
    """Mode that saves the values of tensors in some states before code gets their memory as a writable array."""

    def __init__(self, *states: ReachableState):
        super().__init__()
        self._states = states

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in AS_NUMPY:
            for state in self._states:
                state.save_values(args[0])
        return func(*args, **(kwargs or {}))


class WriteAndDrawMode(DispatchMode):
    """Mode that saves tensors before an operator writes to them, and records operators that write or draw."""

    supports_higher_order_operators = True

    def __init__(
        self,
        note: Callable[..., None],
        saved: WrittenValues,
        state: ReachableState,
        arguments: ReachableState,
        has_key: bool,
    ):
        super().__init__()
        self._note = note
        self._saved = saved
        self._has_key = has_key
        self._names = {
            storage_id(tensor): (kind, str(Change(path, None, None)))
            for kind, reached in (("state written", state), ("argument mutated", arguments))
            for tensor, path in reached.tensors()
            if tensor.layout is torch.strided
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        refuse_higher_order(func)
        for tensor in written_tensors(func, args, kwargs):
            self._saved.save(tensor)
            if tensor.layout is torch.strided and storage_id(tensor) in self._names:
                kind, what = self._names[storage_id(tensor)]
                self._note(kind, what, _users_line(), _TENSOR_REMEDY if kind == "state written" else None)
        generator = kwargs.get("generator")
        has_own = generator is not None and not random_numbers.is_seeded_generator(generator)
        if draws(func, args, kwargs) and not self._has_key | has_own:
            self._note("random numbers", f"`{func}`", _users_line())
        return func(*args, **kwargs)


def _is_data(value: Any) -> bool:
    """Return whether a variable holds state: a value, container, tensor, module, or object of a user's class."""
    if isinstance(value, torch.Tensor | np.ndarray | torch.nn.Module | list | dict | set | tuple):
        return True
    if isinstance(value, int | float | complex | str | bytes):
        return True
    return value is not None and not callable(value) and not of_library(module_of(type(value)))


def _is_users_frame(frame: Any) -> bool:
    return not of_library(frame.f_globals.get("__name__") or "")


def _imports(frame: Any) -> bool:
    """Return whether a frame runs because a module is being imported."""
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module.startswith("jtbridge.reports."):  # the examination itself
            return False
        if module == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


def _line_of_frame(frame: Any) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _users_line() -> str:
    frame: Any = sys._getframe(1)
    while frame is not None and not _is_users_frame(frame):
        frame = frame.f_back
    return "" if frame is None else _line_of_frame(frame)
