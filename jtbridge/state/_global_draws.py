"""Draws of a function from the global generators of Python and NumPy."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, TypeVar

from jtbridge.core.profilers import profiled
from jtbridge.core.signals import raise_if_from_signal
from jtbridge.errors import RandomnessError

from ._comparison import same
from ._kinds import GLOBAL_NUMPY_RANDOM, GLOBAL_RANDOM
from ._walk import names_in

Result = TypeVar("Result")


class GlobalDraws:
    """Recorder of this thread's draws from the global generators of Python and NumPy.

    Other threads share the generators, so a changed state does not tell which thread drew. While :meth:`watched`, the
    profiler of this thread sees each call of Python's generator, before the draw. The profiler does not see NumPy's
    functions. NumPy's state is therefore compared over each stretch of code between two profiler events, if the code of
    the running function names `random`.

    Args:
        name: the name of the function that runs.
        refusing: whether to raise at the first draw, so that the generators are left alone.
    """

    def __init__(self, name: str, *, refusing: bool):
        self.lines: dict[str, str] = {}  # for "Python" and "NumPy", the line of the first draw
        self._name = name
        self._refusing = refusing
        self._python: Any = None  # the states before the first draws
        self._numpy: Any = None
        self._stretch: tuple[Any, dict[str, Any]] | None = None  # a frame that may draw, and NumPy's state before it
        # Whether a code object names `random`, by its id, because its hash is slow. The object is held to keep its id.
        self._names_random: dict[int, tuple[CodeType, bool]] = {}

    @property
    def message(self) -> str:
        """Return the error message about the first draw; empty if nothing was drawn."""
        if not self.lines:
            return ""
        source, line = next(iter(self.lines.items()))
        return (
            f"`{self._name}` draws random numbers from {source}'s global generator ({line}), which a JAX program would "
            "do once, when it is traced. Draw with torch and pass a JAX key as `rng=`, pass the numbers as an "
            'argument, or wrap with `effects="ordered"`.'
        )

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Record the draws inside the block, and afterwards restore the generators to the states before them."""
        try:
            with profiled(self._see) as is_seen, contextlib.nullcontext() if is_seen else self._compared():
                yield
        finally:
            if self._python is not None:
                random.setstate(self._python)
            if self._numpy is not None:
                GLOBAL_NUMPY_RANDOM.set_state(self._numpy)

    def watched_if_needed(self, trial: Callable[[], Result], restore_before_next_attempt: Callable[[], None]) -> Result:
        """Return the result of `trial`; if a generator has changed, run it again and record the draws.

        Use it for a function that drew nothing in an earlier run: the profiler, which records draws, makes a run
        several times slower.

        Args:
            trial: runs the function.
            restore_before_next_attempt: restores the state from which the function runs.
        """
        python, numpy = random.getstate(), _numpy_state()
        failure: Exception | None = None
        result: Any = None
        try:
            result = trial()
        except Exception as error:  # noqa: BLE001  (raised below, or again by the next run)
            raise_if_from_signal(error)
            failure = error
        if random.getstate() == python and same(numpy, _numpy_state()):
            if failure is not None:
                raise failure
            return result
        restore_before_next_attempt()
        try:
            with self.watched():
                return trial()
        finally:
            if "Python" in self.lines:
                random.setstate(python)
            if "NumPy" in self.lines:
                GLOBAL_NUMPY_RANDOM.set_state(numpy)

    def _see(self, frame: Any, event: str, arg: Any) -> None:
        if self._stretch is not None:
            (running, before), self._stretch = self._stretch, None
            if not same(before, _numpy_state()):
                self._numpy = self._numpy or before
                self._note("NumPy", running)
        if event == "c_call":
            if getattr(arg, "__self__", None) is GLOBAL_RANDOM and arg.__name__ != "getstate":
                if not self._refusing:
                    self._python = self._python or random.getstate()
                self._note("Python", frame)
            return
        # Until the next event, Python code runs in the called frame after a call, in the calling frame after a return.
        running = frame.f_back if event == "return" else frame
        if running is None:
            return
        code = running.f_code
        known = self._names_random.get(id(code))
        if known is None:
            known = self._names_random[id(code)] = (code, "random" in names_in(code))
        if known[1]:
            self._stretch = running, _numpy_state()

    @contextlib.contextmanager
    def _compared(self) -> Iterator[None]:
        """Record draws by the states of the generators before and after the block: a profiler hides the calls."""
        python, numpy = random.getstate(), _numpy_state()
        try:
            yield
        finally:
            if random.getstate() != python:
                self._python = python
                self._note("Python", None)
            if not same(numpy, _numpy_state()):
                self._numpy = numpy
                self._note("NumPy", None)

    def _note(self, source: str, frame: Any) -> None:
        while frame is not None and frame.f_globals.get("__name__") == "random":
            frame = frame.f_back
        line = "a profiler hides the line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self.lines.setdefault(source, line)
        if self._refusing:
            raise RandomnessError(self.message)


def _numpy_state() -> dict[str, Any]:
    return GLOBAL_NUMPY_RANDOM.get_state(legacy=False)
