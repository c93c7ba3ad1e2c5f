"""Report of the side effects of a function: :func:`jtbridge.purity`."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import datetime
import dis
import io
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from . import _rng
from ._compat import TorchDispatchMode, outside_modes, storage_id
from ._convert import to_torch
from ._pytree import flatten_output
from ._signature import ARRAY, argument_names, parameter_names, static_arguments
from ._wrap import Wrapped, as_wrapped
from ._writes import written_tensors
from .capture import draws
from .state import Change, GlobalDraws, ReachableState, WrittenValues, of_library, same

_REMEDIES = {
    "argument mutated": "Return the new value; for a tensor `wrap(..., return_mutated=True)` does.",
    "state written": 'Return the new value and pass it to the next call, or wrap with `effects="ordered"`.',
    "lazily built": "Nothing to do: it is a constant, built in the first call.",
    "state read": "It is read when JAX traces: pass it as an argument if it changes.",
    "random numbers": "Draw with torch and pass a JAX key as `rng=`, or pass the numbers as an argument.",
    "output": 'Under `jit` it runs when JAX traces: use `jax.debug.print`, or wrap with `effects="ordered"`.',
    "file": "Open it outside and pass what it holds as an argument.",
    "clock": "Under `jit` it is read when JAX traces: pass the time as an argument.",
    "input": "Ask outside and pass the answer as an argument.",
    "results differ": "Two runs on the same arguments and state gave different results: pass what they depend on.",
}
_TENSOR_REMEDY = (
    "Pass it as an argument, with `torch.func.functional_call` for a module, and wrap with `return_mutated=True`; or "
    "call `.eval()` on a module that keeps running statistics."
)
_HARMLESS = ("lazily built", "state read")
_CLOCKS = {
    *(getattr(time, name) for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time")),
    *(getattr(time, f"{name}_ns") for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time")),
    *(time.localtime, time.gmtime, time.ctime, time.strftime),
}
_STANDARD = frozenset(sys.stdlib_module_names - {"importlib", "linecache", "inspect", "tokenize"})
_QUIET = _STANDARD - {"logging", "warnings"}  # these two print and read the clock as part of their work
_DATES = {"now", "utcnow", "today"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One side effect of a function, or one read of state whose value ``jit`` freezes.

    Attributes:
        kind: "argument mutated", "state written", "lazily built", "state read", "random numbers", "output", "file",
            "clock", "input" or "results differ".
        what: the name of the state or function concerned, such as ``counter["n"]`` or ``print``.
        line: file and line of the first occurrence, such as ``"train.py:12"``; empty if the line is not known.
        remedy: how to write the function instead.
    """

    kind: str
    what: str
    line: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}{f' ({self.line})' if self.line else ''}. {self.remedy}"


@dataclasses.dataclass(frozen=True)
class PurityReport:
    """Report of :func:`purity`. Printing it gives a table.

    Attributes:
        function: the name of the function.
        findings: the side effects of the function, each once.
    """

    function: str
    findings: tuple[Finding, ...]

    @property
    def is_pure(self) -> bool:
        """Return whether the only findings are state that is read and constants that are built once."""
        return all(finding.kind in _HARMLESS for finding in self.findings)

    def of_kind(self, kind: str) -> tuple[Finding, ...]:
        """Return the findings of one kind."""
        return tuple(finding for finding in self.findings if finding.kind == kind)

    def rows(self) -> list[tuple[str, str]]:
        """Return the report as pairs of heading and text."""
        return [
            ("function", self.function),
            ("pure", "yes" if self.is_pure else "no"),
            *((finding.kind, str(finding)) for finding in self.findings),
        ]

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(heading) for heading, _ in rows)
        return "\n".join(f"{heading:<{width}}  {text}" for heading, text in rows)

    __repr__ = __str__


def purity(fn: Any, *args: Any, **kwargs: Any) -> PurityReport:
    """Run a function on copies of its arguments, and report its side effects.

    The function runs two to four times, in torch, on real values. The state that it reaches and the generators are
    restored after each run. Its output is printed, and its files are written; ``input()`` ends the run. Side effects
    inside C code, and in branches that are not taken for these arguments, are not seen. A profiler or debugger of this
    thread does not see the runs.

    Args:
        fn: a wrapped function, or a torch function.
        args, kwargs: the arguments of a call, ``rng=`` included. With ``rng=``, a function that draws with torch is
            pure.

    Returns:
        A report to print.

    Raises:
        Exception: any exception that the function raises.

    Example:
        >>> import jax.numpy as jnp, jtbridge
        >>> counter = {"n": 0}
        >>> def f(x):
        ...     counter["n"] += 1
        ...     return x * 2
        >>> report = jtbridge.purity(f, jnp.ones(3))
        >>> report.is_pure, [finding.kind for finding in report.findings if finding.kind != "state read"]
        (False, ['state written'])
    """
    return _Examination(as_wrapped(fn), args, dict(kwargs)).report()


class _Run(NamedTuple):
    """One run of the function."""

    result: list[Any]
    changes: list[Change]  # of the state that the function reaches
    parts: tuple[ReachableState, ...]  # the parts of the state and of the arguments that changed


class _InputWanted(BaseException):
    """Exception that ends a run which asks the user for input."""


class _Examination:
    """Examination of one function on one set of arguments, which collects the findings."""

    def __init__(self, wrapped: Wrapped, args: tuple, kwargs: dict[str, Any]):
        self._fn = wrapped.function
        arrays, signature, rng = wrapped.flattened(args, kwargs)
        names = argument_names(self._fn, signature)
        dtypes = wrapped.torch_dtypes(signature, names)
        self._values = [to_torch(array).clone().to(dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
        self._tensors = [value.clone() for value in self._values]
        tensors = iter(self._tensors)
        leaves = [
            next(tensors) if key is ARRAY else leaf for key, leaf in zip(signature.keys, signature.statics, strict=True)
        ]
        self._args, self._kwargs = signature.tree.unflatten(leaves)
        self._roots = [("", self._fn), *static_arguments(self._fn, signature)]
        parameters = parameter_names(getattr(self._fn, "forward", self._fn))
        positional = [parameters[i] if i < len(parameters) else f"argument {i}" for i in range(len(self._args))]
        self._containers = [*zip(positional, self._args, strict=True), *self._kwargs.items()]
        self._seed = None if rng is None else [int(x) for x in np.asarray(_rng.seed_from_key(rng))]
        self._found: dict[tuple[str, str], str] = {}  # (kind, what) -> line
        self._remedies: dict[str, str] = {}  # what -> a remedy that replaces the one of the kind
        self._watch = _Watch(self.note)
        self._name = getattr(wrapped, "__name__", type(self._fn).__name__)

    def report(self) -> PurityReport:
        """Run the function as often as the findings need, and return the report."""
        module = self._fn if isinstance(self._fn, torch.nn.Module) else getattr(self._fn, "__self__", None)
        if isinstance(module, torch.nn.Module):
            count = len([*module.parameters(), *module.buffers()])
            if count:
                self.note("state read", f"{count} parameters and buffers of `{type(module).__name__}`", "")
        with _rng.drawing_apart():
            first = self._run()
            if first is not None:
                second = self._run(first)
                is_told = any(kind in ("random numbers", "clock") for kind, _ in self._found)
                if second is not None and not is_told and not same(first.result, second.result):
                    self.note("results differ", "The result", "")
                kind = "lazily built" if first.changes and self._is_constant(first) else "state written"
                for change in first.changes:
                    self.note(kind, str(change), self._watch.lines.get(str(change), ""))
        order = list(_REMEDIES)
        found = sorted(self._found.items(), key=lambda item: order.index(item[0][0]))
        return PurityReport(
            self._name,
            tuple(Finding(kind, what, line, self._remedies.get(what, _REMEDIES[kind])) for (kind, what), line in found),
        )

    def note(self, kind: str, what: str, line: str, remedy: str | None = None) -> None:
        """Record a finding; the first known line is kept."""
        if remedy is not None:
            self._remedies[what] = remedy
        if not self._found.get((kind, what)):
            self._found[kind, what] = line

    def _run(self, before: _Run | None = None) -> _Run | None:
        """Run the function once and restore the state that it changes; return None if the function asks for input.

        With `before`, an earlier run, also find the lines that change the state which changed in that run.
        """
        drawn = GlobalDraws(self._name, refusing=False)
        lines = contextlib.nullcontext() if before is None else self._watch.lines_of(*before.parts)
        try:
            with self._put_back() as (state, arguments):
                with self._watch.calls(), drawn.watched(), lines:
                    result = self._call()
                changes, mutated = state.differences(), arguments.differences()
                parts = state.changed_part(), arguments.changed_part()
        except _InputWanted:
            return None
        finally:
            for source, line in drawn.lines.items():
                self.note("random numbers", f"{source}'s global generator", line)
        if before is not None:
            for change in mutated:
                self.note("argument mutated", f"`{change.path}`", self._watch.lines.get(str(change), ""))
        return _Run(result, changes, parts)

    def _call(self) -> list[Any]:
        with contextlib.nullcontext() if self._seed is None else _rng.seeded_by(*self._seed):
            leaves, _ = flatten_output(self._fn(*self._args, **self._kwargs))
        return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    @contextlib.contextmanager
    def _put_back(self) -> Iterator[tuple[ReachableState, ReachableState]]:
        """Yield the state and the arguments, and restore both after the block."""
        state, arguments, saved = ReachableState(self._roots), ReachableState(self._containers), WrittenValues()
        try:
            with _WriteAndDrawMode(self.note, saved, state, arguments, self._seed is not None):
                yield state, arguments
        finally:
            with outside_modes():
                saved.restore()
            state.restore()
            arguments.restore()
            with outside_modes(), torch.no_grad():
                for tensor, value in zip(self._tensors, self._values, strict=True):
                    tensor.copy_(value)

    def _is_constant(self, first: _Run) -> bool:
        """Return whether a run wrote only lazily built constants.

        On other arguments the function must write the same values, and in a further run nothing.
        """
        for tensor in self._tensors:
            if tensor.is_floating_point():
                tensor.mul_(0.5).add_(0.25)
        with contextlib.suppress(Exception):  # on other values the function may fail
            with self._put_back() as (state, _):
                self._call()
                others = {str(change): change.after for change in state.differences()}
                again = self._run()
            written = {str(change): change.after for change in first.changes}
            settled = again is not None and not again.changes
            return settled and written.keys() == others.keys() and all(same(written[k], others[k]) for k in written)
        return False


class _Watch:
    """Recorder of the calls and lines that run on this thread."""

    def __init__(self, note: Callable[[str, str, str], None]):
        self._note_line = note
        self._codes: set[types.CodeType] = set()
        self.lines: dict[str, str] = {}  # for each changed piece of state, the line that changed it

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        """Record each call inside the block."""
        outer = sys.getprofile()
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(outer)

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
            last[0] = _line(frame)
            return trace_lines

        def trace(frame: Any, event: str, _: Any) -> Any:
            return trace_lines if _is_users(frame) else None

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
        if module == "os" and code.co_qualname == "_Environ.__getitem__":
            self._note("state read", "the environment", frame)
        if not _is_users(frame) or code in self._codes or _imports(frame):
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
            raise _InputWanted
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
        """Record a side effect of the user's code: a call in that code, or in functions of the libraries `through`."""
        while frame is not None and not _is_users(frame):
            if (frame.f_globals.get("__name__") or "").partition(".")[0] not in through:
                return
            frame = frame.f_back
        if frame is not None and not _imports(frame):
            self._note_line(kind, what, _line(frame))


class _WriteAndDrawMode(TorchDispatchMode):
    """Mode that saves tensors before an operator writes to them, and records operators that write or draw."""

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
        for tensor in written_tensors(func, args, kwargs):
            self._saved.save(tensor)
            if tensor.layout is torch.strided and storage_id(tensor) in self._names:
                kind, what = self._names[storage_id(tensor)]
                self._note(kind, what, _users_line(), _TENSOR_REMEDY if kind == "state written" else None)
        generator = kwargs.get("generator")
        has_own = generator is not None and not _rng.is_seeded_generator(generator)
        if torch.Tag.nondeterministic_seeded in func.tags and draws(func, args, kwargs) and not self._has_key | has_own:
            self._note("random numbers", f"`{func}`", _users_line())
        return func(*args, **kwargs)


def _is_data(value: Any) -> bool:
    """Return whether a variable holds state: a value, container, tensor, module, or object of a user's class."""
    if isinstance(value, torch.Tensor | np.ndarray | torch.nn.Module | list | dict | set | tuple):
        return True
    if isinstance(value, int | float | complex | str | bytes):
        return True
    return value is not None and not callable(value) and not of_library(type(value).__module__)


def _is_users(frame: Any) -> bool:
    return not of_library(frame.f_globals.get("__name__") or "")


def _imports(frame: Any) -> bool:
    """Return whether a frame runs because a module is being imported."""
    while frame is not None and frame.f_globals.get("__name__") != __name__:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


def _line(frame: Any) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _users_line() -> str:
    frame: Any = sys._getframe(1)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return "" if frame is None else _line(frame)
