"""The torch operator that calls a JAX function, with its shapes, its batching rule and its derivatives."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from jtbridge._compat import in_backward, in_forward_mode, redispatch_below_autograd, single_level_allowed
from jtbridge.core.jax_calls import OPERATOR, START
from jtbridge.errors import DifferentiationError, ModelError

from ._autograd import Differentiated
from ._jax_function import JaxFunction, empty_results, find, tensor_types
from ._tensors import common_device

_NAME = OPERATOR.partition("::")[2]
_LIBRARY = torch.library.Library("jtbridge", "FRAGMENT")
_LIBRARY.define(f"{_NAME}(Tensor[] tensors, str function) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
JAX_CALL = torch.ops.jtbridge.jax_call.default


def call(function: JaxFunction, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Call a JAX function by the operator, so that every transformation of torch sees the call."""
    return JAX_CALL(list(tensors), function.handle)


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
    """Return an empty tensor that a call in a graph takes, so that a graph which repeats the call computes it again.

    Copies of the state follow. TorchInductor removes copies by `clone`, and the backward would read the new state.

    Args:
        tensors: the state.
        use: the handle of the function's `StateUse`.

    Raises:
        ModelError: in a backward, if calls change the state.
    """
    return torch.ops.jtbridge.start_of_call.default([x.detach() for x in tensors], use)


def refusal_of_recomputation(name: str) -> ModelError:
    return ModelError(
        f"`{name}` was called in a backward, as by `torch.utils.checkpoint`. It cannot repeat its first call, because "
        "a state has changed since then, such as a random key, and the result depends on it. (In `torch.compile`, each "
        "call that changes a state is refused in a backward.) Call it outside of the checkpoint, or pass the state or "
        "key as an argument."
    )


def _start(tensors: Sequence[torch.Tensor], use: str) -> list[torch.Tensor]:
    if in_backward() and use in _USES and _USES[use].changes:
        raise refusal_of_recomputation(use.partition("#")[0])
    return _no_values(tensors, use)


def _start_of_batches(info: Any, in_dims: Any, tensors: Sequence[torch.Tensor], use: str) -> tuple[Any, Any]:
    del info
    return start_of_call(tensors, use), [None, *in_dims[0]]


def _no_values(tensors: Sequence[torch.Tensor], use: str) -> list[torch.Tensor]:
    del use
    return [tensors[0].new_empty(0, dtype=torch.uint8), *[x.clone() for x in tensors]]


def _run(tensors: Sequence[torch.Tensor], function: str) -> list[torch.Tensor]:
    return find(function).run(tensors)


def _fake(tensors: Sequence[torch.Tensor], function: str) -> list[torch.Tensor]:
    found = find(function)
    return empty_results(found.result_types(tensor_types(tensors)), common_device(tensors, found.name))


def _batch(info: Any, in_dims: Any, tensors: Sequence[torch.Tensor], function: str) -> tuple[Any, Any]:
    del info
    dims = in_dims[0]
    moved = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(tensors, dims, strict=True)]
    batched = find(function).batch(tuple(None if dim is None else 0 for dim in dims))
    results = call(batched, moved)
    return results, [0] * len(results)


def _autograd(keyset: Any, tensors: Sequence[torch.Tensor], function: str) -> list[torch.Tensor]:
    found = find(function)

    def below(of: JaxFunction) -> list[torch.Tensor]:
        return redispatch_below_autograd(JAX_CALL, keyset, list(tensors), of.handle)

    records = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if not records and not in_forward_mode():
        return below(found)
    with single_level_allowed():
        return list(Differentiated.apply(found, below, call, tensor_types(tensors), *tensors))


def _refuse_batches_of_gradients(tensors: Sequence[torch.Tensor], function: str) -> list[torch.Tensor]:
    raise DifferentiationError(
        f"`{find(function).name}`, a JAX function, is differentiated for several cotangents or tangents at once by "
        "`torch.autograd` (`is_grads_batched=True`, or `vectorize=True` of `torch.autograd.functional`). Use "
        "`torch.func`: `vmap`, `jacrev`, `jacfwd` or `hessian`."
    )


_LIBRARY.define(
    f"{START.partition('::')[2]}(Tensor[] tensors, str use) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,)
)
_LIBRARY.impl(START.partition("::")[2], _start, "CompositeExplicitAutograd")
torch.library.register_fake(START, _no_values, lib=_LIBRARY)
torch.library.register_vmap(START, _start_of_batches, lib=_LIBRARY)
_LIBRARY.impl(_NAME, _run, "CompositeExplicitAutograd")
_LIBRARY.impl(_NAME, _autograd, "Autograd", with_keyset=True)
_LIBRARY.impl(_NAME, _refuse_batches_of_gradients, "Batched")
torch.library.register_fake(OPERATOR, _fake, lib=_LIBRARY)
torch.library.register_vmap(OPERATOR, _batch, lib=_LIBRARY)
