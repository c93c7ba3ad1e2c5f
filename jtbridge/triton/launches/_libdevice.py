"""Replacements in torch for NVIDIA's mathematical library (libdevice), which Triton's interpreter lacks."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def interpreted_library(value: Any) -> Any:
    """Return `value`, or its replacement if it is libdevice or one of its functions."""
    if isinstance(value, types.ModuleType) and value.__name__.endswith("libdevice"):
        return _Library(value)
    if getattr(value, "__module__", "").endswith("libdevice") and callable(value):
        return _libdevice_function(value.__name__)
    return value


class _Library:
    """The module libdevice with its functions replaced."""

    def __init__(self, module: types.ModuleType):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return interpreted_library(getattr(self._module, name))


def _half_away_from_zero(x: torch.Tensor) -> torch.Tensor:
    whole = x.trunc()
    return torch.where((x - whole).abs() >= 0.5, whole + x.sign(), whole)


# Libdevice's functions for which torch has no function of the same name and meaning. None: torch has no equivalent.
_TORCH_FUNCTIONS: dict[str, Callable[..., torch.Tensor] | None] = {
    "div_rn": torch.div,
    "fabs": torch.abs,
    "fast_cosf": torch.cos,
    "fast_dividef": torch.div,
    "fast_expf": torch.exp,
    "fast_log10f": torch.log10,
    "fast_log2f": torch.log2,
    "fast_logf": torch.log,
    "fast_powf": torch.pow,
    "fast_sinf": torch.sin,
    "fast_tanf": torch.tan,
    "fast_tanhf": torch.tanh,
    "j0": torch.special.bessel_j0,
    "j1": torch.special.bessel_j1,
    "nearbyint": torch.round,
    "normcdf": torch.special.ndtr,
    "normcdfinv": torch.special.ndtri,
    "remainder": None,
    "rint": torch.round,
    "round": _half_away_from_zero,
    "sqrt_rn": torch.sqrt,
    "y0": torch.special.bessel_y0,
    "y1": torch.special.bessel_y1,
}


def _libdevice_function(name: str) -> Any:
    function = _TORCH_FUNCTIONS[name] if name in _TORCH_FUNCTIONS else getattr(torch, name, None)

    def call(*args: Any) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        if function is None:
            raise NotImplementedError(f"libdevice.{name} cannot be interpreted on a CPU")
        values = [torch.from_numpy(x.handle.data) if isinstance(x, tl.tensor) else torch.tensor(x) for x in args]
        found = function(*values).numpy()
        like: Any = max((x for x in args if isinstance(x, tl.tensor)), key=lambda x: x.handle.data.size)
        dtype = like.dtype.scalar
        if found.dtype == bool:  # Triton converts libdevice's integers to truth values, except `signbit`'s
            dtype, found = (tl.int32, found.astype(np.int32)) if name == "signbit" else (tl.int1, found)
        type_ = tl.block_type(dtype, list(like.type.shape)) if like.type.is_block() else dtype
        return tl.tensor(TensorHandle(found, dtype), type_)

    return call
