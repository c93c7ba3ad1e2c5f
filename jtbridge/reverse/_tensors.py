"""Conversion of tensors to arrays and of arrays to tensors, around a run of a JAX function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
import torch.utils.dlpack

from jtbridge._compat import SharedTensor, array_on_device, has_own_dispatch, plain
from jtbridge.core.devices import default_device
from jtbridge.core.dtypes import carrier, torch_dtype
from jtbridge.core.gpu_memory import copied_to_torch, gpu, shared_with_xla, wait_for_torch
from jtbridge.core.host_memory import shared_numpy
from jtbridge.errors import DeviceError

# Smallest size in bytes of a result whose memory a tensor takes over. DLPack takes 20 us, and a copy of 16 floats 2 us.
_MIN_TAKEN_OVER = 1 << 16


def common_device(tensors: Sequence[torch.Tensor], name: str) -> torch.device:
    """Return the device of some tensors; torch's default device if there are none.

    Raises:
        DeviceError: the tensors lie on several devices, or on one that JAX never has.
    """
    if not tensors:
        return torch.get_default_device()
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:
            raise DeviceError(
                f"The arguments of `{name}` lie on `{device}` and on `{tensor.device}`. A JAX function runs on one "
                f'device: move them, such as `x.to("{device}")`.'
            )
    if device.type not in ("cpu", "cuda", "meta"):
        raise DeviceError(
            f"The arguments of `{name}` lie on `{device}`, which JAX does not have. Move them: `x.cpu()`."
        )
    return device


def runs_program(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a call on tensors runs a program of JAX: with jit, and on values.

    A tensor on the meta device or of a class with `__torch_dispatch__`, such as a `FakeTensor`, may have no values.
    """
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        return False
    return not any(x.is_meta or has_own_dispatch(x) for x in tensors)


def jax_device(device: torch.device, name: str) -> jax.Device:  # type: ignore[valid-type]
    """Return JAX's device for a device of torch."""
    if device.type == "cpu":
        return jax.local_devices(backend="cpu")[0]
    return gpu(device, f"The arguments of `{name}` lie")


def to_operands(tensors: Sequence[torch.Tensor], device: jax.Device) -> list[Any]:  # type: ignore[valid-type]
    """Return tensors as arguments of a compiled function: arrays on `device`, for one run.

    The arrays share the memory of the tensors if possible.

    For a CPU that is JAX's default device they are NumPy arrays, which take a third of the time of JAX arrays. A
    transfer guard would refuse NumPy arrays. Without jit the function itself gets the arguments and may keep them, so
    they are copies.
    """
    config: Any = jax.config
    guarded = config.jax_transfer_guard_host_to_device not in (None, "allow")
    if config.jax_disable_jit:
        return [to_array(plain(tensor).clone(), device) for tensor in tensors]
    if guarded:
        return [to_array(tensor, device) for tensor in tensors]
    if device.platform == "cpu" and device == default_device():
        return [_contiguous_array(tensor) for tensor in tensors]
    return [to_array(tensor, device) for tensor in tensors]


def to_array(tensor: torch.Tensor, device: jax.Device) -> jax.Array:  # type: ignore[valid-type]
    """Return an array on `device` that shares the memory of a tensor if it can, for the time of one run."""
    if tensor.is_cpu:
        return array_on_device(_contiguous_array(tensor), device, committed=True)
    return shared_with_xla(plain(tensor).contiguous())


def _contiguous_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a NumPy array over the memory of a CPU tensor, which is copied first if it is not contiguous."""
    values = plain(tensor)
    if not values.is_contiguous():
        values = values.contiguous()
    return shared_numpy(values)


def to_tensors(arrays: Sequence[jax.Array], device: torch.device) -> list[torch.Tensor]:
    """Return tensors of the values of arrays to which nothing else refers."""
    tensors = [to_tensor(array, device) for array in arrays]
    if device.type != "cpu" and any(array.size for array in arrays):
        wait_for_torch(device)
    return tensors


def to_tensor(array: jax.Array, device: torch.device) -> torch.Tensor:
    """Return a tensor of the values of an array: over its memory, to which nothing else may refer, if it is large.

    An array on several devices is gathered.
    """
    dtype = torch_dtype(array.dtype, "a result")
    if not array.size:
        return torch.empty(array.shape, dtype=dtype, device=device)
    if device.type != "cpu":
        return copied_to_torch(array)
    carried = carrier(array.dtype)
    has_dlpack = (carried is None or array.dtype.itemsize > 1) and len(array.sharding.device_set) == 1  # no float8
    if array.nbytes < _MIN_TAKEN_OVER or not has_dlpack:
        # Torch's memory is aligned such that XLA need not copy it when it comes back; NumPy's is not.
        tensor = torch.empty(array.shape, dtype=dtype)
        values = np.asarray(array)
        if carried is None:
            np.copyto(tensor.numpy(), values)
        else:
            np.copyto(tensor.view(carried[1]).numpy(), values.view(carried[0]))
        return tensor
    return torch.utils.dlpack.from_dlpack(array.__dlpack__())


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a read-only tensor of :func:`jtbridge.to_torch` as a plain one; any other tensor as it is.

    A JAX function does not write to its arguments.
    """
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, SharedTensor) else tensor
