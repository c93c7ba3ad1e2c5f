"""Triton and jax-triton, where they are installed: neither is imported before it is used."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax


@functools.cache
def unavailable() -> str | None:
    """Why no Triton kernel can be used here; None if it can."""
    for module, package in (("triton", "triton"), ("jax_triton", "jax-triton")):
        if importlib.util.find_spec(module) is None:
            return f"`{package}` is not installed"
    try:
        _jax_triton()
    except Exception as error:  # noqa: BLE001  (a broken installation costs nothing but the backend)
        lines = str(error).strip().splitlines()
        return f"jax-triton cannot be imported: {type(error).__name__}: {lines[0] if lines else ''}"
    return None


def triton_call(
    kernel: Any,
    operands: Sequence[Any],
    *,
    out_types: Sequence[jax.ShapeDtypeStruct],
    grid: Any,
    constants: Mapping[str, Any],
    num_warps: int,
    num_stages: int,
) -> list[jax.Array]:
    """What a Triton kernel writes, as ``jax_triton.triton_call`` has it, under a scope of the kernel's name."""
    name = kernel_name(kernel)
    with jax.named_scope(name):
        return _jax_triton().triton_call(
            *operands,
            kernel=kernel,
            out_shape=list(out_types),
            grid=grid,
            name=name,
            num_warps=num_warps,
            num_stages=num_stages,
            **constants,
        )


def kernel_name(kernel: Any) -> str:
    """The name of the Python function that a kernel was made of."""
    while not hasattr(kernel, "__name__"):
        kernel = kernel.fn
    return kernel.__name__


def _jax_triton() -> Any:
    """The module, whose import sets ``TRITON_CACHE_DIR`` to nothing (0.3.1 does): put back what it was."""
    before = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax_triton
    finally:
        if before is None:
            os.environ.pop("TRITON_CACHE_DIR", None)
        else:
            os.environ["TRITON_CACHE_DIR"] = before
    return jax_triton
