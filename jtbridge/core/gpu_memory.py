"""Values that pass between torch and XLA on a GPU, where each library works on its own stream.

Each library reuses memory for other work on its stream as soon as the host drops the last reference to it, although the
other library may still use it. So values are copied, and the host waits until the work that uses the other library's
memory is done. A wait for torch takes 10 us. An event that DLPack passes to XLA takes 0.2 to 0.4 ms, because XLA hands
work with such an input to its own threads.
"""

from __future__ import annotations

from typing import Any

import jax
import torch
import torch.utils.dlpack

from jtbridge._compat import array_on_device, plain
from jtbridge.errors import DeviceError

from .dtypes import canonical_dtype, numpy_dtype
from .host_memory import to_canonical_numpy

GPU_PLATFORMS = frozenset({"cuda", "rocm", "gpu"})  # JAX's names for GPUs
# Largest size in bytes of a tensor that is copied to XLA through the host, which takes 0.05 ms for 64 bytes and 0.13 ms
# for 256 KB on an H100. A copy on the GPU takes 0.2 to 0.3 ms.
_BY_HOST = 1 << 18


def gpu(device: torch.device, what: str) -> jax.Device:  # type: ignore[valid-type]
    """Return JAX's device for a GPU of torch; `what` begins the error.

    Raises:
        DeviceError: JAX has no such device here.
    """
    try:
        devices = jax.local_devices(backend="gpu") if device.type == "cuda" else []
    except RuntimeError:
        devices = []
    for found in devices:
        if found.local_hardware_id == (device.index or 0):
            return found
    raise DeviceError(
        f"{what} on `{device}`, which JAX does not have here: its devices are {jax.local_devices()}. Move the tensor "
        "with `x.cpu()`, or install JAX for this device."
    )


def wait_for_torch(device: torch.device) -> None:
    """Wait until a GPU has done the work of torch's current stream, which may use XLA's memory."""
    torch.cuda.current_stream(device).synchronize()


def shared_with_torch(array: jax.Array) -> torch.Tensor:
    """Wait until the values of an array are computed, and return a tensor over its memory.

    Call :func:`wait_for_torch` before an array on a GPU is dropped.
    """
    return torch.utils.dlpack.from_dlpack(array.block_until_ready().__dlpack__())


def shared_with_xla(tensor: torch.Tensor) -> jax.Array:
    """Wait until the values of a contiguous tensor on a GPU are computed, and return an array over its memory."""
    wait_for_torch(tensor.device)
    with torch.cuda.device(tensor.device):  # torch exports only from the current GPU
        return jax.dlpack.from_dlpack(_Ready(tensor))


class _Ready:
    """A tensor for DLPack whose values are computed, so that no stream waits for them."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, **_: Any) -> Any:
        return self._tensor.__dlpack__(stream=-1)


def copied_to_xla(tensor: torch.Tensor, what: str = "A tensor is", *, committed: bool = True) -> jax.Array:
    """Copy a tensor on a GPU to an array in XLA's memory, and wait until torch has done its work for it.

    Args:
        tensor: a tensor of any shape, any strides and a dtype that JAX has. The array has JAX's canonical dtype for it.
        what: the beginning of an error about the tensor's device.
        committed: whether the array is committed to its device.
    """
    device = gpu(tensor.device, what)
    if tensor.numel() * tensor.itemsize <= _BY_HOST:
        return array_on_device(to_canonical_numpy(tensor.detach().cpu()), device, committed=committed)
    dtype = canonical_dtype(numpy_dtype(tensor.dtype, "a tensor"))
    # Torch writes the values into a new array, which may contain NaN before. It is concrete even while JAX traces.
    with jax.ensure_compile_time_eval(), jax.default_device(device), jax.debug_nans(False), jax.debug_infs(False):
        array = jax.lax.empty(tuple(tensor.shape), dtype)
    shared_with_torch(array).copy_(plain(tensor))
    wait_for_torch(tensor.device)
    return array_on_device(array, device, committed=True) if committed else array


def copied_to_torch(array: jax.Array) -> torch.Tensor:
    """Copy an array on a GPU to a tensor in torch's memory.

    Call :func:`wait_for_torch` before the array is dropped.
    """
    return shared_with_torch(array).clone()
