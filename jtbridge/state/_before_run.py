"""Snapshot of state before a run that is undone if it fails midway, such as a batch that torch.vmap cannot compute."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from jtbridge.core.random_numbers import drawing_again
from jtbridge.errors import MutationError

from ._reachable import Change, ReachableState

_SHOWN = 4  # changes in a message


class StateBeforeRun:
    """Snapshot of the state that a function reaches, and of the global generators, before a run that may fail midway.

    Args:
        name: the name of the function.
        roots: the function, and its static arguments with their names.

    Attributes:
        names: the names of globals and attributes in the code that the function reaches.
    """

    def __init__(self, name: str, roots: Iterable[tuple[str, Any]]):
        self._name = name
        self._state = ReachableState(roots)
        self.names = self._state.names
        self._of_torch = torch.get_rng_state()
        self._others = (random.getstate(), np.random.get_state()) if self._state.may_draw else None

    def changed(self) -> str:
        """Return the names of the state that changed since the snapshot, for a message; empty if none did."""
        return _listed_names(self._state.differences())

    def changed_tensors(self) -> str:
        """Return the names of the tensors that were written to or replaced since the snapshot, as `changed` does."""
        return _listed_names(change for change in self._state.differences() if change.is_of_tensor)

    def undo(self) -> contextlib.AbstractContextManager[None]:
        """Restore the snapshot, and return a context in which torch draws from the generator's state in the snapshot.

        Raises:
            MutationError: the run changed state that cannot be restored.
        """
        if self._others is not None:
            random.setstate(self._others[0])
            np.random.set_state(self._others[1])
        self._state.restore()
        if left := self.changed():
            raise MutationError(
                f"`{self._name}` cannot be batched by torch.vmap, and in the attempt it changed {left}, which cannot "
                "be restored. Call it for each row in a loop."
            )
        return drawing_again(self._of_torch)

    def escaped(self) -> list[str]:
        """Return the places where the snapshot has tensors that escaped from an earlier batched run."""
        return [*dict.fromkeys(f"`{place}`" for place in self._state.escaped())][:_SHOWN]

    def refuse_escaped(self) -> None:
        """Raise if the snapshot has tensors that escaped from an earlier batched run."""
        if escaped := self.escaped():
            raise MutationError(
                f"`{self._name}` stored a tensor of the batch in {', '.join(escaped)}, "
                "which cannot be used after the call. Earlier calls stored nothing there, so the state before this one "
                "was not saved. Put the state back, and call again: the rows then run one after another."
            )

    def refuse_repetition(self) -> None:
        """Raise if the repeated run changed state: the failed attempt, made before this snapshot, changed it too."""
        if changed := self.changed():
            raise MutationError(
                f"`{self._name}` cannot be batched by torch.vmap, and changed {changed} once in the attempt and again "
                "in every row. Call it for each row in a loop."
            )


def _listed_names(changes: Iterable[Change]) -> str:
    return ", ".join([*dict.fromkeys(map(str, changes))][:_SHOWN])
