"""Queries about backends. This file is fast to import, because it imports the registry only to answer a query."""

from __future__ import annotations

import types

import jax
import torch

from jtbridge.core.devices import default_platform
from jtbridge.core.gpu_memory import GPU_PLATFORMS
from jtbridge.core.imports import import_whole
from jtbridge.errors import ArgumentError

from ._status import BackendStatus


def backends(platform: str | None = None) -> tuple[BackendStatus, ...]:
    """Return all backends, in the order ``backend="auto"`` prefers them, each with whether it can run and why not.

    Args:
        platform: the XLA platform ("cpu", "cuda", "rocm", "gpu", "tpu"); by default JAX's default platform.

    Raises:
        ArgumentError: there is no such platform.

    Example:
        >>> import jtbridge
        >>> {status.name: status.available for status in jtbridge.backends("cpu")}["triton"]
        False
    """
    if platform not in (None, "cpu", "tpu", *GPU_PLATFORMS, jax.default_backend()):
        raise ArgumentError(f"`platform` must be 'cpu', 'cuda', 'rocm', 'gpu' or 'tpu', but it is {platform!r}.")
    return _registry().statuses(platform)


def check_name(name: str) -> str:
    """Return `name` if it is a backend's name or "auto".

    Raises:
        BackendError: no backend has this name; the message lists the known names.
    """
    if name != "auto":
        _registry().backend_named(name)
    return name


def translates(name: str) -> bool:
    """Return whether a backend, or "auto", may translate."""
    if name == "auto":
        return True
    return _registry().backend_named(name).kind == "translate"


def may_use_kernels(name: str) -> bool:
    """Return whether the programs of a backend, or of the backend that "auto" chooses, may contain Triton kernels."""
    if name == "auto":
        return True
    return _registry().backend_named(name).uses_kernels


def uses_kernels(name: str) -> bool:
    """Return whether a program that a backend lowers for JAX's default platform contains Triton kernels."""
    registry = _registry()
    return (registry.preferred(jax.default_backend()) if name == "auto" else registry.backend_named(name)).uses_kernels


def called_device(name: str) -> str:
    """Return the type of the device on which a backend, or "auto", is assumed to call functions: "cpu" or "cuda"."""
    if default_platform() not in GPU_PLATFORMS or not torch.cuda.is_available():
        return "cpu"
    return "cpu" if name != "auto" and _registry().backend_named(name).on_host else "cuda"


def _registry() -> types.ModuleType:
    import_whole(f"{__package__}._registry")
    from . import _registry  # imports the translation, which is slow

    return _registry
