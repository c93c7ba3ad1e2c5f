"""Notes that say what to do, added to torch's errors about tensors on different devices."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from .backend_names import ON_HOST
from .messages import text_of

# The text of torch's error for an operator with tensors on different devices; a convolution names the tensors' types.
_MIXED = re.compile(
    r"Expected all tensors to be on the same device"
    r"|\(torch\.cuda\..*\(torch\.(?!cuda\.)|\(torch\.(?!cuda\.).*\(torch\.cuda\."
)


def add_device_note(error: RuntimeError, inputs: Sequence[torch.Tensor]) -> None:
    """Add a note to an error about tensors on different devices, if the function's arguments are not on the CPU."""
    device = next((x.device for x in inputs if not x.is_cpu), None)
    if device is None or not _MIXED.search(text_of(error)):
        return
    error.add_note(
        f"The arguments are on `{device}`, as JAX placed them, and torch runs the function there. Move the modules and "
        f'tensors that it uses (`module.to("{device.type}")`), and make tensors there (`device=x.device`); or place '
        'the arguments on the CPU (`jax.device_put(x, jax.devices("cpu")[0])`). A function that is translated under '
        "`jax.jit` may use tensors of any device."
    )


def add_host_note(error: BaseException) -> None:
    """Add a note to an error about tensors on different devices, raised in a call with arguments from the host."""
    if isinstance(error, RuntimeError) and _MIXED.search(text_of(error)):
        error.add_note(
            f'A function with `backend="{ON_HOST}"` gets its arguments on the CPU, wherever JAX has them. One with '
            '`effects="ordered"` gets them on the device of the modules and tensors that its code names. Move the '
            'arguments inside the function, as in `model(x.to("cuda")).cpu()`.'
        )
