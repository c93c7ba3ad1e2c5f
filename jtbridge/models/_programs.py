"""Compiled programs of one module, as long as its Python state does not change."""

from __future__ import annotations

import collections
from typing import Any

import torch

from jtbridge.state import ReachableState

_MOST = 16


class Programs:
    """The programs used last, and the state of the module that they were compiled for.

    Attributes:
        model_state: that state; None while there is no program.
    """

    def __init__(self) -> None:
        self.model_state: ReachableState | None = None
        self._programs: collections.OrderedDict[Any, Any] = collections.OrderedDict()

    def get(self, key: Any) -> Any:
        """Return a program; None if there is none."""
        if key in self._programs:
            self._programs.move_to_end(key)
        return self._programs.get(key)

    def keep(self, key: Any, program: Any, module: torch.nn.Module) -> None:
        """Keep a program that has run: a first call may fill caches of the module."""
        if key not in self._programs:
            self.model_state = ReachableState([("", module)])
        self._programs[key] = program
        if len(self._programs) > _MOST:
            self._programs.popitem(last=False)

    def forget(self) -> None:
        self.model_state = None
        self._programs.clear()

    def __iter__(self) -> Any:
        return iter(self._programs.values())
