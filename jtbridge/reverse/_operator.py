"""The torch operator that calls a JAX function, with its shapes, its batching rule and its derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from jtbridge._compat import (
    has_tangent_at_any_level,
    in_forward_mode,
    outside_dynamo,
    redispatch_below_autograd,
    single_level_allowed,
)
from jtbridge.core.jax_calls import OPERATOR
from jtbridge.errors import DifferentiationError

from ._autograd import Differentiated
from ._jax_function import JaxFunction, empty_results, find_function, tensor_types
from ._tensors import common_device

_NAME = OPERATOR.partition("::")[2]
_LIBRARY = torch.library.Library("jtbridge", "FRAGMENT")
_LIBRARY.define(f"{_NAME}(Tensor[] tensors, str function) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
JAX_CALL = torch.ops.jtbridge.jax_call.default


def call(function: JaxFunction, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Call a JAX function by the torch operator, which all transformations of torch can handle."""
    return JAX_CALL(list(tensors), function.handle)


@outside_dynamo
def _run_by_handle(tensors: Sequence[torch.Tensor], function: str) -> list[torch.Tensor]:
    return find_function(function).run(tensors)


@outside_dynamo
def _fake(tensors: Sequence[torch.Tensor], function: str) -> list[torch.Tensor]:
    found = find_function(function)
    return empty_results(found.result_types(tensor_types(tensors)), common_device(tensors, found.name))


@outside_dynamo
def _batch(info: Any, in_dims: Any, tensors: Sequence[torch.Tensor], function: str) -> tuple[Any, Any]:
    del info
    dims = in_dims[0]
    moved = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(tensors, dims, strict=True)]
    batched = find_function(function).batch(tuple(None if dim is None else 0 for dim in dims))
    results = call(batched, moved)
    return results, [0] * len(results)


@outside_dynamo
def _autograd(keyset: Any, tensors: Sequence[torch.Tensor], function: str) -> list[torch.Tensor]:
    found = find_function(function)

    def below(of: JaxFunction) -> list[torch.Tensor]:
        return redispatch_below_autograd(JAX_CALL, keyset, list(tensors), of.handle)

    records = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    # A dual tensor is never a parameter, of which a call may have many.
    duals = (x for x in tensors if not isinstance(x, torch.nn.Parameter))
    if not records and not in_forward_mode() and not any(map(has_tangent_at_any_level, duals)):
        return below(found)
    with single_level_allowed():
        return list(Differentiated.apply(found, below, call, tensor_types(tensors), *tensors))


def _refuse_batches_of_gradients(tensors: Sequence[torch.Tensor], function: str) -> list[torch.Tensor]:
    raise DifferentiationError(
        f"`{find_function(function).name}`, a JAX function, is differentiated for several cotangents or tangents at "
        "once by `torch.autograd` (`is_grads_batched=True`, or `vectorize=True` of `torch.autograd.functional`). Use "
        "`torch.func`: `vmap`, `jacrev`, `jacfwd` or `hessian`."
    )


_LIBRARY.impl(_NAME, _run_by_handle, "CompositeExplicitAutograd")
_LIBRARY.impl(_NAME, _autograd, "Autograd", with_keyset=True)
_LIBRARY.impl(_NAME, _refuse_batches_of_gradients, "Batched")
torch.library.register_fake(OPERATOR, _fake, lib=_LIBRARY)
torch.library.register_vmap(OPERATOR, _batch, lib=_LIBRARY)
