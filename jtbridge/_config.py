"""Settings that hold for a block of code: :func:`jtbridge.config`."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from .backends import check_name

_BACKEND: contextvars.ContextVar[str | None] = contextvars.ContextVar("jtbridge_backend", default=None)


@contextlib.contextmanager
def config(*, backend: str) -> Iterator[None]:
    """Use one backend for every wrapped function that is called or traced inside the block.

    It comes before the ``backend=`` of :func:`jtbridge.wrap`. A program that was compiled before keeps its own.

    Args:
        backend: "auto" or a name of :func:`jtbridge.backends`.

    Raises:
        BackendError: there is no such backend; the message lists the known ones.

    Example:
        >>> import jax.numpy as jnp, jtbridge, torch
        >>> f = jtbridge.wrap(torch.sin)
        >>> with jtbridge.config(backend="callback"):
        ...     y = f(jnp.zeros(3))
    """
    token = _BACKEND.set(check_name(backend))
    try:
        yield
    finally:
        _BACKEND.reset(token)


def backend_or(default: str) -> str:
    """The backend of the enclosing :func:`config` block, else `default`."""
    return _BACKEND.get() or default
