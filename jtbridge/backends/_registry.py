"""The backends in the order `auto` prefers them, and the choice between them."""

from __future__ import annotations

import jax

from jtbridge.errors import BackendError

from ._base import Backend, BackendStatus
from ._callback import CallbackBackend
from ._dlpack import DlpackBackend
from ._translate import TritonBackend, XlaBackend

_BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (TritonBackend(), XlaBackend(), DlpackBackend(), CallbackBackend())
}


def backends(platform: str | None = None) -> tuple[BackendStatus, ...]:
    """All backends, in the order ``backend="auto"`` prefers them, each with whether it can run and why not.

    Args:
        platform: the XLA platform to ask about ("cpu", "cuda", "rocm", "tpu"); JAX's default one if left out.

    Example:
        >>> import jtbridge
        >>> [status.name for status in jtbridge.backends("cpu") if status.available]
        ['dlpack', 'callback']
    """
    platform = jax.default_backend() if platform is None else platform
    platform = "cuda" if platform == "gpu" else platform
    statuses = []
    for backend in _BACKENDS.values():
        reason = backend.unavailable(platform)
        statuses.append(BackendStatus(backend.name, backend.way, reason is None, reason or ""))
    return tuple(statuses)


def check_name(name: str) -> str:
    """Return a backend's name, or raise with the known ones if it is none."""
    if name != "auto" and name not in _BACKENDS:
        raise BackendError(f"There is no backend `{name}`. Known: auto, {_listing()}.")
    return name


def choose(name: str, platform: str) -> Backend:
    """The backend to use on a platform: the named one, or the first that can run for "auto"."""
    if name != "auto":
        backend = _BACKENDS[check_name(name)]
        reason = backend.unavailable(platform)
        if reason is None:
            return backend
        raise BackendError(
            f'Backend `{name}` cannot run on platform "{platform}": {reason}. Known: {_listing(platform)}.'
        )
    for backend in _BACKENDS.values():
        if backend.unavailable(platform) is None:
            return backend
    raise BackendError(f'No backend can run on platform "{platform}": {_listing(platform)}.')


def _listing(platform: str | None = None) -> str:
    return "; ".join(
        f"{status.name} ({'available' if status.available else status.reason})" for status in backends(platform)
    )
