"""Questions about backends that are asked before any backend is needed: the registry is imported to answer them."""

from __future__ import annotations

import jax

from ._status import BackendStatus


def backends(platform: str | None = None) -> tuple[BackendStatus, ...]:
    """Return all backends, in the order ``backend="auto"`` prefers them, each with whether it can run and why not.

    Args:
        platform: the XLA platform ("cpu", "cuda", "rocm", "tpu"); by default JAX's default platform.

    Example:
        >>> import jtbridge
        >>> [status.name for status in jtbridge.backends("cpu") if status.available]
        ['xla', 'dlpack', 'callback']
    """
    from ._registry import statuses  # imports the translation, which is slow

    return statuses(platform)


def check_name(name: str) -> str:
    """Return `name` if it is a backend's name or "auto".

    Raises:
        BackendError: no backend has this name; the message lists the known names.
    """
    if name != "auto":
        from ._registry import backend_named

        backend_named(name)
    return name


def translates(name: str) -> bool:
    """Return whether a backend, or "auto", may translate."""
    if name == "auto":
        return True
    from ._registry import backend_named

    return backend_named(name).kind == "translate"


def may_use_kernels(name: str) -> bool:
    """Return whether the programs of a backend, or of the backend that "auto" chooses, may contain Triton kernels."""
    if name == "auto":
        return True
    from ._registry import backend_named

    return backend_named(name).kernels


def uses_kernels(name: str) -> bool:
    """Return whether a program that a backend lowers for JAX's default platform contains Triton kernels."""
    from ._registry import backend_named, preferred

    return (preferred(jax.default_backend()) if name == "auto" else backend_named(name)).kernels
