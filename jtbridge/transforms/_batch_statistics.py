"""Batch normalisation with running statistics that require a gradient.

Torch refuses to run ``batch_norm`` on running statistics that require a gradient. A JAX program often differentiates
with respect to a whole dictionary of parameters and buffers, which includes the running statistics. In training the
result does not depend on the running statistics, so they get no gradient from the result. In evaluation the result is a
formula of the running statistics, which is written out here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from jtbridge.core.messages import text_of

from ._composite import channel_shape, in_order_of_torch, scaled, update_running_statistics


def is_refusal(error: Exception) -> bool:
    """Return whether `error` is torch's refusal of running statistics that require a gradient."""
    return "is not differentiable with respect to argument 'running_" in text_of(error)


def _functional_batch_norm(
    input: torch.Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    return _native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)[0]


def _native_batch_norm(
    input: torch.Tensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    if training:
        update_running_statistics(input, running_mean, running_var, momentum)
        return torch.native_batch_norm(input, weight, bias, None, None, True, momentum, eps)
    shape = channel_shape(input)
    out = (input - running_mean.reshape(shape)) * torch.rsqrt(running_var.reshape(shape) + eps)
    return scaled(out, weight, bias, shape).to(input.dtype), input.new_empty(0), input.new_empty(0)


# Functions that accept running statistics that require a gradient.
WITH_DIFFERENTIABLE_STATISTICS = {
    F.batch_norm: _functional_batch_norm,
    torch.batch_norm: in_order_of_torch(_functional_batch_norm),
    torch.native_batch_norm: _native_batch_norm,
}


def with_differentiable_statistics(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a function of torch; if torch refuses its running statistics, call the replacement from this file."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if func not in WITH_DIFFERENTIABLE_STATISTICS or not is_refusal(error):
            raise
        return WITH_DIFFERENTIABLE_STATISTICS[func](*args, **kwargs)
