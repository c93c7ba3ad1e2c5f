"""Which backends there are, and which of them can run: :func:`jtbridge.backends`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class BackendStatus:
    """One line of :func:`jtbridge.backends`.

    Attributes:
        name: what to pass as ``backend=``.
        kind: "translate" (the ATen graph becomes JAX operations) or "call" (torch runs inside the program).
        available: whether it can run here.
        reason: why not; empty if it is available.
    """

    name: str
    kind: str
    available: bool
    reason: str


def backends(platform: str | None = None) -> tuple[BackendStatus, ...]:
    """All backends, in the order ``backend="auto"`` prefers them, each with whether it can run and why not.

    Args:
        platform: the XLA platform to ask about ("cpu", "cuda", "rocm", "tpu"); JAX's default one if left out.

    Example:
        >>> import jtbridge
        >>> [status.name for status in jtbridge.backends("cpu") if status.available]
        ['xla', 'dlpack', 'callback']
    """
    from ._registry import statuses  # imports all that translates

    return statuses(platform)


def check_name(name: str) -> str:
    """Return a backend's name, or "auto".

    Raises:
        BackendError: there is no such backend; the message lists the known ones.
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
