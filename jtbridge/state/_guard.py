"""Guard for traces: it restores the state that a function writes while it is traced, and raises an error.

A lazily built constant is allowed. The guard recognises a constant by three tests: the written value does not depend on
the arguments, a second run of the function changes nothing, and on example values the function has the same results
with and without the written value. The constant is kept, as when torch runs the function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from jtbridge.core.messages import warn_user
from jtbridge.core.random_numbers import with_new_seed
from jtbridge.core.signals import failures_ignored, raise_if_from_signal
from jtbridge.errors import JtbridgeError, MutationError, PurityWarning, RandomnessError

from ._comparison import same_results
from ._global_draws import GlobalDraws
from ._reachable import Change, ReachableState

Result = TypeVar("Result")
_SHOWN = 4  # changes in a message
# `.states`: the states that the guards running on this thread restore, the innermost last. `.saved`: for each guard,
# the state that its last run started from and did not change, inside of `saving_state_once`.
_RUNNING = threading.local()


@dataclasses.dataclass(eq=False)
class StateGuard:
    """Guard that runs one user function while it is traced.

    After :meth:`remember`, derivatives that are traced later see the state of that time.

    Args:
        name: the name of the function.
        roots: the function, and its static arguments with their names.
        purity: "error", "warn" or "allow": the reaction if the function writes to state, or draws from a global
            generator.
        ordered: whether the function has ordered effects: the state is then restored without an error or a warning.
        warnings_given: the warnings already given about the function.
    """

    name: str
    roots: tuple[tuple[str, Any], ...]
    purity: str = "error"
    ordered: bool = False
    warnings_given: set[str] = dataclasses.field(default_factory=set)
    _remembered: ReachableState | None = dataclasses.field(default=None, init=False)
    _drew_nothing: bool = dataclasses.field(default=False, init=False)  # whether a watched run drew nothing
    _writes: bool = dataclasses.field(default=False, init=False)  # whether an earlier run wrote more than constants
    # The functions with a `functools.cache` that stored a result of the trace.
    _cached: list[str] = dataclasses.field(default_factory=list, init=False)

    def remember(self) -> None:
        """Save the state with which the function was traced."""
        saved = getattr(_RUNNING, "saved", None) or {}
        self._remembered = saved.pop(self, None) or ReachableState(self.roots)

    def has_changed(self) -> bool:
        """Return whether the state differs from the one that was remembered."""
        known = self._remembered
        return known is not None and (known.has_written_large_tensors() or bool(known.differences()))

    def remembered_state(self) -> contextlib.AbstractContextManager[None]:
        """Return a context with the state that was remembered, instead of the present one."""
        known = self._remembered
        return contextlib.nullcontext() if known is None or not known.differences() else known.restored()

    def run(
        self,
        trial: Callable[[], Result],
        *,
        again: Callable[[], Result] | None = None,
        on_values: Callable[[], list[Any]] | None = None,
        examines: bool = False,
    ) -> Result:
        """Return the result of `trial`, which runs the function; restore the state that the function writes.

        Args:
            trial: runs the function without need for its side effects, for example to trace it.
            again: runs the function once more, on other values if `trial` computes with values; `trial` by default.
            on_values: runs the function on example values and returns its results.
            examines: whether `trial` only finds facts about the function. The state is restored without an error, which
                the trace of the function raises.

        Raises:
            MutationError: the function writes to state that it reaches. The state is restored.
            RandomnessError: the function draws from Python's or NumPy's global generator.
        """
        saved = getattr(_RUNNING, "saved", None)  # see `saving_state_once`
        before = saved.pop(self, None) if saved is not None else None
        if before is None:
            before = ReachableState(self.roots)
        if "set_default_device" in before.names and not self.ordered:
            self._report(
                MutationError,
                f"`{self.name}` calls `torch.set_default_device`, which a JAX program cannot do. Pass `device=` where "
                "the function makes tensors, or call it before.",
            )
        if places := before.without_shape():
            raise MutationError(
                f"`{self.name}` reaches `{places[0]}`, which has no shape yet: it belongs to a lazy module, which gets "
                "its shapes in its first call and cannot get them while JAX traces. Call the module, or "
                f"`{self.name}` outside of `jit`, once before."
            )
        draws = GlobalDraws(self.name, refusing=self.purity == "error" and not self.ordered)
        try:
            with (
                _starting_from(before),
                _settings_put_back_if_it_fails(),
                self._seed_kept() if "default_generator" in before.names else contextlib.nullcontext(),
            ):
                if not before.may_draw:
                    result = trial()
                elif self._drew_nothing:
                    result = draws.watched_if_needed(trial, before.restore)
                else:
                    with draws.watched():
                        result = trial()
                    self._drew_nothing = not draws.lines
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
        if examines:
            before.restore_derived()
            before.drop_traced_results()
            before.restore()
            return result
        try:
            return self._checked(result, before, draws.message, again or trial, on_values)
        except BaseException:
            before.restore()
            raise

    def refuse_cached_draws(self) -> None:
        """Refuse a function that is translated and draws, if it keeps a result in a ``functools.cache``.

        Raises:
            MutationError: there is such a result. In torch, later calls would get the numbers that the first call drew.
        """
        if self._cached and not self.ordered:
            self._report(
                MutationError,
                f"`{self.name}` draws, and calls `{self._cached[0]}`, whose cache (of `functools`) keeps a result of "
                "the trace: later calls would get the numbers of the first one, and a JAX program has no state. Call "
                f"`{self._cached[0]}` before, and pass its result as an argument.",
            )

    @contextlib.contextmanager
    def _seed_kept(self) -> Iterator[None]:
        """Raise after the block if it seeded the object `torch.default_generator`, whose methods no mode of torch sees.

        Draws of a trace do not advance this generator. Other threads may draw from it, so its state is restored only
        after a new seed.
        """
        generator = torch.default_generator
        seed, numbers = generator.initial_seed(), generator.get_state()
        try:
            yield
            if generator.initial_seed() != seed and not self.ordered:
                self._report(RandomnessError, with_new_seed(self.name))
        finally:
            if generator.initial_seed() != seed:
                generator.set_state(numbers)

    def _checked(
        self,
        result: Any,
        before: ReachableState,
        drew: str,
        again: Callable[[], Any],
        on_values: Callable[[], list[Any]] | None,
    ) -> Any:
        """Return the result of a run, and restore or refuse the state that it changed.

        Args:
            result: the result of the run.
            before: the state from which the run started.
            drew: a message about the run's draws from global generators; empty if it drew nothing.
            again: runs the function once more.
            on_values: runs the function on example values and returns its results.
        """
        before.restore_derived()
        self._cached += before.drop_traced_results()
        if drew and not self.ordered:
            before.restore()
            self._report(RandomnessError, drew)
        changes = before.differences()
        if not changes and (filled := before.new_containers()):
            if not self.ordered and not self._changes_nothing(again):
                before.restore()
                before.drop_new_results()
                self._report(MutationError, self._message(filled))
            return result
        if not changes:
            saved = getattr(_RUNNING, "saved", None)
            if saved is not None:
                saved[self] = before
            return result
        # A derivative assigns its own form of a constant that the function assigns in each call.
        is_constant = self._remembered is not None and all(change.is_form_of_constant for change in changes)
        if self.ordered or is_constant:
            before.restore()
            return result
        is_state = self._writes or any(change.depends_on_arguments for change in changes)
        is_built = not is_state and self._changes_nothing(again)
        if is_built and on_values is not None and not all(change.adds_array for change in changes):
            is_built = self._has_no_influence(before, on_values)
        if not is_built:
            self._writes = True
            before.restore()
            self._report(MutationError, self._message(changes))
        return result

    def _has_no_influence(self, before: ReachableState, on_values: Callable[[], list[Any]]) -> bool:
        """Return whether the function has the same results from the state `before` as from the present one.

        The result is True if the function fails on the example values from both states.
        """
        now = ReachableState(self.roots)
        results: list[list[Any] | None] = []
        for state in (now, before):
            state.restore()
            try:
                with _starting_from(state):
                    results.append(on_values())
            except Exception as error:  # noqa: BLE001  (the example values may not be valid arguments)
                raise_if_from_signal(error)
                results.append(None)
        before.restore()
        now.restore()
        first, second = results
        return first is second if first is None or second is None else same_results(first, second)

    @contextlib.contextmanager
    def same_constants(self, runs: list[Callable[[], Any]]) -> Iterator[None]:
        """Raise after the block if runs of the function inside the block store different values in one place.

        Args:
            runs: a list that is filled inside the block. Each entry runs one path through the function.

        Raises:
            MutationError: two paths store different values, so they are state that depends on the arguments.
        """
        before = ReachableState(self.roots)
        yield
        if len(runs) < 2 or self.ordered or not before.differences():
            return
        now = ReachableState(self.roots)
        changes: list[Change] = []
        for run in runs:
            before.restore()
            with failures_ignored(), _starting_from(before):
                run()
            changes += [each for each in now.differences() if not each.removes]
        before.restore()
        if changes:
            self._report(MutationError, self._message(changes))
        now.restore()

    def _changes_nothing(self, again: Callable[[], Any]) -> bool:
        """Return whether one more run of the function changes no state."""
        after = ReachableState(self.roots)
        try:
            with _starting_from(after):
                again()
        except Exception as error:  # noqa: BLE001  (the first run succeeded: this one fails for its state)
            raise_if_from_signal(error)
            return False
        after.restore_derived()
        return not after.differences()

    def _report(self, error: type[JtbridgeError], message: str, cause: BaseException | None = None) -> None:
        if self.purity == "error":
            raise error(message) from cause
        if self.purity == "warn" and message not in self.warnings_given:
            self.warnings_given.add(message)
            warn_user(message, PurityWarning)

    def _message(self, written: Sequence[Change | str]) -> str:
        """Return the error message for writes to state: to places, or to results of the named cached functions."""
        places = (f"what `{each}` keeps in its cache" if isinstance(each, str) else str(each) for each in written)
        names = list(dict.fromkeys(places))
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        return (
            f"`{self.name}` writes to {shown}: state from one call to the next, which a JAX program does not have. It "
            "would be written when the program is traced, not when it runs. Return the new value and pass it to the "
            'next call, or wrap with `effects="ordered"`; or, if nothing reads it, with `purity="allow"`, which leaves '
            "it unwritten."
        )


@contextlib.contextmanager
def saving_state_once() -> Iterator[None]:
    """Let successive runs of a guard on this thread share one snapshot of the state.

    Inside the block, user code runs only inside of :meth:`StateGuard.run`. State that one run left unchanged is
    therefore the state that the next run starts from, and is not saved again.
    """
    outer = getattr(_RUNNING, "saved", None)
    _RUNNING.saved = {}
    try:
        yield
    finally:
        _RUNNING.saved = outer


@contextlib.contextmanager
def _settings_put_back_if_it_fails() -> Iterator[None]:
    """Restore settings of torch if the block raises: an error of a trace may stop code before it resets them."""
    dtype = torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    except BaseException:
        if torch.get_default_dtype() is not dtype:
            torch.set_default_dtype(dtype)
        if torch.are_deterministic_algorithms_enabled() is not deterministic[0]:  # setting it imports much of torch
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        raise


@contextlib.contextmanager
def _starting_from(state: ReachableState) -> Iterator[None]:
    if not hasattr(_RUNNING, "states"):
        _RUNNING.states = []
    _RUNNING.states.append([state, False])
    try:
        yield
    finally:
        _RUNNING.states.pop()


def restore_before_next_attempt() -> None:
    """Restore the state that earlier attempts to trace the function changed, before the next attempt begins."""
    states = getattr(_RUNNING, "states", ())
    if states:
        state, is_changed = states[-1]
        if is_changed:
            state.restore()
        states[-1][1] = True


def save_values(tensor: torch.Tensor) -> None:
    """Save the values of a tensor that is state of a running function, before code gets its memory as an array."""
    for state, _ in getattr(_RUNNING, "states", ()):
        state.save_values(tensor)


NO_GUARD = StateGuard("", (), purity="allow")
