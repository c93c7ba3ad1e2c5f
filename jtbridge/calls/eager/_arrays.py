"""Conversion of arrays to tensors and of tensors to arrays, in about the time of a small torch operator."""

from __future__ import annotations

import contextlib
import sys
import weakref
from typing import Any

import jax
import numpy as np
import torch

from jtbridge._compat import array_on_device, can_replace_memory, is_lazy, is_shared
from jtbridge.core.array_types import as_tensor
from jtbridge.core.devices import default_device
from jtbridge.core.dtypes import carrier, torch_dtype
from jtbridge.core.gpu_memory import GPU_PLATFORMS, copied_to_xla, shared_with_torch, wait_for_torch
from jtbridge.core.host_memory import shared_numpy
from jtbridge.errors import DeviceError

# Largest size in bytes of an argument that is copied, so that torch code may write to it. For a larger argument torch
# gets a view, which is copied before the first write. The mode that detects the write takes 4 us per operator.
MAX_COPIED_BYTES = 1 << 18
# Smallest size in bytes of a result whose memory the array takes over, if nothing else refers to the memory.
_SHARED = 1 << 16


def is_copied(array: jax.Array) -> bool:
    """Return whether an argument is copied: a small one, and one whose memory cannot be replaced at the first write."""
    platform = _platform(array)
    return array.nbytes <= MAX_COPIED_BYTES or not can_replace_memory("cuda" if platform in GPU_PLATFORMS else "cpu")


def copied_tensor(array: jax.Array) -> torch.Tensor:
    """Return a tensor with a copy of the values of an array.

    A tangent or cotangent may lie on several devices although the arguments do not: its values are gathered.
    """
    if _platform(array) not in ("cpu", None):
        return shared_tensor(array).clone()
    memory = np.array(array)
    carried = carrier(memory.dtype)
    if carried is None:
        return torch.from_numpy(memory)
    return torch.from_numpy(memory.view(carried[0])).view(torch_dtype(memory.dtype, "an argument"))


def shared_tensor(array: jax.Array) -> torch.Tensor:
    """Return a tensor over the memory of an array. The tensor must not be written to."""
    platform = _platform(array)
    if platform is None:
        return copied_tensor(array)
    if not array.size:
        device = "cpu" if platform == "cpu" else "cuda"
        return torch.empty(array.shape, dtype=torch_dtype(array.dtype, "an argument"), device=device)
    return shared_with_torch(array)


def _platform(array: jax.Array) -> str | None:
    """Return the platform of the device of an array; None if the array lies on several devices."""
    return getattr(array.device, "platform", None)


def unshareable_reason(array: jax.Array) -> str | None:
    """Return why torch cannot share the memory of an array; None if it can."""
    if not array.is_fully_addressable or len(array.sharding.device_set) > 1:
        return "an argument lies on several devices"
    platform = array.device.platform  # type: ignore[attr-defined]
    if platform == "cpu":
        return None
    if platform not in GPU_PLATFORMS or not torch.cuda.is_available():
        return f'torch has no device for the JAX platform "{platform}" here'
    return None


def _is_of_torch_alone(storage: torch.UntypedStorage) -> bool:
    """Return whether torch allocated the memory of a storage, and no weak reference (of a cache) finds the storage."""
    return storage.resizable() and not weakref.getweakrefcount(storage)


class Placement:
    """The device of results: the device of the arguments. Results are committed to it if an argument is."""

    __slots__ = ("committed", "device")

    def __init__(self, arrays: list[jax.Array]):
        self.committed = False
        self.device: jax.Device | None = None  # type: ignore[valid-type]
        for array in arrays:
            if array.committed or self.device is None:
                self.device = array.device
                self.committed = array.committed
                if self.committed:
                    return

    def array(self, results: list[torch.Tensor], name: str) -> jax.Array:
        """Remove the last tensor from a list and return it as an array.

        A large tensor to which nothing else refers gives its memory to the array, if torch has allocated the memory.
        """
        tensor = results.pop()
        if type(tensor) is not torch.Tensor:
            as_tensor(tensor)  # raises for a subclass with its own operators, which a gradient may have too
        if not tensor.is_cpu:
            return self._on_gpu(tensor, name)
        size = tensor.numel() * tensor.itemsize
        owned = (
            size >= _SHARED
            and sys.getrefcount(tensor) == 2
            and not is_lazy(tensor)
            and tensor.untyped_storage().nbytes() == size  # the elements fill the storage
        )
        if owned:
            tensor = tensor.data  # not a view, which would keep its base alive
            owned = not is_shared(tensor) and _is_of_torch_alone(tensor.untyped_storage())
        values = tensor.detach() if tensor.requires_grad else tensor
        if not owned:
            values = values.clone(memory_format=torch.contiguous_format)
        return self._placed(shared_numpy(values.resolve_conj().resolve_neg().contiguous()))

    def copied(self, tensor: torch.Tensor, name: str) -> jax.Array:
        """Copy a tensor to a new array."""
        if not tensor.is_cpu:
            return self._on_gpu(tensor, name)
        return self.array([tensor.detach().clone(memory_format=torch.contiguous_format)], name)

    def release(self) -> None:
        """Wait until torch has read the arguments on a GPU, so that XLA may reuse their memory."""
        device: Any = self.device
        if device is not None and device.platform != "cpu":
            wait_for_torch(torch.device("cuda", device.local_hardware_id))

    def empty(self, shape: tuple[int, ...]) -> jax.Array:
        """Return a new array without elements, of dtype uint8."""
        return self._placed(np.empty(shape, np.uint8))

    def _on_gpu(self, tensor: torch.Tensor, name: str) -> jax.Array:
        what = f"A result of `{name}` lies"
        if tensor.device.type != "cuda":
            raise DeviceError(f"{what} on device `{tensor.device}`, which JAX does not have. Move it with `.cpu()`.")
        # A derivative has the dtype of its primal, which may have 64 bits although x64 is off now.
        with jax.enable_x64(True) if tensor.itemsize > 4 else contextlib.nullcontext():
            return copied_to_xla(tensor, what, committed=self.committed)

    def _placed(self, memory: np.ndarray) -> jax.Array:
        device = default_device() if self.device is None else self.device
        return array_on_device(memory, device, committed=self.committed)
