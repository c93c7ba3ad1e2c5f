"""The torch operator that marks, in a graph, the start of a call of a module with a state."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from jtbridge._compat import in_backward
from jtbridge.core.jax_calls import START
from jtbridge.errors import ModelError

_NAME = START.partition("::")[2]
_LIBRARY = torch.library.Library("jtbridge", "FRAGMENT")


class StateUse:
    """The function of a module in one mode, and whether a call of it that JAX has traced changes the state."""

    def __init__(self, caller: Any):
        self.caller = caller
        self.changes = False
        self.handle = f"{caller.name}#{uuid.uuid4().hex}"
        _USES[self.handle] = self

    def __deepcopy__(self, memo: Any) -> StateUse:
        return self


_USES: weakref.WeakValueDictionary[str, StateUse] = weakref.WeakValueDictionary()


def start_of_call(tensors: Sequence[torch.Tensor], use: str) -> list[torch.Tensor]:
    """Return an empty tensor as a marker, then a copy of each tensor of the state.

    A call in a graph takes the marker as an input, so a graph that repeats the call runs this operator again.
    TorchInductor would remove copies by `clone`, and the backward would read the new state.

    Args:
        tensors: the state.
        use: the handle of the function's `StateUse`.

    Raises:
        ModelError: in a backward, if calls change the state.
    """
    return torch.ops.jtbridge.start_of_call.default([x.detach() for x in tensors], use)


def recomputation_error(name: str) -> ModelError:
    """Return the error for a call in a backward that cannot repeat its first call."""
    return ModelError(
        f"`{name}` was called in a backward, such as by `torch.utils.checkpoint`. It cannot repeat its first call: "
        "a state has changed since then, such as a random key, and the result depends on it. (In `torch.compile`, each "
        "call that changes a state is refused in a backward.) Call it outside of the checkpoint, or pass the state or "
        "key as an argument."
    )


def _start(tensors: Sequence[torch.Tensor], use: str) -> list[torch.Tensor]:
    if in_backward() and use in _USES and _USES[use].changes:
        raise recomputation_error(use.partition("#")[0])
    return _marker_and_copies(tensors, use)


def _start_of_batches(info: Any, in_dims: Any, tensors: Sequence[torch.Tensor], use: str) -> tuple[Any, Any]:
    del info
    return start_of_call(tensors, use), [None, *in_dims[0]]


def _marker_and_copies(tensors: Sequence[torch.Tensor], use: str) -> list[torch.Tensor]:
    del use
    return [tensors[0].new_empty(0, dtype=torch.uint8), *[x.clone() for x in tensors]]


_LIBRARY.define(f"{_NAME}(Tensor[] tensors, str use) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl(_NAME, _start, "CompositeExplicitAutograd")
torch.library.register_fake(START, _marker_and_copies, lib=_LIBRARY)
torch.library.register_vmap(START, _start_of_batches, lib=_LIBRARY)
