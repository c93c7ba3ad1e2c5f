"""Runs of a function for `purity`, on copies of its arguments and with its state restored after each run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from jtbridge._compat import outside_modes
from jtbridge.calls._wrap import Wrapped
from jtbridge.capture import HigherOrderInOperators
from jtbridge.core import random_numbers
from jtbridge.core.convert import to_torch
from jtbridge.core.pytree import flatten_output
from jtbridge.core.signals import failures_ignored
from jtbridge.core.signature import ARRAY, Fixed, argument_names, parameter_names, static_arguments
from jtbridge.errors import TranslationError
from jtbridge.state import Change, GlobalDraws, ReachableState, WrittenValues, same, same_results

from ._watch import InputWanted, TakenArrays, Watch, WriteAndDrawMode


class _ExaminationRun(NamedTuple):
    """One run of the function."""

    result: list[Any]
    changes: list[Change]  # of the state that the function reaches
    parts: tuple[ReachableState, ...]  # the parts of the state and of the arguments that changed


class Examination:
    """Examination of one function on one set of arguments, which collects the findings.

    Attributes:
        name: the name of the function.
        found: the line of each finding, by kind and name.
        remedies: by the name of a finding, a remedy that replaces the remedy of its kind.
    """

    def __init__(self, wrapped: Wrapped, args: tuple, kwargs: dict[str, Any]):
        self._fn = wrapped.runs
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
        given = [*zip(positional, self._args, strict=True), *self._kwargs.items()]
        self._containers = [(argument, value) for argument, value in given if not isinstance(value, Fixed)]
        self._seed = None if rng is None else [int(x) for x in np.asarray(random_numbers.seed_from_key(rng))]
        self.found: dict[tuple[str, str], str] = {}
        self.remedies: dict[str, str] = {}
        self._watch = Watch(self.note)
        self.name = wrapped.name

    def run(self) -> None:
        """Run the function two to four times, or once if it asks for input, and record its side effects."""
        module = self._fn if isinstance(self._fn, torch.nn.Module) else getattr(self._fn, "__self__", None)
        if isinstance(module, torch.nn.Module):
            count = len([*module.parameters(), *module.buffers()])
            if count:
                self.note("state read", f"{count} parameters and buffers of `{type(module).__name__}`", "")
        with random_numbers.drawing_apart():
            first = self._run()
            if first is not None:
                second = self._run(first)
                is_told = any(kind in ("random numbers", "clock") for kind, _ in self.found)
                if second is not None and not is_told and not same(first.result, second.result):
                    self.note("results differ", "The result", "")
                kind = "lazily built" if first.changes and self._is_constant(first) else "state written"
                for change in first.changes:
                    self.note(kind, str(change), self._watch.lines.get(str(change), ""))

    def note(self, kind: str, what: str, line: str, remedy: str | None = None) -> None:
        """Record a finding. If it is recorded more than once, keep the first line that is not empty."""
        if remedy is not None:
            self.remedies[what] = remedy
        if not self.found.get((kind, what)):
            self.found[kind, what] = line

    def _run(self, before: _ExaminationRun | None = None) -> _ExaminationRun | None:
        """Run the function once and restore the state that it changes; return None if the function asks for input.

        With `before`, an earlier run, also find the lines that change the parts that changed in that run, and record
        the arguments that are mutated.
        """
        drawn = GlobalDraws(self.name, refusing=False)
        lines = contextlib.nullcontext() if before is None else self._watch.lines_of(*before.parts)
        try:
            with self._put_back() as (state, arguments):
                with self._watch.calls(), drawn.watched(), lines:
                    result = self._call()
                changes, mutated = state.differences(), arguments.differences()
                parts = state.changed_part(), arguments.changed_part()
        except InputWanted:
            return None
        finally:
            for source, line in drawn.lines.items():
                self.note("random numbers", f"{source}'s global generator", line)
        if before is not None:
            for change in mutated:
                self.note("argument mutated", f"`{change.path}`", self._watch.lines.get(str(change), ""))
        return _ExaminationRun(result, changes, parts)

    def _call(self) -> list[Any]:
        with contextlib.nullcontext() if self._seed is None else random_numbers.seeded_by(*self._seed):
            leaves, _ = flatten_output(self._fn(*self._args, **self._kwargs))
        return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    @contextlib.contextmanager
    def _put_back(self) -> Iterator[tuple[ReachableState, ReachableState]]:
        """Yield the state and the arguments, and restore both after the block."""
        state, arguments, saved = ReachableState(self._roots), ReachableState(self._containers), WrittenValues()
        try:
            noting = WriteAndDrawMode(self.note, saved, state, arguments, self._seed is not None)
            with noting, HigherOrderInOperators(), TakenArrays(state, arguments):
                yield state, arguments
        except TranslationError:  # see `infer`
            torch.compiler.reset()
            raise
        finally:
            with outside_modes():
                saved.restore()
            state.restore()
            arguments.restore()
            with outside_modes(), torch.no_grad():
                for tensor, value in zip(self._tensors, self._values, strict=True):
                    tensor.copy_(value)

    def _is_constant(self, first: _ExaminationRun) -> bool:
        """Return whether a run wrote only lazily built constants.

        The test: with other arguments, the function writes the same values; run again with these, it writes nothing
        and returns the same results.
        """
        for tensor in self._tensors:
            if tensor.is_floating_point():
                tensor.mul_(0.5).add_(0.25)
        with failures_ignored():  # on other values the function may fail
            with self._put_back() as (state, _):
                result = self._call()
                others = {str(change): change.after for change in state.differences()}
                again = self._run()
            written = {str(change): change.after for change in first.changes}
            settled = again is not None and not again.changes and same_results(result, again.result)
            return settled and written.keys() == others.keys() and all(same(written[k], others[k]) for k in written)
        return False
