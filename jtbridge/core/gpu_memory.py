"""Values that pass between torch and XLA on a GPU, where each of them works on a stream of its own.

Both give memory to other work of their own stream as soon as the host drops the last reference to it. DLPack orders the
work that makes a value before the work of the other that reads it. It does not order that work before the work that
gets the memory next. So a value is copied, and the stream of its owner waits for the copy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
import torch.utils.dlpack

from jtbridge._compat import plain

GPU_PLATFORMS = frozenset({"cuda", "rocm", "gpu"})  # JAX's names for GPUs


def shared_with_xla(tensor: torch.Tensor) -> jax.Array:
    """Return an array over the memory of a contiguous tensor on a GPU, for which XLA waits for torch's stream."""
    with torch.cuda.device(tensor.device):  # torch exports from the current GPU alone
        return jax.dlpack.from_dlpack(tensor)


def copied_to_xla(tensor: torch.Tensor) -> jax.Array:
    """Return an array of the values of a tensor on a GPU, in memory of XLA's own.

    XLA's later work waits for the work that torch's current stream already has. Torch's later work waits for the copy.
    """
    values = plain(tensor).contiguous()  # kept until torch waits for the copy
    array = jnp.copy(shared_with_xla(values))
    if array.size:
        torch.utils.dlpack.from_dlpack(array)
    return array


def copied_to_torch(array: jax.Array) -> torch.Tensor:
    """Return a tensor of the values of an array on a GPU, in memory of torch's own.

    Call :func:`wait_for_torch` before the array is dropped.
    """
    return torch.utils.dlpack.from_dlpack(array).clone()


def wait_for_torch(device: jax.Device) -> None:  # type: ignore[valid-type]
    """Let XLA's later work on a GPU wait for the work of torch's current stream, which may read arrays of XLA's."""
    copied_to_xla(torch.empty(1, device=torch.device("cuda", device.local_hardware_id)))
