"""No trace leaves anything behind: state that a function writes while it is traced is put back, and refused.

A lazily built constant is not state. It is told by running the function again: what it writes does not depend on the
arguments, and the second run changes nothing any more. It stays, as it does when torch runs the function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from jtbridge._rng import drawing_again
from jtbridge.errors import JtbridgeError, MutationError, PurityWarning, RandomnessError

from ._reachable import GLOBAL_NUMPY_RANDOM, GLOBAL_RANDOM, Change, ReachableState, names_in, same

Result = TypeVar("Result")
_SHOWN = 4  # changes in a message
# `.states`: those that the guards running on this thread put back, the innermost last. `.saved`: the state that each
# guard's last run started from and did not change, inside of `saving_state_once`.
_RUNNING = threading.local()


@dataclasses.dataclass(frozen=True, eq=False)
class StateGuard:
    """Runs one function of the user where it is traced.

    Args:
        name: of the function.
        roots: the function, and its static arguments with their names.
        purity: "error", "warn" or "allow": what happens when it writes to state, or draws from a global generator.
        ordered: whether side effects are wanted: then state is put back, and nothing is said.
        said: what was said of this function already.
    """

    name: str
    roots: tuple[tuple[str, Any], ...]
    purity: str = "error"
    ordered: bool = False
    said: set[str] = dataclasses.field(default_factory=set)

    def run(self, look: Callable[[], Result], *, again: Callable[[], Result] | None = None) -> Result:
        """The result of `look`, which runs the function.

        Args:
            look: runs the function in some way that has no use for its side effects.
            again: runs it once more, on other values if `look` computes with values. By default `look` does.

        Raises:
            MutationError: the function writes to state that it reaches. The state is as it was.
            RandomnessError: it draws from Python's or NumPy's global generator.
        """
        saved = getattr(_RUNNING, "saved", None)  # see `saving_state_once`
        before = saved.pop(self, None) if saved is not None else None
        if before is None:
            before = ReachableState(self.roots)
        draws = GlobalDraws(self.name, refusing=self.purity == "error" and not self.ordered)
        try:
            with draws.watched() if before.may_draw else contextlib.nullcontext(), _starting_from(before):
                result = look()
        except BaseException as error:
            changes = before.differences()
            before.restore()
            before.restore_derived()
            if saved is not None and not changes:
                saved[self] = before
            if draws.message and isinstance(error, Exception) and not self.ordered:
                self._report(RandomnessError, draws.message)
            if isinstance(error, MutationError) and changes and not self.ordered:
                self._report(MutationError, self._message(changes), error)
            raise
        try:
            return self._checked(result, before, draws.message, again or look)
        except JtbridgeError:
            raise
        except Exception:
            before.restore()
            raise

    def _checked(self, result: Any, before: ReachableState, drew: str, look: Callable[[], Any]) -> Any:
        """Return the result of a run, and restore or refuse the state that it changed.

        Args:
            result: of the run.
            before: the state that it started from.
            drew: what to tell of its draws from global generators; empty if it drew nothing.
            look: runs it again.
        """
        before.restore_derived()
        if drew and not self.ordered:
            before.restore()
            self._report(RandomnessError, drew)
        changes = before.differences()
        if not changes:
            saved = getattr(_RUNNING, "saved", None)
            if saved is not None:
                saved[self] = before
            return result
        if self.ordered:
            before.restore()
            return result
        if any(change.depends_on_arguments for change in changes) or not self._is_settled(look):
            before.restore()
            self._report(MutationError, self._message(changes))
        return result

    def _is_settled(self, look: Callable[[], Any]) -> bool:
        """Whether one more run changes nothing."""
        after = ReachableState(self.roots)
        try:
            with _starting_from(after):
                look()
        except Exception:  # noqa: BLE001  (it ran before: what it wrote is what makes it fail)
            return False
        after.restore_derived()
        return not after.differences()

    def _report(self, error: type[JtbridgeError], message: str, cause: BaseException | None = None) -> None:
        if self.purity == "error":
            raise error(message) from cause
        if self.purity == "warn" and message not in self.said:
            self.said.add(message)
            warnings.warn(message, PurityWarning, stacklevel=3)

    def _message(self, changes: Sequence[Change]) -> str:
        names = list(dict.fromkeys(map(str, changes)))
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        return (
            f"`{self.name}` writes to {shown}: state from one call to the next, which a JAX program does not have. It "
            "would be written when the program is traced, not when it runs. Return the new value and pass it to the "
            'next call, or wrap with `effects="ordered"`; or, if nothing reads it, with `purity="allow"`, which leaves '
            "it unwritten."
        )


@contextlib.contextmanager
def saving_state_once() -> Iterator[None]:
    """Have the guards save state once where several of their runs follow each other on this thread.

    In the block no code of the user runs but inside of :meth:`StateGuard.run`: state that one run left as it was is
    what the next one starts from.
    """
    outer = getattr(_RUNNING, "saved", None)
    _RUNNING.saved = {}
    try:
        yield
    finally:
        _RUNNING.saved = outer


@contextlib.contextmanager
def _starting_from(state: ReachableState) -> Iterator[None]:
    if not hasattr(_RUNNING, "states"):
        _RUNNING.states = []
    _RUNNING.states.append([state, False])
    try:
        yield
    finally:
        _RUNNING.states.pop()


def start_over() -> None:
    """Put back what earlier attempts to trace the function changed: the next one is about to begin."""
    states = getattr(_RUNNING, "states", ())
    if states:
        state, is_changed = states[-1]
        if is_changed:
            state.restore()
        states[-1][1] = True


NO_GUARD = StateGuard("", (), purity="allow")


class GlobalDraws:
    """Whether this thread draws from the global generators of Python and NumPy.

    Their states are shared with other threads, so a changed state does not tell who drew. While :meth:`watched`, the
    profiler of this thread alone sees each call of Python's generator, before it draws. NumPy's functions are invisible
    to it: the state is compared over the stretches of code, between two visible events, of functions that name it.

    Args:
        name: of the function that runs.
        refusing: whether to raise at the first draw, so that the generators are left alone.
    """

    def __init__(self, name: str, *, refusing: bool):
        self.lines: dict[str, str] = {}  # where it first drew: from "Python" and "NumPy"
        self._name = name
        self._refusing = refusing
        self._python: Any = None  # the states before the first draw
        self._numpy: Any = None
        self._stretch: tuple[Any, dict[str, Any]] | None = None  # a frame that may draw, and NumPy's state before it

    @property
    def message(self) -> str:
        """What to tell the user; empty if nothing was drawn."""
        return "".join(
            f"`{self._name}` draws random numbers from {source}'s global generator ({line}), which a JAX program would "
            "do once, when it is traced. Draw with torch and pass a JAX key as `rng=`, pass the numbers as an "
            'argument, or wrap with `effects="ordered"`.'
            for source, line in [*self.lines.items()][:1]
        )

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look at every call of this thread, and have the generators give again what was drawn."""
        outer = sys.getprofile()

        def profile(frame: Any, event: str, arg: Any) -> None:
            if outer is not None:
                outer(frame, event, arg)  # type: ignore[arg-type]
            self._see(frame, event, arg)

        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(outer)
            if self._python is not None:
                random.setstate(self._python)
            if self._numpy is not None:
                GLOBAL_NUMPY_RANDOM.set_state(self._numpy)

    def _see(self, frame: Any, event: str, arg: Any) -> None:
        if self._stretch is not None:
            (running, before), self._stretch = self._stretch, None
            if not same(before, _numpy_state()):
                self._numpy = self._numpy or before
                self._note("NumPy", running)
        if event == "c_call" and getattr(arg, "__self__", None) is GLOBAL_RANDOM and arg.__name__ != "getstate":
            if not self._refusing:
                self._python = self._python or random.getstate()
            self._note("Python", frame)
        # After a call, or a return to it, the code of a frame runs until the next event.
        running = frame.f_back if event == "return" else None if event == "c_call" else frame
        if running is not None and "random" in names_in(running.f_code):
            self._stretch = running, _numpy_state()

    def _note(self, source: str, frame: Any) -> None:
        while frame.f_globals.get("__name__") == "random":
            frame = frame.f_back
        self.lines.setdefault(source, f"{frame.f_code.co_filename}:{frame.f_lineno}")
        if self._refusing:
            raise RandomnessError(self.message)


def _numpy_state() -> dict[str, Any]:
    return GLOBAL_NUMPY_RANDOM.get_state(legacy=False)


class Attempt:
    """The state that a function reaches, and that of the global generators, before a run of it that may fail midway.

    Args:
        name: of the function.
        roots: the function, and its static arguments with their names.
    """

    def __init__(self, name: str, roots: Iterable[tuple[str, Any]]):
        self._name = name
        self._state = ReachableState(roots)
        self._of_torch = torch.get_rng_state()
        self._others = (random.getstate(), np.random.get_state()) if self._state.may_draw else None

    def changed(self) -> str:
        """The names of what was changed since, for a message; empty if nothing was."""
        return ", ".join([*dict.fromkeys(map(str, self._state.differences()))][:_SHOWN])

    def undo(self) -> contextlib.AbstractContextManager[None]:
        """Put everything back as it was. What runs in the context draws from where the failed run began to draw.

        Raises:
            MutationError: something was changed that cannot be put back.
        """
        if self._others is not None:
            random.setstate(self._others[0])
            np.random.set_state(self._others[1])
        self._state.restore()
        if left := self.changed():
            raise MutationError(
                f"`{self._name}` cannot be batched by torch.vmap, and in the attempt it changed {left}, which cannot "
                "be put back. Call it for each row in a loop."
            )
        return drawing_again(self._of_torch)

    def refuse_repetition(self) -> None:
        """Raise if something was changed since: a failed run before, which was not expected to, changed it as well."""
        if changed := self.changed():
            raise MutationError(
                f"`{self._name}` could not be batched by torch.vmap this time, and changed {changed} once in the "
                "attempt and then in every row. Call it for each row in a loop."
            )
