"""Values that pass between torch and XLA on a GPU, where each of them works on a stream of its own.

Both give memory to other work of their own stream as soon as the host drops the last reference to it, although the
other may still use it. So values are copied, and the host waits until the work that uses the other's memory is done. A
wait for torch takes 10 us. An event that DLPack passes to XLA takes 0.2 to 0.4 ms, for XLA hands work with such an
input to threads of its own.
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
# Largest size in bytes of a tensor that becomes an array of XLA's by way of the host, which takes 0.05 ms for 64 bytes
# and 0.13 ms for 256 KB on an H100. The way by the GPU takes 0.2 to 0.3 ms.
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
        f"{what} on `{device}`, which JAX does not have here: its devices are {jax.local_devices()}. Move what is "
        "there: `x.cpu()`, or install JAX for this device."
    )


def wait_for_torch(device: torch.device) -> None:
    """Wait until a GPU has done the work of torch's current stream, which may use memory of XLA's."""
    torch.cuda.current_stream(device).synchronize()


def shared_with_torch(array: jax.Array) -> torch.Tensor:
    """Return a tensor over the memory of an array, once its values are there.

    Call :func:`wait_for_torch` before an array on a GPU is dropped.
    """
    return torch.utils.dlpack.from_dlpack(array.block_until_ready().__dlpack__())


def shared_with_xla(tensor: torch.Tensor) -> jax.Array:
    """Return an array over the memory of a contiguous tensor on a GPU, once its values are there."""
    wait_for_torch(tensor.device)
    with torch.cuda.device(tensor.device):  # torch exports from the current GPU alone
        return jax.dlpack.from_dlpack(_Ready(tensor))


class _Ready:
    """A tensor whose values are there, for DLPack: no stream need wait for them."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, **_: Any) -> Any:
        return self._tensor.__dlpack__(stream=-1)


def copied_to_xla(tensor: torch.Tensor, what: str = "A tensor is", *, committed: bool = True) -> jax.Array:
    """Return an array of the values of a tensor on a GPU, in memory of XLA's own, once they are there.

    Args:
        tensor: of any shape, strides and dtype that JAX has. Its dtype becomes the one that JAX has for it.
        what: the beginning of an error about its device.
        committed: whether the array is committed to its device.
    """
    device = gpu(tensor.device, what)
    if tensor.numel() * tensor.itemsize <= _BY_HOST:
        return array_on_device(to_canonical_numpy(tensor.detach().cpu()), device, committed=committed)
    dtype = canonical_dtype(numpy_dtype(tensor.dtype, "a tensor"))
    # Torch writes the values into a new array. It may hold NaN before, and is made where JAX traces, too.
    with jax.ensure_compile_time_eval(), jax.default_device(device), jax.debug_nans(False), jax.debug_infs(False):
        array = jax.lax.empty(tuple(tensor.shape), dtype)
    shared_with_torch(array).copy_(plain(tensor))
    wait_for_torch(tensor.device)
    return array_on_device(array, device, committed=True) if committed else array


def copied_to_torch(array: jax.Array) -> torch.Tensor:
    """Return a tensor of the values of an array on a GPU, in memory of torch's own.

    Call :func:`wait_for_torch` before the array is dropped.
    """
    return shared_with_torch(array).clone()
