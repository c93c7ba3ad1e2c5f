"""The backends and whether each can run: :func:`jtbridge.backends`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class BackendStatus:
    """The status of one backend, as :func:`jtbridge.backends` returns it.

    Attributes:
        name: the value of ``backend=`` that selects the backend.
        kind: "translate" (the ATen graph becomes JAX operations) or "call" (torch runs inside the program).
        available: whether the backend can run on the platform.
        reason: why the backend cannot run; empty if it is available.
    """

    name: str
    kind: str
    available: bool
    reason: str


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
