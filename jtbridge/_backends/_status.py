"""The backends and whether each can run: :func:`jtbridge.backends`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class BackendStatus:
    """The status of one backend, as :func:`jtbridge.backends` returns it.

    Attributes:
        name: the value of ``backend=`` that selects the backend.
        kind: "translate" (the ATen graph becomes JAX operations) or "call" (torch runs inside the program).
        available: whether the backend can run on the platform, if it is asked for by name.
        reason: why the backend cannot run, or why ``backend="auto"`` does not use it; empty otherwise.
    """

    name: str
    kind: str
    available: bool
    reason: str
