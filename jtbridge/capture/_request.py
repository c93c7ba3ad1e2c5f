"""The input and the output of inference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from jtbridge.core.array_types import ArrayType, OutputTree
from jtbridge.core.torch_state import TorchState
from jtbridge.core.traits import FunctionTraits
from jtbridge.state import NO_GUARD, StateGuard


@dataclasses.dataclass(frozen=True)
class TraceRequest:
    """A torch function, the types of its arguments and the settings to trace it under.

    Attributes:
        name: the function's name, for messages.
        call: takes the array arguments as tensors.
        shapes, dtypes: the shapes and dtypes of the arguments.
        state: torch's settings.
        seeded: whether the call has a JAX key.
        ordered: whether side effects are allowed: draws without a key and writes to closed-over state.
        output_shapes: the tree of result types that the user declared, or None.
        device: the type of the devices that the closed-over tensors lie on.
        regions: whether torch may run the operators with sizes that depend on data inside a translated program.
        guard: restores the state that a run of the function changes.
    """

    name: str
    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    state: TorchState
    seeded: bool
    ordered: bool
    output_shapes: Any | None
    device: str = "cpu"
    regions: bool = False
    guard: StateGuard = NO_GUARD

    def on_device(self, device: str) -> TraceRequest:
        """Return the request with its arguments on a device, which is also the default unless the user set another."""
        return dataclasses.replace(self, device=device, state=self.state.by_default_on(device))


@dataclasses.dataclass(frozen=True)
class Trial:
    """One strategy that inference tried, or one attempt to get a graph.

    Attributes:
        strategy: the name of the strategy, or the settings of the attempt.
        failure: why it failed or was rejected; None if it gave the result.
    """

    strategy: str
    failure: str | None = None

    def __str__(self) -> str:
        return self.strategy if self.failure is None else f"{self.strategy}: failed, {self.failure}"


@dataclasses.dataclass(frozen=True)
class AbstractResult:
    """The result types and the traits of a function.

    Attributes:
        out_types, out_tree: the types of the result's array leaves, and its tree.
        traits: the other facts of the trace, such as effects.
        trials: the strategies that were tried, in order.
    """

    out_types: tuple[ArrayType, ...]
    out_tree: OutputTree
    traits: FunctionTraits
    trials: tuple[Trial, ...] = ()
