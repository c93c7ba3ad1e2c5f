"""A cache of compiled programs of one module, cleared when its Python state or torch's global hooks change."""

from __future__ import annotations

import collections
from typing import Any

import torch

from jtbridge._compat import global_module_hooks
from jtbridge.state import ReachableState

_MAX_PROGRAMS = 16


class Programs:
    """The most recently used programs."""

    def __init__(self) -> None:
        self._model_state: ReachableState | None = None  # the state that the programs were compiled for
        self._programs: collections.OrderedDict[Any, Any] = collections.OrderedDict()

    def get(self, key: Any) -> Any:
        """Return a stored program; None if there is none, or if the module's state has changed since it was stored."""
        if self._model_state is not None and self._model_state.differences():
            self._model_state = None
            self._programs.clear()
        if key in self._programs:
            self._programs.move_to_end(key)
        return self._programs.get(key)

    def keep(self, key: Any, program: Any, module: torch.nn.Module) -> None:
        """Store a program after its first run, with the module's state, which the first run may have changed."""
        if key not in self._programs:
            self._model_state = ReachableState([("", module), *global_module_hooks().items()])
        self._programs[key] = program
        if len(self._programs) > _MAX_PROGRAMS:
            self._programs.popitem(last=False)
