"""The origin of the nodes of a graph: which module, line and draw an operator came from.

The origin of a node is in ``node.meta["custom"]``, which torch keeps when a graph is traced again:

- ``module``: the path of the module that ran the operator.
- ``line``: file and line of the user's code.
- ``backward``: the node computes the gradient of an operator of that module and line.
- ``draw``: the number of a random operator among the draws of the function, as a tuple. The forward and its
  recomputation have the same number.
- ``launch``: the launch of a Triton kernel.
- ``jax_function``: the JAX function that the node calls, as JAX traced it. The note keeps the function alive.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from jtbridge._compat import TorchDispatchMode, autograd_place, last_traced_node_of, overload_of, running_modules
from jtbridge.capture._frames import user_line
from jtbridge.core import random_numbers
from jtbridge.core.jax_calls import HANDLES
from jtbridge.core.jax_calls import OPERATOR as JAX_CALL
from jtbridge.triton.launches import find_launch, launch_operator

from .branches import BranchOracle

_LAUNCH = overload_of(launch_operator)


def origin(node: fx.Node) -> dict[str, Any]:
    """Return the origin of a node: the notes in its ``meta["custom"]``."""
    return node.meta.get("custom") or {}


class ModulePaths:
    """The path of the running module, from the outermost module."""

    def __init__(self) -> None:
        self._base: types.FrameType | None = None  # the frame that runs the function
        self._root: torch.nn.Module | None = None
        self._names: dict[torch.nn.Module, str] = {}

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the modules that are called until the block ends."""
        self._base = sys._getframe(2)  # the frame of the `with` statement
        try:
            yield
        finally:
            self._base = None  # the frame refers to the results, which would seem to be stored

    @property
    def current(self) -> str:
        modules = running_modules(self._base)
        if not modules:
            return ""
        if modules[0] is not self._root:
            self._root = modules[0]
            root = type(self._root).__name__
            self._names = {child: f"{root}.{name}" if name else root for name, child in self._root.named_modules()}
        return self._names.get(modules[-1], type(modules[-1]).__name__)


class ProvenanceMode(TorchDispatchMode):
    """Records the origin of every new node."""

    def __init__(self, modules: ModulePaths, oracle: BranchOracle | None):
        super().__init__()
        self._modules = modules
        self._oracle = oracle
        self._draws: dict[int, int] = {}
        self._steps: dict[int, dict[str, Any]] = {}  # by the number that autograd gives a step

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        notes = self._notes()
        if torch.Tag.nondeterministic_seeded in func.tags:
            # A recomputation has the number of the draw in the forward.
            notes["draw"] = (self._draws.setdefault(random_numbers.next_draw(), len(self._draws)),)
        if self._oracle is not None and (answer := self._oracle.answer(func, args)) is not NotImplemented:
            return answer
        if func is _LAUNCH:
            notes["launch"] = find_launch(args[1])
        elif func.name() == JAX_CALL:
            notes["jax_function"] = HANDLES[args[1]].as_traced(args[0])
        out = func(*args, **(kwargs or {}))
        node = last_traced_node_of(func)
        if node is not None:
            node.meta["custom"] = notes
        return out

    def _notes(self) -> dict[str, Any]:
        """Return the origin of an operator. In the backward it is the origin of the differentiated operator."""
        step, backward = autograd_place()
        if backward:
            return {**self._steps.get(step, {"module": "", "line": ""}), "backward": True}
        notes = {"module": self._modules.current, "line": user_line()}
        self._steps.setdefault(step, notes)  # all operators of a step have the origin of its first one
        return dict(notes)
