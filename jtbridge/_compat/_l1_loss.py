"""`torch.nn.functional.l1_loss`, which loses its `weight` if a mode or a tensor subclass intercepts its call."""

from __future__ import annotations

import functools
from typing import Any

import torch


def keep_weight_of_l1_loss() -> None:
    """Make torch pass the weight of `l1_loss` to the modes and tensor subclasses that intercept its call.

    Tried on torch 2.13: `l1_loss` gives `handle_torch_function` the weight as one of the tensors whose classes
    matter, but not as an argument, so the loss is silently not weighted. `handle_torch_function` is replaced in the
    module of `l1_loss`, for the whole process. Torch calls it only if a mode or a tensor subclass intercepts the call.
    """
    functions: Any = torch.nn.functional
    original = functions.handle_torch_function

    @functools.wraps(original)
    def handle_torch_function(public_api: Any, relevant_args: Any, *args: Any, **kwargs: Any) -> Any:
        if public_api is functions.l1_loss and len(relevant_args) == 3:
            kwargs.setdefault("weight", relevant_args[2])
        return original(public_api, relevant_args, *args, **kwargs)

    functions.handle_torch_function = handle_torch_function
