"""Transfers of arrays to torch and back, for each dtype and device; and torch's float16 products on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jtbridge.core.backend_names import ON_HOST
from jtbridge.core.convert import to_jax, to_torch
from jtbridge.diagnosis._checks import Check, expect
from jtbridge.diagnosis._child import first_lines
from jtbridge.diagnosis._report import FAILURE, NOTE, OK, Finding

_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
)
_FIX = f'Report it with the versions above. `backend="{ON_HOST}"` does without DLPack.'


def _round_trips() -> Sequence[Finding]:
    devices = dict.fromkeys([jax.devices()[0], jax.devices("cpu")[0]])
    return [finding for device in devices for finding in _of_device(device)]


def _of_device(device: Any) -> Sequence[Finding]:
    if device.platform != "cpu" and not torch.cuda.is_available():
        return [Finding("dlpack", device.platform, NOTE, "torch has no such device: arrays cross by way of the host")]
    good, bad = [], []
    for dtype in _DTYPES:
        try:
            _round_trip(device, dtype)
            good.append(dtype)
        except Exception as error:  # noqa: BLE001  (each dtype is tried)
            bad.append(Finding("dlpack", f"{device.platform} {dtype}", FAILURE, first_lines(error), _FIX))
    text = f"to torch and back, without a copy: {', '.join(good)}"
    return ([Finding("dlpack", device.platform, OK, text)] if good else []) + bad


def _round_trip(device: Any, dtype: str) -> None:
    """Take an array to torch and back. Check that the tensor is not a copy, and that the bytes come back unchanged."""
    with jax.enable_x64(True):
        x = jax.device_put(np.array([[0, 1, 2], [3, 1, 0]]).astype(jnp.dtype(dtype)), device)
        tensor = to_torch(x)
        if tensor.device.type != ("cpu" if device.platform == "cpu" else "cuda"):
            raise RuntimeError(f"the tensor is on {tensor.device}")
        if tensor.data_ptr() != x.unsafe_buffer_pointer():
            raise RuntimeError("the tensor is a copy")
        back = to_jax(tensor)
        if np.asarray(back).tobytes() != np.asarray(x).tobytes() or back.dtype != x.dtype:
            raise RuntimeError(f"came back as {back}")


def _half_products() -> Sequence[Finding]:
    generator = np.random.default_rng(0)
    for m, k, n in ((1, 64, 64), (7, 33, 65), (64, 64, 64), (128, 256, 32)):
        a, b = (generator.standard_normal(shape).astype(np.float16) for shape in ((m, k), (k, n)))
        want = a.astype(np.float64) @ b.astype(np.float64)
        expect((torch.from_numpy(a) @ torch.from_numpy(b)).double().numpy() / k**0.5, want / k**0.5, 5e-3)
    return [Finding("arithmetic", "float16 products of torch", OK, "right for four sizes, on a CPU")]


CHECKS = (
    Check("dlpack", "round trips", _round_trips, "calls", _FIX),
    Check("arithmetic", "float16 products of torch", _half_products, "calls", "Use another version of torch."),
)
